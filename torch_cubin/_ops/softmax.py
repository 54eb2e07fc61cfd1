"""The private ops between the products of a composed attention, with all their derivatives.

`_attention_softmax` turns scores into probabilities, `_attention_softmax_backward` is its
derivative, `_attention_dropout` is linear. Each is one op with a kernel on its Autograd key, like
those of autograd.py. Forward and first order are kernels of ours; the derivative of the derivative
is composed of elementwise ops of torch, which have derivatives of every order.

    logit = softcap(scale * score) - slope * distance + mask      softcap(x) = c * tanh(x / c)
    prob = exp(logit - logsumexp)
    d score = d logit * slope of the softcap * scale,   d logit = prob * (grad - delta)
    delta = sum(prob * grad) - grad_logsumexp
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from torch_cubin._ops import autograd
from torch_cubin._ops.attention_checks import arguments_of
from torch_cubin._ops.vmap import of_every_op, one_by_one, register_rule
from torch_cubin._pytorch import operators, transforms

softmax = torch.ops.cubin._attention_softmax.default
softmax_backward = torch.ops.cubin._attention_softmax_backward.default
dropout = torch.ops.cubin._attention_dropout.default

# The names of the options that _attention_softmax takes after the scores, in its order.
OPTIONS = tuple(argument.name for argument in arguments_of("_attention_softmax")[1:])


def _softcap_slope(scores: Tensor | None, scale: float, softcap: float) -> Tensor | float:
    """The derivative of a scaled and capped score with respect to the score."""
    if softcap == 0:
        return scale
    assert scores is not None, "a call with a softcap saves its scores"
    return scale * (1 - (scores * (scale / softcap)).tanh().square())


def _primal_of_any(tensor: Any) -> Any:
    return None if tensor is None else autograd._primal(tensor)


def _distance(scores: Tensor) -> Tensor:
    """|i + columns - rows - j|, the distance in ALiBi."""
    rows, columns = scores.shape[-2:]
    i = torch.arange(rows, device=scores.device, dtype=scores.dtype)
    j = torch.arange(columns, device=scores.device, dtype=scores.dtype)
    return (i.unsqueeze(-1) + (columns - rows) - j).abs()


def _sum_rows(tensor: Tensor) -> Tensor:
    return tensor.sum(-1, keepdim=True)


def _sink_weight(sinks: Tensor, logsumexp: Tensor) -> Tensor:
    """The sink's weight in each row; 0 if a row has only a sink of -inf."""
    difference = sinks.unsqueeze(-1) - logsumexp
    return torch.where(logsumexp == -math.inf, -math.inf, difference).exp()


def sinks_gradient(sinks: Tensor, logsumexp: Tensor, delta: Tensor) -> Tensor:
    """The gradient of sinks (heads,), from logsumexp and delta (..., heads, rows).

    A row whose logsumexp is -inf contributes nothing, even if the gradient of its output is NaN.
    """
    of_rows = -_sink_weight(sinks, logsumexp) * delta
    of_rows = torch.where(logsumexp == -math.inf, 0, of_rows)
    return of_rows.sum_to_size((*sinks.shape, 1)).squeeze(-1).to(sinks.dtype)


class _Softmax(transforms.SingleLevelFunction):
    @staticmethod
    def forward(
        ctx: Any,
        made: list[Tensor],
        scores: Tensor,
        mask: Tensor | None,
        slopes: Tensor | None,
        sinks: Tensor | None,
        scale: float,
        softcap: float,
        *rest: Any,
    ) -> tuple[Tensor, Tensor]:
        ctx.set_materialize_grads(False)
        args = (scores, mask, slopes, sinks, scale, softcap, *rest)
        made += autograd.call_below_autograd(softmax, *args)
        probs, logsumexp = made
        ctx.scale, ctx.softcap = scale, softcap
        ctx.shapes = tuple(None if x is None else (x.shape, x.dtype) for x in (mask, slopes))
        raw = scores if softcap != 0 else None
        needed = (probs, raw, sinks, logsumexp if sinks is not None else None)
        ctx.save_for_backward(*needed)
        ctx.save_for_forward(*needed)
        return probs, logsumexp

    @staticmethod
    def backward(
        ctx: Any, grad: Tensor | None, grad_logsumexp: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        nothing = (None,) * (len(ctx.needs_input_grad) - 5)
        if grad is None and grad_logsumexp is None:
            return (None,) * 5 + nothing
        probs, scores, sinks, logsumexp = ctx.saved_tensors
        _, needs_scores, needs_mask, needs_slopes, needs_sinks = ctx.needs_input_grad[:5]
        if grad is None:
            grad = torch.zeros_like(probs)
        of_scores = of_mask = of_slopes = of_sinks = None
        if needs_scores:
            of_scores = softmax_backward(
                grad, probs, grad_logsumexp, scores, ctx.scale, ctx.softcap
            )
        if needs_mask or needs_slopes:
            of_logits = softmax_backward(grad, probs, grad_logsumexp, None, 1.0, 0.0)
        if needs_mask:
            shape, dtype = ctx.shapes[0]
            of_mask = of_logits.sum_to_size(shape).to(dtype)
        if needs_slopes:
            shape, dtype = ctx.shapes[1]
            of_slopes = -(of_logits * _distance(probs)).sum((-2, -1)).sum_to_size(shape).to(dtype)
        if needs_sinks:
            delta = (probs * grad).sum(-1)
            if grad_logsumexp is not None:
                delta = delta - grad_logsumexp
            of_sinks = sinks_gradient(sinks, logsumexp, delta)
        return None, of_scores, of_mask, of_slopes, of_sinks, *nothing

    @staticmethod
    def jvp(
        ctx: Any,
        _: None,
        scores_t: Tensor | None,
        mask_t: Tensor | None,
        slopes_t: Tensor | None,
        sinks_t: Tensor | None,
        *rest: None,
    ) -> tuple[Tensor | None, Tensor | None]:
        with autograd._outer_levels():
            probs, scores, sinks, logsumexp = ctx.saved_tensors
            scores, sinks = map(_primal_of_any, (scores, sinks))
            logits_t = torch.zeros_like(probs)
            if scores_t is not None:
                logits_t = logits_t + scores_t * _softcap_slope(scores, ctx.scale, ctx.softcap)
            if mask_t is not None:
                logits_t = logits_t + mask_t
            if slopes_t is not None:
                logits_t = logits_t - slopes_t[..., None, None] * _distance(probs)
            logsumexp_t = (probs * logits_t).sum(-1)
            sink_t = None
            if sinks_t is not None:
                sink_t = _sink_weight(sinks, logsumexp) * sinks_t.unsqueeze(-1)
                logsumexp_t = logsumexp_t + sink_t
            # The derivative is symmetric; the sink's term takes the place of grad_logsumexp.
            from_sinks = None if sink_t is None else -sink_t.to(probs.dtype)
            probs_t = softmax_backward(logits_t, probs, from_sinks, None, 1.0, 0.0)
            return probs_t, logsumexp_t.to(probs.dtype)


class _SoftmaxBackward(transforms.SingleLevelFunction):
    @staticmethod
    def forward(
        ctx: Any,
        made: list[Tensor],
        grad: Tensor,
        probs: Tensor,
        grad_logsumexp: Tensor | None,
        scores: Tensor | None,
        scale: float,
        softcap: float,
    ) -> Tensor:
        ctx.set_materialize_grads(False)
        ctx.scale, ctx.softcap = scale, softcap
        needed = (grad, probs, grad_logsumexp, scores)
        ctx.save_for_backward(*needed)
        ctx.save_for_forward(*needed)
        args = (grad, probs, grad_logsumexp, scores, scale, softcap)
        made.append(autograd.call_below_autograd(softmax_backward, *args))
        return made[0]

    @staticmethod
    def _centered(grad: Tensor, probs: Tensor, grad_logsumexp: Tensor | None) -> Tensor:
        """grad - delta."""
        centered = grad - _sum_rows(grad * probs)
        return centered if grad_logsumexp is None else centered + grad_logsumexp.unsqueeze(-1)

    @classmethod
    def _curvature(cls, ctx: Any, scores: Tensor) -> Tensor:
        """The second derivative of a scaled and capped score with respect to the score."""
        t = (scores * (ctx.scale / ctx.softcap)).tanh()
        return (-2 * ctx.scale * ctx.scale / ctx.softcap) * t * (1 - t.square())

    @staticmethod
    def backward(ctx: Any, outer: Tensor | None) -> tuple[Tensor | None, ...]:
        if outer is None:
            return (None,) * 7
        grad, probs, grad_logsumexp, scores = ctx.saved_tensors
        _, needs_grad, needs_probs, needs_sum, needs_scores, *_ = ctx.needs_input_grad
        by_logit = outer * _softcap_slope(scores, ctx.scale, ctx.softcap)
        total = _sum_rows(by_logit * probs)
        of_grad = of_probs = of_sum = of_scores = None
        if needs_grad:
            of_grad = probs * (by_logit - total)
        if needs_probs or needs_scores:
            centered = _SoftmaxBackward._centered(grad, probs, grad_logsumexp)
        if needs_probs:
            of_probs = by_logit * centered - grad * total
        if needs_sum:
            of_sum = total.squeeze(-1)
        if needs_scores:
            of_scores = outer * probs * centered * _SoftmaxBackward._curvature(ctx, scores)
        return None, of_grad, of_probs, of_sum, of_scores, None, None

    @staticmethod
    def jvp(
        ctx: Any,
        _: None,
        grad_t: Tensor | None,
        probs_t: Tensor | None,
        sum_t: Tensor | None,
        scores_t: Tensor | None,
        *rest: None,
    ) -> Tensor:
        with autograd._outer_levels():
            grad, probs, grad_logsumexp, scores = map(_primal_of_any, ctx.saved_tensors)
            centered = _SoftmaxBackward._centered(grad, probs, grad_logsumexp)
            out = torch.zeros_like(probs)
            change = torch.zeros_like(probs)
            if probs_t is not None:
                out = out + probs_t * centered
                change = change - _sum_rows(grad * probs_t)
            if grad_t is not None:
                change = change + grad_t - _sum_rows(grad_t * probs)
            if sum_t is not None:
                change = change + sum_t.unsqueeze(-1)
            out = (out + probs * change) * _softcap_slope(scores, ctx.scale, ctx.softcap)
            if scores_t is not None and ctx.softcap != 0:
                curvature = _SoftmaxBackward._curvature(ctx, scores)
                out = out + probs * centered * curvature * scores_t
            return out


class _Dropout(transforms.SingleLevelFunction):
    @staticmethod
    def forward(
        ctx: Any, made: list[Tensor], probs: Tensor, seed: Tensor, dropout_p: float
    ) -> Tensor:
        ctx.dropout_p = dropout_p
        ctx.save_for_backward(seed)
        ctx.save_for_forward(seed)
        made.append(autograd.call_below_autograd(dropout, probs, seed, dropout_p))
        return made[0]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        (seed,) = ctx.saved_tensors
        return None, dropout(grad, seed, ctx.dropout_p), None, None

    @staticmethod
    def jvp(ctx: Any, _: None, probs_t: Tensor, *rest: None) -> Tensor:
        with autograd._outer_levels():
            (seed,) = ctx.saved_tensors
            return dropout(probs_t, seed, ctx.dropout_p)


def _fake_softmax(scores: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    return scores.new_empty(scores.shape), scores.new_empty(scores.shape[:-1])


def _fake_softmax_backward(grad: Tensor, probs: Tensor, *rest: Any) -> Tensor:
    return probs.new_empty(probs.shape)


def _fake_dropout(probs: Tensor, *rest: Any) -> Tensor:
    return probs.new_empty(probs.shape)


def _merged(tensor: Tensor, dim: int | None, size: int) -> Tensor:
    """A tensor with vmap's dimension merged into its first one."""
    batched = tensor.expand(size, *tensor.shape) if dim is None else tensor.movedim(dim, 0)
    return batched.reshape(size * batched.shape[1], *batched.shape[2:])


def _merged_mask(mask: Tensor, dim: int | None, size: int, batch: int) -> Tensor:
    """_merged() of a mask, which broadcasts to (batch, heads, rows, columns)."""
    if dim is None and (mask.dim() < 4 or mask.shape[0] == 1):
        return mask
    own = mask.unsqueeze(0) if dim is None else mask.movedim(dim, 0)
    own = own[(slice(None),) + (None,) * (5 - own.dim())]
    return own.expand(size, batch, *own.shape[2:]).reshape(size * batch, *own.shape[2:])


def _softmax_rule(info: Any, in_dims: tuple[int | None, ...], *args: Any) -> Any:
    scores, mask, slopes, sinks, *rest = args
    scores_dim, mask_dim, slopes_dim, sinks_dim, *_ = in_dims
    size = info.batch_size
    if sinks_dim is not None:
        return one_by_one(softmax, size, args, in_dims)
    scores = _merged(scores, scores_dim, size)
    batch = scores.shape[0] // size
    if mask is not None:
        mask = _merged_mask(mask, mask_dim, size, batch)
    if slopes is not None and (slopes_dim is not None or slopes.dim() == 2):
        own = slopes.unsqueeze(0) if slopes_dim is None else slopes.movedim(slopes_dim, 0)
        own = own if own.dim() == 3 else own.unsqueeze(1)
        slopes = own.expand(size, batch, own.shape[2]).reshape(size * batch, own.shape[2])
    outputs = softmax(scores, mask, slopes, sinks, *rest)
    return tuple(x.reshape(size, batch, *x.shape[1:]) for x in outputs), (0, 0)


def _softmax_backward_rule(info: Any, in_dims: tuple[int | None, ...], *args: Any) -> Any:
    size = info.batch_size
    tensors = [
        None if x is None else _merged(x, dim, size)
        for x, dim in zip(args[:4], in_dims, strict=False)
    ]
    out = softmax_backward(*tensors, *args[4:])
    return out.reshape(size, out.shape[0] // size, *out.shape[1:]), 0


def _dropout_rule(info: Any, in_dims: tuple[int | None, ...], *args: Any) -> Any:
    # Dropout depends on the position of a weight in the tensor, so the batch cannot be merged.
    return one_by_one(dropout, info.batch_size, args, in_dims)


def register(library: torch.library.Library) -> None:
    for op, tensors, function, fake, rule in (
        (softmax, 4, _Softmax, _fake_softmax, _softmax_rule),
        (softmax_backward, 4, _SoftmaxBackward, _fake_softmax_backward, _softmax_backward_rule),
        (dropout, 2, _Dropout, _fake_dropout, _dropout_rule),
    ):
        name = op.name().removeprefix("cubin::")
        operators.register_fake(f"cubin::{name}", fake, library)
        register_rule(library, name, of_every_op(rule))
        if transforms.DERIVATIVES.available:
            library.impl(name, _autograd_kernel(op, function, tensors), "Autograd")


def _autograd_kernel(op: Any, function: Any, tensors: int) -> Callable[..., Any]:
    """`tensors`: the number of leading arguments that are tensors."""

    def kernel(*args: Any) -> Any:
        rest = args[tensors:]
        return autograd.apply(function, lambda *own: op(*own, *rest), *args[:tensors], rest=rest)

    return kernel
