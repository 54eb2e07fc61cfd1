"""float32 products follow torch's TF32 settings, old switches and new, also after compiling."""

from __future__ import annotations

import pytest

CALLS = ("matmul", "linear", "compiled", "compiled_eager")
EXPECTED = {
    "allow_tf32": {False: "ieee", True: "tf32"},
    "set_float32_matmul_precision": {"highest": "ieee", "high": "tf32", "medium": "tf32"},
    "fp32_precision": {"ieee": "ieee", "tf32": "tf32"},
    # In torch 2.11 the matmul switch overrides this one, in 2.13 it does not: we follow
    # torch.matmul in either case.
    "global_fp32_precision": {"ieee": "ieee", "tf32": None},
}


def _check(child, family: str) -> None:
    """torch.matmul itself shows that the setting means what we think."""
    steps = child.check()["steps"]
    assert len(steps) >= 3
    for step in steps:
        wanted = EXPECTED[family][step["setting"]] or step["torch"]
        answers = {name: step[name] for name in ("torch", *CALLS)}
        assert answers == dict.fromkeys(answers, wanted), f"{family} = {step['setting']}"


@pytest.mark.child("precision", "allow_tf32")
def test_allow_tf32(child) -> None:
    _check(child, "allow_tf32")


@pytest.mark.child("precision", "set_float32_matmul_precision")
def test_set_float32_matmul_precision(child) -> None:
    _check(child, "set_float32_matmul_precision")


@pytest.mark.child("precision", "fp32_precision")
def test_matmul_fp32_precision(child) -> None:
    _check(child, "fp32_precision")


@pytest.mark.child("precision", "global_fp32_precision")
def test_global_fp32_precision(child) -> None:
    _check(child, "global_fp32_precision")
