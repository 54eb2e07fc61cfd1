"""What tests of declared ops share: the committed kernels, and names that no other test has."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import torch

import torch_cubin

DATA = Path(__file__).resolve().parent / "data"
DECLARED = DATA / "declared.sm_90a.cuda130.cubin"
LAUNCH = DATA / "launch.sm_90a.cuda130.cubin"

_numbers = itertools.count()


def schema(text: str) -> str:
    """The schema with a name of its own: ops live as long as the process."""
    return f"declared_{next(_numbers)}::{text}"


VEC_ADD: dict[str, Any] = {
    "kernel": (LAUNCH, "vec_add"),
    "tensors": {"x": "float32[*s]", "y": "float32[*s]", "out": "float32[*s]"},
    "args": lambda x, y, out: (x, y, out, torch_cubin.int32(x.numel())),
    "grid": lambda x: torch_cubin.cdiv(x.numel(), 256),
    "block": 256,
}


def vec_add(**changes: Any) -> torch_cubin.Op:
    """x + y of any shape, with a CPU function."""
    return torch_cubin.define_op(
        changes.pop("schema", None) or schema("vec_add(Tensor x, Tensor y) -> Tensor"),
        **{"cpu": lambda x, y: x + y, **VEC_ADD, **changes},
    )


def blocks(x: Any) -> Any:
    """A grid for a thread an element, of blocks of 256."""
    return torch_cubin.cdiv(x.numel(), 256)


def cube(**changes: Any) -> torch_cubin.Op:
    """x cubed, with a CPU function."""
    return torch_cubin.define_op(
        changes.pop("schema", None) or schema("cube(Tensor x) -> Tensor"),
        **{
            "kernel": (DECLARED, "cube"),
            "tensors": {"x": "float32[*s]", "out": "float32[*s]"},
            "args": lambda x, out: (x, out, torch_cubin.int32(x.numel())),
            "grid": blocks,
            "block": 256,
            "cpu": lambda x: x**3,
            **changes,
        },
    )


def cube_backward(**changes: Any) -> torch_cubin.Op:
    """The derivative of cube, in the names that `backward=` wants."""
    return torch_cubin.define_op(
        changes.pop("schema", None)
        or schema("cube_backward(Tensor grad_out, Tensor x) -> (Tensor grad_x)"),
        kernel=(DECLARED, "cube_backward"),
        tensors={"grad_out": "float32[*s]", "x": "float32[*s]", "grad_x": "float32[*s]"},
        args=lambda grad_out, x, grad_x: (grad_out, x, grad_x, torch_cubin.int32(x.numel())),
        grid=blocks,
        block=256,
        cpu=lambda grad_out, x: 3 * x**2 * grad_out,
        **changes,
    )


def misaligned(*shape: int, device: str = "cpu") -> torch.Tensor:
    """A contiguous float32 tensor, 4 bytes past an aligned address."""
    count = torch.Size(shape).numel()
    return torch.randn(count + 1, device=device)[1:].view(shape)
