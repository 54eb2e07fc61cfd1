"""cubin::_expert_rows and _expert_sum (csrc/ops/experts/experts.h): tokens to their
experts and back, in layers that are differentiated.

Each is the other's derivative, so those of every order are calls of both.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from torch_cubin._ops import autograd, raw_ops
from torch_cubin._ops.batch_invariant import is_batch_invariant
from torch_cubin._ops.vmap import one_by_one, register_rule
from torch_cubin._pytorch import operators, transforms

rows_of = torch.ops.cubin._expert_rows_autograd.default
sum_of = torch.ops.cubin._expert_sum_autograd.default


def _fake_rows(x: Tensor, tokens: Tensor, order: Tensor, places: Tensor) -> Tensor:
    return x.new_empty((tokens.shape[0], x.shape[1]))


def _fake_sum(
    rows: Tensor, tokens: Tensor, order: Tensor, places: Tensor, weights: Tensor | None
) -> Tensor:
    return rows.new_empty((places.shape[0], rows.shape[1]))


class _ExpertRows(transforms.SingleLevelFunction):
    @staticmethod
    def forward(ctx: Any, made: list[Tensor], x: Tensor, *index: Tensor) -> Tensor:
        ctx.set_materialize_grads(False)
        ctx.batch_invariant = is_batch_invariant()
        ctx.save_for_backward(*index)
        ctx.save_for_forward(*index)
        made.append(autograd.call_below_autograd(rows_of, x, *index))
        return made[0]

    @staticmethod
    @autograd._as_forward
    def backward(ctx: Any, grad: Tensor | None) -> tuple[Tensor | None, ...]:
        of_x = None if grad is None else sum_of(grad, *ctx.saved_tensors, None)
        return None, of_x, None, None, None

    @staticmethod
    def jvp(ctx: Any, _: None, x_t: Tensor | None, *rest: None) -> Tensor | None:
        with autograd._outer_levels():
            return None if x_t is None else rows_of(x_t, *ctx.saved_tensors)


class _ExpertSum(transforms.SingleLevelFunction):
    @staticmethod
    def forward(
        ctx: Any,
        made: list[Tensor],
        rows: Tensor,
        tokens: Tensor,
        order: Tensor,
        places: Tensor,
        weights: Tensor | None,
    ) -> Tensor:
        ctx.set_materialize_grads(False)
        ctx.batch_invariant = is_batch_invariant()
        needs_weights = ctx.needs_input_grad[5]
        ctx.save_for_backward(rows if needs_weights else None, tokens, order, places, weights)
        ctx.save_for_forward(rows, tokens, order, places, weights)
        made.append(autograd.call_below_autograd(sum_of, rows, tokens, order, places, weights))
        return made[0]

    @staticmethod
    @autograd._as_forward
    def backward(ctx: Any, grad: Tensor | None) -> tuple[Tensor | None, ...]:
        rows, tokens, order, places, weights = ctx.saved_tensors
        if grad is None:
            return (None,) * 6
        skipped = (places.reshape(-1) < 0)[order].unsqueeze(-1)
        of_rows = rows_of(grad, tokens, order, places)
        of_weights = None
        if weights is not None and ctx.needs_input_grad[5]:
            products = (of_rows.to(weights.dtype) * rows).masked_fill(skipped, 0).sum(-1)
            of_weights = torch.zeros_like(products).scatter(0, order, products)
            of_weights = of_weights.to(weights.dtype).view(weights.shape)
        if ctx.needs_input_grad[1]:
            if weights is not None:
                of_rows = of_rows * weights.reshape(-1)[order].unsqueeze(-1)
            of_rows = of_rows.masked_fill(skipped, 0).to(grad.dtype)
        return None, of_rows, None, None, None, of_weights

    @staticmethod
    def jvp(ctx: Any, _: None, rows_t: Tensor | None, *rest: Tensor | None) -> Tensor | None:
        with autograd._outer_levels():
            rows, *index, weights = ctx.saved_tensors
            weights_t = rest[3]
            parts = []
            if rows_t is not None:
                by = None if weights is None else autograd._primal(weights)
                parts.append(sum_of(rows_t, *index, by))
            if weights_t is not None:
                parts.append(sum_of(autograd._primal(rows), *index, weights_t))
            return functools.reduce(torch.add, parts) if parts else None


def _rows_autograd(*args: Tensor) -> Any:
    return autograd.apply(_ExpertRows, rows_of, *args)


def _sum_autograd(*args: Tensor | None) -> Any:
    return autograd.apply(_ExpertSum, sum_of, *args)


def _rule(op: Any) -> Callable[..., Any]:
    def rule(info: Any, dims: tuple[int | None, ...], *args: Any) -> tuple[Tensor, int]:
        return one_by_one(op, info.batch_size, args, dims)

    return rule


def _register(
    library: torch.library.Library, op: str, fake: Callable[..., Any], kernel: Callable[..., Any]
) -> None:
    for name in raw_ops.raw_names(op):
        operators.register_fake(f"cubin::{name}", fake, library)
        register_rule(library, name, _rule)
    if transforms.DERIVATIVES.available:  # else no_derivatives.py refuses them
        library.impl(f"_{op}_autograd", kernel, "Autograd")


def register(library: torch.library.Library) -> None:
    _register(library, raw_ops.EXPERTS[0], _fake_rows, _rows_autograd)
    _register(library, raw_ops.EXPERTS[1], _fake_sum, _sum_autograd)
