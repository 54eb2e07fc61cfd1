"""linear_cross_entropy (csrc/ops/rows/linear_loss.cpp) for PyTorch: fake kernels, derivatives,
batching rules.

The gradients of a loss that is one number are computed with it, for a gradient of one, and are
scaled by the first backward in their own memory. A second backward, and those of other calls,
compute the logits once more.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from torch_cubin._ops import autograd, checks, raw_ops, row_rules
from torch_cubin._ops.batch_invariant import is_batch_invariant
from torch_cubin._ops.cross_entropy import check, refuse_derivative_of_weight, slopes
from torch_cubin._ops.row_rules import by_formula, each_rule, real, statistics_dtype
from torch_cubin._pytorch import dispatch_keys, transforms

NAME = "linear_cross_entropy"
_CAST = (torch.float32, torch.float16, torch.bfloat16)
op = torch.ops.cubin._linear_cross_entropy_autograd.default
backward = torch.ops.cubin._linear_cross_entropy_backward_autograd.default


def _fake(
    input: Tensor,
    linear_weight: Tensor,
    target: Tensor,
    linear_bias: Tensor | None,
    weight: Tensor | None,
    reduction: str,
    ignore_index: int,
    label_smoothing: float,
    dtype: torch.dtype,
    *needs: bool,
) -> tuple[Tensor, ...]:
    tensors = {"input": input, "linear_weight": linear_weight, "target": target}
    given = {**tensors, "linear_bias": linear_bias, "weight": weight}
    check(NAME, given, reduction, label_smoothing)
    checks.unify(input.shape[1], linear_weight.shape[1])
    checks.unify(input.shape[0], target.shape[0])
    for of_class in (linear_bias, weight):
        if of_class is not None:
            checks.unify(of_class.shape[0], linear_weight.shape[0])
    statistics, rows = statistics_dtype(input), input.shape[:1]
    reduced = reduction != "none"
    return (
        input.new_empty(() if reduced else rows, dtype=dtype),
        input.new_empty(() if reduced else (0,), dtype=statistics),
        *(input.new_empty(rows, dtype=statistics) for _ in range(2)),
        *_fake_gradients(input, linear_weight, *needs),
    )


def _fake_gradients(
    input: Tensor, linear_weight: Tensor, *needs: bool
) -> tuple[Tensor, Tensor, Tensor]:
    shapes = (input.shape, linear_weight.shape, linear_weight.shape[:1])
    of_input, of_weight, of_bias = (
        input.new_empty(shape if needed else (0,))
        for shape, needed in zip(shapes, needs, strict=True)
    )
    return of_input, of_weight, of_bias


def _fake_backward(grad: Tensor, input: Tensor, linear_weight: Tensor, *rest: Any) -> Any:
    return _fake_gradients(input, linear_weight, *rest[-3:])


def _backward_formula(
    grad: Tensor,
    input: Tensor,
    linear_weight: Tensor,
    target: Tensor,
    linear_bias: Tensor | None,
    weight: Tensor | None,
    total: Tensor,
    max: Tensor,
    log_sum: Tensor,
    reduction: str,
    ignore_index: int,
    label_smoothing: float,
    *needs: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    logits = F.linear(input, linear_weight, linear_bias)
    options = (reduction, ignore_index, label_smoothing)
    of_logits = grad.unsqueeze(-1) * slopes(logits, target, weight, *options)
    of_logits = of_logits.to(input.dtype)
    none = input.new_empty(0)
    return (
        of_logits @ linear_weight if needs[0] else none,
        of_logits.mT @ input if needs[1] else none,
        of_logits.sum(0) if needs[2] else none,
    )


def _scaled(gradient: Tensor, factor: Tensor) -> Tensor:
    """In the gradient's memory; our kernel, for calls without tracing, skips a factor of one."""
    if type(gradient) is Tensor and type(factor) is Tensor:
        torch.ops.cubin._scale_into(gradient, factor)
        return gradient
    return gradient.mul_(factor)


class _LinearCrossEntropy(transforms.SingleLevelFunction):
    @staticmethod
    def forward(
        ctx: Any,
        made: list[Tensor],
        input: Tensor,
        linear_weight: Tensor,
        target: Tensor,
        linear_bias: Tensor | None,
        weight: Tensor | None,
        *rest: Any,
    ) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.batch_invariant = is_batch_invariant()
        *ctx.options, ctx.dtype = rest[:4]
        needs = ctx.needs_input_grad
        asked = (
            can and need for can, need in zip(rest[4:], (needs[1], needs[2], needs[4]), strict=True)
        )
        tensors = (input, linear_weight, target, linear_bias, weight)
        made += autograd.call_below_autograd(op, *tensors, *ctx.options, ctx.dtype, *asked)
        loss, *others = made
        ctx.mark_non_differentiable(*others)
        ctx.save_for_backward(*tensors, *others[:3])
        ctx.grad_dtypes = statistics_dtype(input), input.dtype
        ctx.gradients = others[3:] if any(rest[4:]) else None
        ctx.save_for_forward(*tensors)
        return loss, *others

    @staticmethod
    @autograd._as_forward
    def backward(ctx: Any, grad: Tensor | None, *_: None) -> tuple[Tensor | None, ...]:
        needs = (ctx.needs_input_grad[1], ctx.needs_input_grad[2], ctx.needs_input_grad[4])
        results: list[Tensor | None] = [None] * 3
        if grad is not None:
            made, ctx.gradients = ctx.gradients, None
            transformed = transforms.transforms_active() or transforms.is_wrapped(grad)
            if grad.dtype not in ctx.grad_dtypes:  # the loss may have any
                grad = grad.to(ctx.grad_dtypes[0])
            if made is not None and not (torch.is_grad_enabled() or transformed):
                results = [
                    _scaled(x, grad) if need else None for x, need in zip(made, needs, strict=True)
                ]
            else:
                found = backward(grad, *ctx.saved_tensors, *ctx.options, *needs)
                results = [x if need else None for x, need in zip(found, needs, strict=True)]
        of_input, of_weight, of_bias = results
        nothing = (None,) * (len(ctx.needs_input_grad) - 5)
        return None, of_input, of_weight, None, of_bias, *nothing

    @staticmethod
    def jvp(
        ctx: Any,
        _: None,
        input_t: Tensor | None,
        weight_t: Tensor | None,
        target_t: None,
        bias_t: Tensor | None,
        *rest: None,
    ) -> tuple[Tensor | None, ...]:
        with autograd._outer_levels():
            input, linear_weight, target, bias, weight = ctx.saved_tensors
            input, linear_weight = map(autograd._primal, (input, linear_weight))
            bias = None if bias is None else autograd._primal(bias)
            logits = F.linear(input, linear_weight, bias)
            tangent = torch.zeros_like(real(logits))
            if input_t is not None:
                tangent = tangent + F.linear(input_t, linear_weight)
            if weight_t is not None:
                tangent = tangent + F.linear(input, weight_t)
            if bias_t is not None:
                tangent = tangent + bias_t
            out = (slopes(logits, target, weight, *ctx.options) * tangent).sum(-1)
            if ctx.options[0] != "none":
                out = out.sum()
            return out.to(ctx.dtype), *(None,) * 6


def _autograd(
    input: Tensor,
    linear_weight: Tensor,
    target: Tensor,
    linear_bias: Tensor | None,
    weight: Tensor | None,
    *rest: Any,
) -> Any:
    refuse_derivative_of_weight(NAME, weight)
    tensors = (input, linear_weight, target, linear_bias, weight)
    differentiated = transforms.transforms_active() or transforms.dual_level_is_open(
        *(tensor for tensor in tensors if tensor is not None)
    )
    if not (torch.is_grad_enabled() or differentiated):
        # A compiled graph, whose backward has the gradients that it asks for here, whatever its
        # tensors say: hidden states do not require a gradient in it, nor do casts of parameters.
        return autograd.call_below_autograd(op, *tensors, *rest)

    def call(*tensors: Any) -> Any:
        return op(*tensors, *rest[:4], False, False, False)

    return autograd.apply(_LinearCrossEntropy, call, *tensors, rest=rest)


def _under_autocast(device_type: str, key: str) -> Callable[..., Any]:
    without_this_key = dispatch_keys.without_key(key)

    def autocast(
        input: Tensor,
        linear_weight: Tensor,
        target: Tensor,
        *,
        linear_bias: Tensor | None = None,
        dtype: torch.dtype | None = None,
        **options: Any,
    ) -> Any:
        """Its products run in autocast's dtype, its loss is float32, like linear and
        cross_entropy."""
        if not dispatch_keys.autocast_is_off():
            lower = torch.get_autocast_dtype(device_type)

            def cast(tensor: Any) -> Any:
                known = isinstance(tensor, Tensor) and tensor.dtype in _CAST
                return tensor.to(lower) if known else tensor

            dtype = dtype or (torch.float32 if input.dtype in _CAST else None)
            input, linear_weight, linear_bias = map(cast, (input, linear_weight, linear_bias))
        with without_this_key():
            return raw_ops.overload(NAME)(
                *(input, linear_weight, target), linear_bias=linear_bias, dtype=dtype, **options
            )

    return autocast


def _raw_under_autocast(name: str, key: str, lower_of: str | None) -> Callable[..., Any]:
    """Of the ops below the public one, which vmap calls alone, and backward() in a region of
    autocast. Casts to autocast's dtype of that device type, unless it is None: gradients keep the
    dtype of what the forward saved."""
    without_this_key = dispatch_keys.without_key(key)

    def autocast(*args: Any) -> Any:
        if lower_of is not None and not dispatch_keys.autocast_is_off():
            lower = torch.get_autocast_dtype(lower_of)
            input, linear_weight, target, linear_bias, *rest = args
            if input.dtype in _CAST:
                bias = None if linear_bias is None else linear_bias.to(lower)
                # The loss has the input's dtype where a caller asked for none.
                rest = [torch.float32 if x is input.dtype else x for x in rest]
                args = (input.to(lower), linear_weight.to(lower), target, bias, *rest)
        with without_this_key():
            return raw_ops.overload(name)(*args)

    return autocast


def register(library: torch.library.Library) -> None:
    backward_kernel = by_formula(backward, _backward_formula)
    row_rules.register(library, NAME, _fake, _autograd, each_rule)
    row_rules.register(library, f"{NAME}_backward", _fake_backward, backward_kernel, each_rule)
    if dispatch_keys.AUTOCAST.available:
        for device_type, key in (("cuda", "AutocastCUDA"), ("cpu", "AutocastCPU")):
            library.impl(NAME, _under_autocast(device_type, key), key)
            for raw in raw_ops.raw_names(NAME):
                library.impl(raw, _raw_under_autocast(raw, key, device_type), key)
            for raw in raw_ops.raw_names(f"{NAME}_backward"):
                library.impl(raw, _raw_under_autocast(raw, key, None), key)
