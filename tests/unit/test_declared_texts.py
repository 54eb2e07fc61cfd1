"""Errors of declared ops' calls, and of their CPU functions: what they name."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import pytest
import torch

import torch_cubin
from torch_cubin import errors
from torch_cubin.__main__ import _by_flags

CUBIN = Path(__file__).resolve().parents[1] / "data" / "several.sm_90a.cuda130.cubin"
_count = iter(range(1_000_000))


def changes(cpu: Any, **more: Any) -> torch_cubin.Op:
    """An op that changes y."""
    return torch_cubin.define_op(
        f"test_texts_{next(_count)}::add(Tensor x, Tensor(a!) y) -> ()",
        kernel=f"{CUBIN}:vec_add",
        tensors={"x": "float32[n]", "y": "float32[n]"} | more,
        args=lambda x, y, n: (x, x, y, n),
        grid=1,
        block=64,
        cpu=cpu,
    )


def test_a_cpu_function_gets_memory_that_is_not_shared() -> None:
    ran = []
    op = changes(lambda x, y: ran.append(1))
    x = torch.zeros(64)
    for shared in ((x, x), (x[:32], x[16:48]), (x[16:48], x[:32])):
        with pytest.raises(errors.InputError, match="shares memory.*198031"):
            op(*shared)
    assert not ran
    op(x[:32], x[32:])
    op(x, torch.zeros(64))
    assert len(ran) == 2
    changes(lambda x, y: ran.append(1), y="float32[n] may_overlap")(x, x)
    assert len(ran) == 3


def test_under_compile_shared_memory_never_becomes_a_wrong_result() -> None:
    def add(x: torch.Tensor, y: torch.Tensor) -> None:
        y.add_(x)

    op = changes(add)
    x = torch.ones(64)
    # PyTorch gives the op a copy of what it changes; where that copy is dropped, the call raises.
    torch.compile(lambda a: op(a, a.view(-1)), backend="aot_eager")(x)
    assert torch.equal(x, torch.full((64,), 2.0))


def test_the_command_line_names_its_flags() -> None:
    options = argparse.Namespace(overwrite=False, num_warps=None, run=None)
    text = "an empty folder, or overwrite=True. num_warps=, num_stages=; (x.overwrite=True)"
    assert _by_flags(text, options) == (
        "an empty folder, or --overwrite. --num-warps, num_stages=; (x.overwrite=True)"
    )
