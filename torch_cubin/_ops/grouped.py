"""grouped_matmul (csrc/ops/grouped/grouped.h): fake kernel, derivatives, batching rule.

Rows and contraction are each other's derivatives, so those of every order are calls of the op.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from torch_cubin._ops import autograd, checks, raw_ops
from torch_cubin._ops.batch_invariant import is_batch_invariant
from torch_cubin._ops.raw_ops import GROUPED as NAME
from torch_cubin._ops.vmap import one_by_one, register_rule
from torch_cubin._pytorch import operators, transforms

grouped = torch.ops.cubin._grouped_matmul_autograd.default


def _check(
    mat_a: Tensor, mat_b: Tensor, offs: Tensor, dims: Sequence[int | None] = (None, None, None)
) -> list[Any]:
    """Checks the arguments and returns the output's shape."""
    tensors = {"mat_a": mat_a, "mat_b": mat_b, "offs": offs}
    for name, tensor in tensors.items():
        checks.check_dense(NAME, name, tensor)
    pairs = list(zip(tensors.items(), dims, strict=True))
    described = {name: checks.described(tensor, dim) for (name, tensor), dim in pairs}
    checks.ask("check_grouped", described)
    a, b, ends = (checks.shape_of(tensor, dim) for (_, tensor), dim in pairs)
    checks.unify(a[1], b[-2])
    if len(b) == 2:
        return [ends[0], a[0], b[1]]
    checks.unify(ends[0], b[0])
    return [a[0], b[2]]


def _fake(mat_a: Tensor, mat_b: Tensor, offs: Tensor, zero_rest: bool) -> Tensor:
    return mat_a.new_empty(_check(mat_a, mat_b, offs))


class _GroupedMatmul(transforms.SingleLevelFunction):
    @staticmethod
    def forward(
        ctx: Any,
        made: list[Tensor],
        mat_a: Tensor,
        mat_b: Tensor,
        offs: Tensor,
        zero_rest: bool,
    ) -> Tensor:
        _, needs_a, needs_b, *_ = ctx.needs_input_grad
        ctx.set_materialize_grads(False)
        ctx.batch_invariant = is_batch_invariant()
        ctx.contracts, ctx.zero_rest = mat_b.dim() == 2, zero_rest
        ctx.b_is_transposed = not ctx.contracts and mat_b.stride(-2) == 1
        ctx.save_for_backward(mat_a if needs_b else None, mat_b if needs_a else None, offs)
        ctx.save_for_forward(mat_a, mat_b, offs)
        made.append(autograd.call_below_autograd(grouped, mat_a, mat_b, offs, zero_rest))
        return made[0]

    @staticmethod
    @autograd._as_forward
    def backward(ctx: Any, grad: Tensor | None) -> tuple[Tensor | None, ...]:
        mat_a, mat_b, offs = ctx.saved_tensors
        _, needs_a, needs_b, *_ = ctx.needs_input_grad
        grad_a = grad_b = None
        if grad is not None and needs_a:
            # Zero where the operand belongs to no group.
            if ctx.contracts:
                grad_a = grouped(mat_b, grad.mT, offs, True).mT
            else:
                grad_a = grouped(grad, mat_b.mT, offs, True)
        if grad is not None and needs_b:
            if ctx.b_is_transposed:  # as mat_b is, so that autograd copies it to no other layout
                grad_b = grouped(grad.mT, mat_a, offs, True).mT
            else:
                grad_b = grouped(mat_a.mT, grad, offs, True)
        return None, grad_a, grad_b, None, None

    @staticmethod
    def jvp(
        ctx: Any, _: None, a_t: Tensor | None, b_t: Tensor | None, *rest: None
    ) -> Tensor | None:
        with autograd._outer_levels():
            mat_a, mat_b, offs = ctx.saved_tensors
            mat_a, mat_b = autograd._primal(mat_a), autograd._primal(mat_b)
            parts = [
                grouped(a, b, offs, ctx.zero_rest)
                for a, b in ((a_t, mat_b), (mat_a, b_t))
                if a is not None and b is not None
            ]
            return functools.reduce(torch.add, parts) if parts else None


def _autograd(mat_a: Tensor, mat_b: Tensor, offs: Tensor, zero_rest: bool) -> Any:
    def op(*tensors: Tensor) -> Tensor:
        return grouped(*tensors, zero_rest)

    return autograd.apply(_GroupedMatmul, op, mat_a, mat_b, offs, rest=(zero_rest,))


def _rule(op: Any) -> Callable[..., Any]:
    def rule(
        info: Any,
        dims: tuple[int | None, ...],
        mat_a: Tensor,
        mat_b: Tensor,
        offs: Tensor,
        zero_rest: bool,
    ) -> tuple[Tensor, int]:
        _check(mat_a, mat_b, offs, dims[:3])

        def one(*tensors: Tensor) -> Tensor:
            return op(*tensors, zero_rest)

        return one_by_one(one, info.batch_size, (mat_a, mat_b, offs), dims[:3])

    return rule


def register(library: torch.library.Library) -> None:
    for name in raw_ops.raw_names(NAME):
        operators.register_fake(f"cubin::{name}", _fake, library)
        register_rule(library, name, _rule)
    if transforms.DERIVATIVES.available:  # else no_derivatives.py refuses them
        library.impl(f"_{NAME}_autograd", _autograd, "Autograd")
