"""Layer norm, RMS norm, softmax and log-softmax (csrc/ops/rows/rows.h) for PyTorch: fake kernels,
derivatives, batching rules, autocast.

Gradients are kernels of their own. Tangents, and gradients that are themselves differentiated, are
made of PyTorch's ops.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from torch_cubin._ops import autograd, checks, raw_ops, row_rules
from torch_cubin._ops.row_rules import (
    autocast_to_float,
    by_formula,
    each,
    each_rule,
    real,
    rule_in_float,
    statistics_dtype,
)
from torch_cubin._ops.vmap import front
from torch_cubin._pytorch import dispatch_keys, operators, transforms

norm = torch.ops.cubin._norm_autograd.default
norm_backward = torch.ops.cubin._norm_backward_autograd.default
softmax = torch.ops.cubin._softmax_autograd.default
softmax_backward = torch.ops.cubin._softmax_backward_autograd.default


def _norm_name(residual: Tensor | None, centered: bool) -> str:
    return "layer_norm" if centered else "rms_norm" if residual is None else "add_rms_norm"


def _check_norm(
    input: Tensor,
    residual: Tensor | None,
    normalized_shape: Sequence[int],
    weight: Tensor | None,
    bias: Tensor | None,
    centered: bool,
    dims: Sequence[int | None] = (None,) * 4,
) -> None:
    name = _norm_name(residual, centered)
    tensors = {"input": input, "residual": residual, "weight": weight, "bias": bias}
    described_ = {}
    for (argument, tensor), dim in zip(tensors.items(), dims, strict=True):
        if tensor is not None:
            checks.check_dense(name, argument, tensor)
            described_[argument] = checks.described(tensor, dim)
    call = {"op": name, "normalized_shape": list(normalized_shape), "tensors": described_}
    checks.ask("rows", call)


def _fake_norm(
    input: Tensor,
    residual: Tensor | None,
    normalized_shape: Sequence[int],
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float | None,
    centered: bool,
) -> tuple[Tensor, ...]:
    _check_norm(input, residual, normalized_shape, weight, bias, centered)
    dims = len(normalized_shape)
    each = [*input.shape[: input.dim() - dims], *[1] * dims]
    dtype = statistics_dtype(input)
    return (
        input.new_empty(input.shape),
        input.new_empty(0 if residual is None else input.shape),
        input.new_empty(each if centered else 0, dtype=dtype),
        input.new_empty(each, dtype=dtype),
    )


def _fake_norm_backward(
    grad_out: Tensor,
    grad_sum: Tensor | None,
    x: Tensor,
    mean: Tensor,
    rstd: Tensor,
    weight: Tensor | None,
    dims: int,
    eps: float | None,
    centered: bool,
    needs_weight: bool,
    bias_dtype: torch.dtype | None,
) -> tuple[Tensor, ...]:
    row = x.shape[x.dim() - dims :]
    weight_dtype = x.dtype if weight is None else weight.dtype
    return (
        x.new_empty(x.shape),
        x.new_empty(0 if weight is None or not needs_weight else row, dtype=weight_dtype),
        x.new_empty(0 if bias_dtype is None else row, dtype=bias_dtype or x.dtype),
    )


def _fake_softmax(input: Tensor, log: bool, dtype: torch.dtype) -> Tensor:
    name = "log_softmax" if log else "softmax"
    checks.check_dense(name, "input", input)
    described_ = {"input": checks.described(input)}
    wanted = str(dtype).removeprefix("torch.")
    checks.ask("rows", {"op": name, "tensors": described_, "dtype": wanted})
    return input.new_empty(input.shape, dtype=dtype)


def _fake_softmax_backward(
    grad_out: Tensor, output: Tensor, log: bool, dtype: torch.dtype
) -> Tensor:
    return output.new_empty(output.shape, dtype=dtype)


def _fake_row_sums(input: Tensor, kind: int, divisor: float, dtype: torch.dtype) -> Tensor:
    return input.new_empty(input.shape[:-1], dtype=dtype)


def _fake_scale_into(out: Tensor, factor: Tensor) -> None:
    pass


def _formula_of_rows(x: Tensor, dims: int, eps: float | None, centered: bool) -> tuple[Any, ...]:
    """Made of PyTorch's ops: x without weight and bias, its rstd, and the function that both
    derivatives apply to a tangent of x or a gradient of the result."""
    over = tuple(range(-dims, 0))
    values = real(x)
    if eps is None:
        eps = torch.finfo(values.dtype).eps
    if centered:
        values = values - values.mean(over, keepdim=True)
    rstd = torch.rsqrt(values.square().mean(over, keepdim=True) + eps)
    x_hat = values * rstd

    def derivative(y: Tensor) -> Tensor:
        out = y - x_hat * (y * x_hat).mean(over, keepdim=True)
        if centered:
            out = out - y.mean(over, keepdim=True)
        return out * rstd

    return x_hat, derivative


def _norm_backward_formula(
    grad_out: Tensor,
    grad_sum: Tensor | None,
    x: Tensor,
    mean: Tensor,
    rstd: Tensor,
    weight: Tensor | None,
    dims: int,
    eps: float | None,
    centered: bool,
    needs_weight: bool,
    bias_dtype: torch.dtype | None,
) -> tuple[Tensor, Tensor, Tensor]:
    x_hat, derivative = _formula_of_rows(x, dims, eps, centered)
    rows, grad, none = tuple(range(x.dim() - dims)), real(grad_out), x.new_empty(0)
    of_weight = of_bias = none

    def sum_of(tensor: Tensor, dtype: torch.dtype) -> Tensor:
        return (tensor.sum(rows) if rows else tensor).to(dtype)

    if weight is not None and needs_weight:
        of_weight = sum_of(grad * x_hat, weight.dtype)
    if bias_dtype is not None:
        of_bias = sum_of(grad, bias_dtype)
    of_x = derivative(grad if weight is None else grad * weight)
    if grad_sum is not None:
        of_x = of_x + grad_sum
    return of_x.to(x.dtype), of_weight, of_bias


def _softmax_backward_formula(
    grad_out: Tensor, output: Tensor, log: bool, dtype: torch.dtype
) -> Tensor:
    grad, y = real(grad_out), real(output)
    over = -1 if y.dim() else ()
    if log:
        return (grad - y.exp() * grad.sum(over, keepdim=True)).to(dtype)
    return (y * (grad - (y * grad).sum(over, keepdim=True))).to(dtype)


def _softmax_tangent(output: Tensor, tangent: Tensor, log: bool, dtype: torch.dtype) -> Tensor:
    y, tangent = real(output), real(tangent)
    over = -1 if y.dim() else ()
    if log:
        return (tangent - (y.exp() * tangent).sum(over, keepdim=True)).to(dtype)
    return (y * (tangent - (y * tangent).sum(over, keepdim=True))).to(dtype)


class _Norm(transforms.SingleLevelFunction):
    @staticmethod
    def forward(
        ctx: Any,
        made: list[Tensor],
        input: Tensor,
        residual: Tensor | None,
        weight: Tensor | None,
        bias: Tensor | None,
        normalized_shape: Sequence[int],
        eps: float | None,
        centered: bool,
    ) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.options = len(normalized_shape), eps, centered
        ctx.adds, ctx.bias_dtype = residual is not None, None if bias is None else bias.dtype
        args = (input, residual, normalized_shape, weight, bias, eps, centered)
        made += autograd.call_below_autograd(norm, *args)
        out, total, mean, rstd = made
        ctx.mark_non_differentiable(*(() if ctx.adds else (total,)), mean, rstd)
        ctx.save_for_backward(total if ctx.adds else input, mean, rstd, weight)
        ctx.save_for_forward(input, residual, weight)
        return out, total, mean, rstd

    @staticmethod
    def backward(
        ctx: Any, grad_out: Tensor | None, grad_sum: Tensor | None, *_: None
    ) -> tuple[Tensor | None, ...]:
        x, mean, rstd, weight = ctx.saved_tensors
        _, needs_input, needs_residual, needs_weight, needs_bias, *rest = ctx.needs_input_grad
        of_x, of_weight, of_bias = grad_sum, None, None
        if grad_out is not None:
            dims, eps, centered = ctx.options
            of_x, of_weight, of_bias = norm_backward(
                *(grad_out, grad_sum if ctx.adds else None, x, mean, rstd, weight),
                *(dims, eps, centered, needs_weight, ctx.bias_dtype if needs_bias else None),
            )
        return (
            None,
            of_x if needs_input else None,
            of_x if needs_residual else None,
            of_weight if needs_weight else None,
            of_bias if needs_bias else None,
            *(None for _ in rest),
        )

    @staticmethod
    def jvp(
        ctx: Any,
        _: None,
        input_t: Tensor | None,
        residual_t: Tensor | None,
        weight_t: Tensor | None,
        bias_t: Tensor | None,
        *rest: None,
    ) -> tuple[Tensor | None, ...]:
        with autograd._outer_levels():
            saved, residual, weight = ctx.saved_tensors
            input = total = autograd._primal(saved)
            if residual is not None:
                total = input + autograd._primal(residual)
            if weight is not None:
                weight = autograd._primal(weight)
            x_hat, derivative = _formula_of_rows(total, *ctx.options)
            parts = [x for x in (input_t, residual_t) if x is not None]
            total_t = sum(parts[1:], parts[0]) if parts else torch.zeros_like(total)
            out_t = derivative(real(total_t))
            if weight is not None:
                out_t = out_t * weight
            if weight_t is not None:
                out_t = out_t + x_hat * weight_t
            if bias_t is not None:
                out_t = out_t + bias_t
            return out_t.to(input.dtype), total_t if ctx.adds else None, None, None


class _Softmax(transforms.SingleLevelFunction):
    @staticmethod
    def forward(
        ctx: Any, made: list[Tensor], input: Tensor, log: bool, dtype: torch.dtype
    ) -> Tensor:
        ctx.set_materialize_grads(False)
        ctx.log, ctx.dtypes = log, (input.dtype, dtype)
        made.append(autograd.call_below_autograd(softmax, input, log, dtype))
        ctx.save_for_backward(made[0])
        ctx.save_for_forward(input)
        return made[0]

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None) -> tuple[Tensor | None, ...]:
        if grad is None:
            return (None,) * 4
        (output,) = ctx.saved_tensors
        return None, softmax_backward(grad, output, ctx.log, ctx.dtypes[0]), None, None

    @staticmethod
    def jvp(ctx: Any, _: None, tangent: Tensor, *rest: None) -> Tensor:
        with autograd._outer_levels():
            (input,) = map(autograd._primal, ctx.saved_tensors)
            output = (torch.log_softmax if ctx.log else torch.softmax)(real(input), -1)
            return _softmax_tangent(output, tangent, ctx.log, ctx.dtypes[1])


def _norm_autograd(
    input: Tensor,
    residual: Tensor | None,
    normalized_shape: Sequence[int],
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float | None,
    centered: bool,
) -> Any:
    def op(input: Tensor, residual: Any, weight: Any, bias: Any) -> Any:
        return norm(input, residual, normalized_shape, weight, bias, eps, centered)

    rest = (normalized_shape, eps, centered)
    return autograd.apply(_Norm, op, input, residual, weight, bias, rest=rest)


def _softmax_autograd(input: Tensor, log: bool, dtype: torch.dtype) -> Any:
    def op(input: Tensor) -> Any:
        return softmax(input, log, dtype)

    return autograd.apply(_Softmax, op, input, rest=(log, dtype))


# Batching rules: a batch of rows is more rows, unless gradients are summed over rows.


def _norm_rule(op: Any) -> Callable[..., Any]:
    def rule(info: Any, dims: Any, *args: Any) -> tuple[Any, Any]:
        input, residual, shape, weight, bias, eps, centered = args
        own = [dims[0], dims[1], dims[3], dims[4]]
        _check_norm(input, residual, shape, weight, bias, centered, own)
        if own[2] is not None or own[3] is not None:
            return each(op, info.batch_size, args, dims)
        sizes = checks.shape_of(input, own[0])
        input = front(input, own[0]).expand(info.batch_size, *sizes)
        if residual is not None:
            residual = front(residual, own[1]).expand(info.batch_size, *sizes)
        results = op(input, residual, shape, weight, bias, eps, centered)
        made = (True, residual is not None, centered, True)  # others have no elements
        return results, tuple(0 if each else None for each in made)

    return rule


def _softmax_rule(op: Any) -> Callable[..., Any]:
    def rule(
        info: Any, dims: Any, input: Tensor, log: bool, dtype: torch.dtype
    ) -> tuple[Tensor, int]:
        input = front(input, dims[0])
        if input.dim() == 1:  # a batch of single elements
            return op(input.unsqueeze(-1), log, dtype).squeeze(-1), 0
        return op(input, log, dtype), 0

    return rule


def _autocast_softmax(name: str) -> Callable[..., Any]:
    without_this_key = dispatch_keys.without_key("AutocastCUDA")

    def kernel(input: Tensor, dim: int, dtype: torch.dtype | None = None) -> Any:
        lower = input.device.type == "cuda" and input.dtype in (torch.float16, torch.bfloat16)
        if dtype is None and lower and not dispatch_keys.autocast_is_off():
            dtype = torch.float32
        with without_this_key():
            return raw_ops.overload(name)(input, dim, dtype)

    return kernel


def register(library: torch.library.Library) -> None:
    of_norm = by_formula(norm_backward, _norm_backward_formula)
    of_softmax = by_formula(softmax_backward, _softmax_backward_formula)
    for rules in (
        ("norm", _fake_norm, _norm_autograd, rule_in_float(_norm_rule)),
        ("norm_backward", _fake_norm_backward, of_norm, each_rule),
        ("softmax", _fake_softmax, _softmax_autograd, _softmax_rule),
        ("softmax_backward", _fake_softmax_backward, of_softmax, each_rule),
    ):
        row_rules.register(library, *rules)
    # Parts of other calls, without derivatives.
    operators.register_fake("cubin::_row_sums", _fake_row_sums, library)
    operators.register_fake("cubin::_scale_into", _fake_scale_into, library)
    if dispatch_keys.AUTOCAST.available:
        for name, kernel in (
            *((name, autocast_to_float) for name in ("rms_norm", "add_rms_norm", "layer_norm")),
            *((name, _autocast_softmax) for name in ("softmax", "log_softmax")),
        ):
            library.impl(name, kernel(name), "AutocastCUDA")
