"""What tests of declared ops share: ops of the committed kernels, with names of their own."""

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
    """The derivative of cube, with the names that `backward=` requires."""
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


def cube_with_formula() -> torch_cubin.Op:
    """Cube, with a backward of PyTorch's ops: derivatives of every order."""
    op = cube()
    op.register_autograd(
        lambda ctx, g: 3 * ctx.saved_tensors[0] ** 2 * g,
        setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs),
    )
    return op


def cube_with_backward_op() -> torch_cubin.Op:
    """Cube, whose backward is another declared op: first derivatives alone."""
    return cube(backward=cube_backward().name)


def _affine(x, bias, factor, offset=None, *, relu, mode, dtype) -> torch.Tensor:
    out = x * factor + (offset or 0) + (100 if dtype == torch.float16 else 0)
    out = out if bias is None else out + bias
    out = -out if mode == "negative" else out
    return out.relu() if relu else out


def affine() -> torch_cubin.Op:
    """Every kind of argument; a dtype of float16 adds 100."""
    return torch_cubin.define_op(
        schema(
            "affine(Tensor x, Tensor? bias, float factor, int? offset=None, *, bool relu=False,"
            " str mode='plain', ScalarType dtype=float32) -> Tensor"
        ),
        kernel=(DECLARED, "affine"),
        tensors={"x": "float32[m, n]", "bias": "float32[m, n]", "out": "float32[m, n]"},
        args=lambda x, bias, out, factor, offset, relu, mode, dtype, m, n: (
            x,
            bias,
            out,
            factor,
            torch_cubin.select(offset.defined, offset, 0)
            + torch_cubin.select(dtype == torch.float16, 100, 0),
            relu,
            torch_cubin.select(mode == "negative", 1, 0),
            torch_cubin.int32(m * n),
        ),
        grid=blocks,
        block=256,
        cpu=_affine,
    )


def axpy() -> torch_cubin.Op:
    """y += alpha x, in place."""
    return torch_cubin.define_op(
        schema("axpy(Tensor x, Tensor(a!) y, float alpha) -> ()"),
        kernel=(DECLARED, "axpy"),
        tensors={"x": "float32[*s]", "y": "float32[*s]"},
        args=lambda x, y, alpha: (alpha, x, y, torch_cubin.int32(x.numel())),
        grid=blocks,
        block=256,
        cpu=lambda x, y, alpha: [y.add_(x, alpha=alpha)][1:] or None,
    )


def repeat() -> torch_cubin.Op:
    """x beside itself: an output whose shape is computed."""
    return torch_cubin.define_op(
        schema("repeat(Tensor x) -> Tensor"),
        kernel=(DECLARED, "repeat_columns"),
        tensors={"x": "float32[m, k]", "out": "float32[m, 2 * k]"},
        args=lambda x, out, m, k: (x, out, torch_cubin.int32(k), torch_cubin.int32(m * k)),
        grid=blocks,
        block=256,
        cpu=lambda x: x.repeat(1, 2),
    )


def copy_dense() -> torch_cubin.Op:
    """A copy with x's strides."""
    return torch_cubin.define_op(
        schema("copy(Tensor x) -> Tensor"),
        kernel=(DECLARED, "copy_32"),
        tensors={"x": "float32[*s] dense", "out": torch_cubin.like("x")},
        args=lambda x, out: (x, out, x.numel()),
        grid=blocks,
        block=256,
        cpu=lambda x: x.clone(),
    )


def misaligned(*shape: int, device: str = "cpu") -> torch.Tensor:
    """A contiguous float32 tensor, 4 bytes past an aligned address."""
    count = torch.Size(shape).numel()
    return torch.randn(count + 1, device=device)[1:].view(shape)


def small(*shape: int) -> torch.Tensor:
    """Small integers as float32, on a GPU: sums are exact."""
    return torch.randint(-9, 10, shape, device="cuda").float()
