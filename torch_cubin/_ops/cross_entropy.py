"""cross_entropy (csrc/ops/rows/rows.h) for PyTorch: fake kernels, derivatives, batching rules.

The gradient is a kernel of its own, except where it is itself differentiated.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from torch_cubin._ops import autograd, checks, row_rules
from torch_cubin._ops.row_rules import (
    autocast_to_float,
    by_formula,
    each_rule,
    real,
    rule_in_float,
    statistics_dtype,
)
from torch_cubin._pytorch import dispatch_keys, transforms

NAME = "cross_entropy"
op = torch.ops.cubin._cross_entropy_autograd.default
backward = torch.ops.cubin._cross_entropy_backward_autograd.default


def check(
    name: str, tensors: dict[str, Tensor | None], reduction: str, label_smoothing: float
) -> None:
    described = {}
    for argument, tensor in tensors.items():
        if tensor is not None:
            checks.check_dense(name, argument, tensor)
            described[argument] = checks.described(tensor)
    finite = abs(label_smoothing) < math.inf  # JSON has no other numbers
    smoothing = label_smoothing if finite else str(label_smoothing)
    options = {"reduction": reduction, "label_smoothing": smoothing}
    checks.ask("rows", {"op": name, "tensors": described, **options})


def _fake(
    input: Tensor,
    target: Tensor,
    weight: Tensor | None,
    reduction: str,
    ignore_index: int,
    label_smoothing: float,
    dtype: torch.dtype,
) -> tuple[Tensor, ...]:
    tensors = {"input": input, "target": target, "weight": weight}
    check(NAME, tensors, reduction, label_smoothing)
    for own, wanted in zip(target.shape, input.shape, strict=False):
        checks.unify(own, wanted)
    if weight is not None:
        checks.unify(weight.shape[0], input.shape[-1])
    statistics = statistics_dtype(input)
    return (
        target.new_empty(target.shape if reduction == "none" else (), dtype=dtype),
        target.new_empty((0,) if reduction == "none" else (), dtype=statistics),
        *(target.new_empty(target.shape, dtype=statistics) for _ in range(2)),
    )


def _fake_backward(grad: Tensor, input: Tensor, *_: Any) -> Tensor:
    return input.new_empty(input.shape)


def slopes(
    input: Tensor,
    target: Tensor,
    weight: Tensor | None,
    reduction: str,
    ignore_index: int,
    label_smoothing: float,
) -> Tensor:
    """Of each row's part of the loss with respect to the row, made of PyTorch's ops."""
    ignored = target == ignore_index
    safe = target.masked_fill(ignored, 0)
    probs = real(input).softmax(-1)
    weights = probs.new_ones(input.shape[-1]) if weight is None else real(weight)
    classes = torch.arange(input.shape[-1], device=input.device)
    own = weights[safe].masked_fill(ignored, 0)
    hit = (classes == safe.unsqueeze(-1)).to(probs.dtype)
    out = own.unsqueeze(-1) * (probs - hit) * (1 - label_smoothing)
    uniform = (weights.sum() * probs - weights) * (label_smoothing / input.shape[-1])
    out = out + uniform
    if reduction == "mean":
        out = out / own.sum()
    return out.masked_fill(ignored.unsqueeze(-1), 0)


def refuse_derivative_of_weight(name: str, weight: Tensor | None) -> None:
    if weight is not None and weight.requires_grad:
        wanted = "weights of classes that do not require grad"
        checks.fail(
            *(f"{name} argument 'weight'", "has no derivative", wanted, "requires_grad=True"),
            "Pass weight.detach().",
        )


def _backward_formula(
    grad: Tensor,
    input: Tensor,
    target: Tensor,
    weight: Tensor | None,
    total: Tensor,
    max: Tensor,
    log_sum: Tensor,
    *options: Any,
) -> Tensor:
    return (grad.unsqueeze(-1) * slopes(input, target, weight, *options)).to(input.dtype)


class _CrossEntropy(transforms.SingleLevelFunction):
    @staticmethod
    def forward(
        ctx: Any,
        made: list[Tensor],
        input: Tensor,
        target: Tensor,
        weight: Tensor | None,
        *options: Any,
    ) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        *ctx.options, _ = options  # without the result's dtype
        made += autograd.call_below_autograd(op, input, target, weight, *options)
        loss, *others = made
        ctx.mark_non_differentiable(*others)
        ctx.save_for_backward(input, target, weight, *others)
        ctx.save_for_forward(input, target, weight)
        return loss, *others

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None, *_: None) -> tuple[Tensor | None, ...]:
        nothing = (None,) * (len(ctx.options) + 3)
        if grad is None:
            return None, None, *nothing
        return None, backward(grad, *ctx.saved_tensors, *ctx.options), *nothing

    @staticmethod
    def jvp(ctx: Any, _: None, tangent: Tensor, *rest: None) -> tuple[Tensor | None, ...]:
        with autograd._outer_levels():
            saved, target, weight = ctx.saved_tensors
            input = autograd._primal(saved)
            parts = (slopes(input, target, weight, *ctx.options) * real(tangent)).sum(-1)
            out = parts if ctx.options[0] == "none" else parts.sum()
            return out.to(tangent.dtype), None, None, None


def _autograd(input: Tensor, target: Tensor, weight: Tensor | None, *options: Any) -> Any:
    refuse_derivative_of_weight(NAME, weight)

    def call(*tensors: Any) -> Any:
        return op(*tensors, *options)

    return autograd.apply(_CrossEntropy, call, input, target, weight, rest=options)


def register(library: torch.library.Library) -> None:
    backward_kernel = by_formula(backward, _backward_formula)
    row_rules.register(library, NAME, _fake, _autograd, rule_in_float(each_rule))
    row_rules.register(library, f"{NAME}_backward", _fake_backward, backward_kernel, each_rule)
    if dispatch_keys.AUTOCAST.available:
        library.impl(NAME, autocast_to_float(NAME), "AutocastCUDA")
