"""A reduced set of calls under compute-sanitizer, without the caching allocator. Every kernel has
its turn in `python tools/gpu_sanitize.py kernels`, whose record is last_sanitized.json.

Every tensor is then its own allocation that ends with its last element, so that memcheck sees
each byte read or written outside an operand.
"""

from __future__ import annotations

import os

import pytest
import torch
from gpu import run_child


def _check(child, calls: int) -> None:
    answer = child.check()  # the tool's exit status is 86 if it found anything
    assert answer["wrong"] == []
    assert answer["calls"] >= calls
    clean = ("ERROR SUMMARY: 0 errors", "RACECHECK SUMMARY: 0 hazards")  # synccheck's is the first
    assert any(summary in child.output for summary in clean), child.output


def _check_symmetric(child) -> None:
    if torch.cuda.get_device_capability() == (9, 0):
        symmetric = {name for name in run_child.kernel_names() if "sm90_symmetric" in name}
        assert symmetric
        assert symmetric <= set(child.kernels)


# A process for each dtype, side by side: in one they were what the whole suite waited for. The
# longest come first.
ATTENTION = [
    pytest.param(*x, marks=pytest.mark.child("attention_sanitize", *x[:2]))
    for x in (
        *(("racecheck", dtype, 30) for dtype in ("bfloat16", "float16", "float32", "float64")),
        ("memcheck", "bfloat16", 90),
        *(("memcheck", dtype, 20) for dtype in ("float16", "float32", "float64")),
        *((tool, "float8_e4m3fn", 20) for tool in ("racecheck", "memcheck")),
    )
]


@pytest.mark.parametrize(("tool", "dtype", "calls"), ATTENTION)
def test_attention(tool: str, dtype: str, calls: int, child) -> None:
    _check(child, calls)
    on_hopper = torch.cuda.get_device_capability()[0] == 9
    if on_hopper and dtype in ("bfloat16", "float16") and calls != 20:
        assert "sm90_backward_mask_attention" in child.kernels


@pytest.mark.parametrize(
    "tool",
    [pytest.param(tool, marks=pytest.mark.child("sanitize", tool)) for tool in
     ("memcheck", "racecheck")],
)  # fmt: skip
def test_products(tool: str, child) -> None:
    _check(child, 50)
    _check_symmetric(child)


@pytest.mark.child("symmetric_sanitize", "synccheck")
def test_synccheck_symmetric_products(child) -> None:
    _check(child, 90)
    _check_symmetric(child)


@pytest.mark.skipif(
    "TORCH_CUBIN_SLOW_TESTS" not in os.environ, reason="two minutes: TORCH_CUBIN_SLOW_TESTS=1"
)
@pytest.mark.child("sanitize", "initcheck")
def test_initcheck(child) -> None:
    _check(child, 50)


def _attention(tool: str, *dtypes: str) -> list:
    return [
        pytest.param(
            *(dtype, 20 if dtype == "float8_e4m3fn" else 90),
            marks=pytest.mark.child("attention_sanitize", tool, dtype),
        )
        for dtype in dtypes
    ]


@pytest.mark.parametrize(
    ("dtype", "calls"), _attention("synccheck", "bfloat16", "float16", "float8_e4m3fn")
)
def test_synccheck_attention(dtype: str, calls: int, child) -> None:
    _check(child, calls)
