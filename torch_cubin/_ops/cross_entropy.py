"""cross_entropy (csrc/ops/rows/rows.h) for PyTorch: fake kernels, derivatives, batching rules.

The raw op returns losses of rows; the public one reduces them by PyTorch's ops. The gradient is a
kernel of its own, except where it is itself differentiated.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from torch_cubin._ops import autograd, checks, raw_ops
from torch_cubin._ops.rows import autocast_to_float, by_formula, each_rule, real, statistics_dtype
from torch_cubin._ops.vmap import register_rule
from torch_cubin._pytorch import dispatch_keys, operators, transforms

NAME = "cross_entropy"
op = torch.ops.cubin._cross_entropy_autograd.default
backward = torch.ops.cubin._cross_entropy_backward_autograd.default


def _fake(
    input: Tensor, target: Tensor, ignore_index: int, label_smoothing: float
) -> tuple[Tensor, ...]:
    tensors = {"input": input, "target": target}
    for name, tensor in tensors.items():
        checks.check_dense(NAME, name, tensor)
    described = {name: checks.described(tensor) for name, tensor in tensors.items()}
    smoothing = str(label_smoothing) if label_smoothing != label_smoothing else label_smoothing
    checks.ask("check_rows", {"op": NAME, "tensors": described, "label_smoothing": smoothing})
    for own, wanted in zip(target.shape, input.shape, strict=False):
        checks.unify(own, wanted)
    dtype = statistics_dtype(input)
    return tuple(target.new_empty(target.shape, dtype=dtype) for _ in range(4))


def _fake_backward(
    grad_losses: Tensor,
    input: Tensor,
    target: Tensor,
    max: Tensor,
    log_sum: Tensor,
    ignore_index: int,
    label_smoothing: float,
) -> Tensor:
    return input.new_empty(input.shape)


def _slopes(
    input: Tensor, target: Tensor, logsumexp: Tensor, ignore_index: int, label_smoothing: float
) -> Tensor:
    """Of each loss with respect to its row, made of PyTorch's ops."""
    ignored = target == ignore_index
    safe = target.masked_fill(ignored, 0)
    classes = torch.arange(input.shape[-1], device=input.device)
    hit = (classes == safe.unsqueeze(-1)).to(logsumexp.dtype)
    out = (real(input) - logsumexp.unsqueeze(-1)).exp() - hit * (1 - label_smoothing)
    return (out - label_smoothing / input.shape[-1]).masked_fill(ignored.unsqueeze(-1), 0)


def _backward_formula(
    grad_losses: Tensor,
    input: Tensor,
    target: Tensor,
    max: Tensor,
    log_sum: Tensor,
    ignore_index: int,
    label_smoothing: float,
) -> Tensor:
    sums = real(input).logsumexp(-1)  # differentiable
    slopes = _slopes(input, target, sums, ignore_index, label_smoothing)
    return (grad_losses.unsqueeze(-1) * slopes).to(input.dtype)


class _CrossEntropy(transforms.SingleLevelFunction):
    @staticmethod
    def forward(
        ctx: Any,
        made: list[Tensor],
        input: Tensor,
        target: Tensor,
        ignore_index: int,
        label_smoothing: float,
    ) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.options = ignore_index, label_smoothing
        made += autograd.call_below_autograd(op, input, target, ignore_index, label_smoothing)
        losses, *others = made
        ctx.mark_non_differentiable(*others)
        ctx.save_for_backward(input, target, *others[1:])
        ctx.save_for_forward(input, target)
        return losses, *others

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None, *_: None) -> tuple[Tensor | None, ...]:
        if grad is None:
            return (None,) * 5
        return None, backward(grad, *ctx.saved_tensors, *ctx.options), None, None, None

    @staticmethod
    def jvp(ctx: Any, _: None, tangent: Tensor, *rest: None) -> tuple[Tensor | None, ...]:
        with autograd._outer_levels():
            saved, target = ctx.saved_tensors
            input = autograd._primal(saved)
            slopes = _slopes(input, target, real(input).logsumexp(-1), *ctx.options)
            return (slopes * real(tangent)).sum(-1), None, None, None


def _autograd(input: Tensor, target: Tensor, ignore_index: int, label_smoothing: float) -> Any:
    rest = (ignore_index, label_smoothing)

    def call(*tensors: Tensor) -> Any:
        return op(*tensors, *rest)

    return autograd.apply(_CrossEntropy, call, input, target, rest=rest)


def register(library: torch.library.Library) -> None:
    for name, fake, kernel in (
        (NAME, _fake, _autograd),
        (f"{NAME}_backward", _fake_backward, by_formula(backward, _backward_formula)),
    ):
        for raw in raw_ops.raw_names(name):
            operators.register_fake(f"cubin::{raw}", fake, library)
            register_rule(library, raw, each_rule)
        if transforms.DERIVATIVES.available:  # else no_derivatives.py refuses them
            library.impl(f"_{name}_autograd", kernel, "Autograd")
    if dispatch_keys.AUTOCAST.available:
        library.impl(NAME, autocast_to_float(NAME), "AutocastCUDA")
