"""cubin::syrk and cubin::symm_square (csrc/ops/matmul/symmetric.h) for PyTorch: fake kernels,
derivatives, batching rules.

The derivative is that of the definition: of the sum in the lower triangle, mirrored. So a gradient
with respect to `c` is a lower triangle, and one with respect to the symmetric argument of
symm_square need not be symmetric; its symmetric part is the gradient among symmetric matrices.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

from torch_cubin._ops import autograd, checks, raw_ops
from torch_cubin._ops.autograd import matmul
from torch_cubin._ops.batch_invariant import is_batch_invariant
from torch_cubin._ops.vmap import Dims, front, register_rule
from torch_cubin._pytorch import operators, transforms

_OPERANDS = {"syrk": "x", "symm_square": "a"}


def _fake(name: str) -> Any:
    def fake(
        operand: Tensor,
        c: Tensor | None = None,
        *,
        beta: float = 0,
        alpha: float = 1,
        out_dtype: torch.dtype | None = None,
    ) -> Tensor:
        shape = _check(name, operand, c, out_dtype)
        return operand.new_empty(shape, dtype=out_dtype or operand.dtype)

    return fake


def _check(
    name: str,
    operand: Tensor,
    c: Tensor | None,
    out_dtype: torch.dtype | None,
    dims: Dims = (None, None),
) -> list[int]:
    """Checks the arguments and returns the output's shape."""
    tensors = {_OPERANDS[name]: operand, "c": c}
    options = {} if out_dtype is None else {"out_dtype": str(out_dtype).removeprefix("torch.")}
    checks.check_product(name, dict(zip(tensors, dims, strict=True)), tensors, **options)
    own = checks.shape_of(operand, dims[0])
    if name == "symm_square":
        checks.unify(own[-1], own[-2])
    shape = [*own[:-1], own[-2]]
    if c is not None:
        checks.unify_addend(checks.shape_of(c, dims[1]), shape)
    return shape


def _mirrored(lower: Tensor) -> Tensor:
    return lower.tril() + lower.tril(-1).mT


class _Symmetric(transforms.SingleLevelFunction):
    @staticmethod
    def forward(
        ctx: Any,
        made: list[Tensor],
        operand: Tensor,
        c: Tensor | None,
        name: str,
        options: dict[str, Any],
    ) -> Tensor:
        ctx.set_materialize_grads(False)
        ctx.batch_invariant = is_batch_invariant()
        ctx.squares, ctx.options = name == "symm_square", options
        ctx.c = None if c is None else (c.shape, c.dtype)
        ctx.save_for_backward(operand if ctx.needs_input_grad[1] else None)
        ctx.save_for_forward(operand)
        op = raw_ops.overload(f"_{name}_autograd")
        made.append(autograd.call_below_autograd(op, operand, c, **options))
        return made[0]

    @staticmethod
    @autograd._as_forward
    def backward(ctx: Any, grad: Tensor | None) -> tuple[Tensor | None, ...]:
        if grad is None:
            return (None,) * 5
        (operand,) = ctx.saved_tensors
        _, needs_operand, needs_c, *_ = ctx.needs_input_grad
        lower = grad.tril() + grad.triu(1).mT
        of_operand = of_c = None
        if needs_c:
            shape, dtype = ctx.c
            beta = ctx.options["beta"]
            of_c = autograd._sum_to(autograd._scaled(lower, beta), shape).to(dtype)
        if needs_operand:
            if ctx.squares:
                lower = lower.to(operand.dtype)
                of_operand = matmul(lower, operand.mT) + matmul(operand.mT, lower)
            else:
                of_operand = matmul((lower + lower.mT).to(operand.dtype), operand)
            of_operand = autograd._scaled(of_operand, ctx.options["alpha"])
        return None, of_operand, of_c, None, None

    @staticmethod
    def jvp(
        ctx: Any, _: None, operand_t: Tensor | None, c_t: Tensor | None, *rest: None
    ) -> Tensor | None:
        with autograd._outer_levels():
            (operand,) = map(autograd._primal, ctx.saved_tensors)
            shape = operand.shape[:-1] + operand.shape[-2:-1]
            dtype = ctx.options["out_dtype"] or operand.dtype
            terms = []
            if operand_t is not None:
                if ctx.squares:
                    sums = matmul(operand_t, operand) + matmul(operand, operand_t)
                else:
                    half = matmul(operand_t, operand.mT)
                    sums = half + half.mT
                terms.append(autograd._scaled(sums, ctx.options["alpha"]).to(dtype))
            if c_t is not None:
                terms.append(autograd._scaled(c_t, ctx.options["beta"]).to(dtype).expand(shape))
            return _mirrored(sum(terms[1:], terms[0])) if terms else None


def _kernel(name: str) -> Any:
    op = raw_ops.overload(f"_{name}_autograd")

    def kernel(
        operand: Tensor,
        c: Tensor | None = None,
        *,
        beta: float = 0,
        alpha: float = 1,
        out_dtype: torch.dtype | None = None,
    ) -> Tensor:
        options = {"beta": beta, "alpha": alpha, "out_dtype": out_dtype}

        def run(*tensors: Tensor | None) -> Tensor:
            return op(*tensors, **options)

        return autograd.apply(_Symmetric, run, operand, c, rest=(name, options))

    return kernel


def _batched(name: str, op: Any) -> Any:
    def rule(
        info: Any,
        in_dims: Dims,
        operand: Tensor,
        c: Tensor | None = None,
        *,
        out_dtype: torch.dtype | None = None,
        **factors: float,
    ) -> tuple[Tensor, int]:
        operand_dim, c_dim = (*in_dims, None)[:2]  # an omitted c has no entry
        shape = _check(name, operand, c, out_dtype, (operand_dim, c_dim))
        own = checks.shape_of(operand, operand_dim)
        whole = front(operand, operand_dim).expand(info.batch_size, *own)
        if c is not None and c_dim is not None:
            c = c.movedim(c_dim, 0)
            c = c[(slice(None),) + (None,) * (len(shape) + 1 - c.dim())]
        return op(whole, c, out_dtype=out_dtype, **factors), 0

    return rule


def register(library: torch.library.Library) -> None:
    for name in raw_ops.SYMMETRIC:
        if transforms.DERIVATIVES.available:
            library.impl(f"_{name}_autograd", _kernel(name), "Autograd")
        for raw in raw_ops.raw_names(name):
            operators.register_fake(f"cubin::{raw}", _fake(name), library)
            register_rule(library, raw, functools.partial(_batched, name))
