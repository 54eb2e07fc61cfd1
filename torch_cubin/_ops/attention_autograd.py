"""Derivatives of the attention ops: attention_backward if it suffices, else a composition.

`cubin::_attention_forward_autograd` gets a kernel on its Autograd key. If only a plain backward()
can follow, its Function saves what `attention_backward` needs and calls it; the gradient of sinks
is then computed, row by row, from the saved tensors. Other derivatives (forward mode, torch.func's
transforms, gradients of a mask, of slopes and through logsumexp, second order) come from the ops
composed in attention_compose.py, which have derivatives of every order.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

import torch
import torch.autograd.forward_ad as forward_ad
from torch import Tensor

from torch_cubin._ops import attention_compose, autograd, checks, softmax
from torch_cubin._ops.attention_checks import TENSOR_OPTIONS, Options, check_attention
from torch_cubin._pytorch import dispatch_keys, transforms

attention_backward = torch.ops.cubin.attention_backward.default
attention_sinks_gradient = torch.ops.cubin._attention_sinks_gradient.default
forward_autograd = torch.ops.cubin._attention_forward_autograd.default
backward_autograd = torch.ops.cubin._attention_backward_autograd.default

_NO_TENSORS: dict[str, Any] = dict.fromkeys(TENSOR_OPTIONS)


class _Attention(transforms.SingleLevelFunction):
    @staticmethod
    def forward(
        ctx: Any,
        made: list[Tensor],
        query: Tensor,
        key: Tensor,
        value: Tensor,
        sinks: Tensor | None,  # the sinks in kwargs, which get no gradient there
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> tuple[Tensor, Tensor]:
        ctx.set_materialize_grads(False)
        with transforms.below_autograd():
            made += forward_autograd(query, key, value, *args, **kwargs)
        options = Options(*args, **kwargs)
        # Saved as tensors, not as an attribute, so that hooks and in-place changes are seen.
        ctx.options = options._replace(**_NO_TENSORS)
        ctx.save_for_backward(
            query, key, value, *made, *(getattr(options, name) for name in TENSOR_OPTIONS)
        )
        return made[0], made[1]

    @staticmethod
    def backward(
        ctx: Any, grad_out: Tensor | None, grad_logsumexp: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        if grad_out is None and grad_logsumexp is None:
            return (None,) * 7
        saved = ctx.saved_tensors
        options = ctx.options._replace(**dict(zip(TENSOR_OPTIONS, saved[5:], strict=True)))
        needed = ctx.needs_input_grad[1:5]
        # NOTE: backward() may run under autocast; PyTorch's own backward of attention ignores it.
        with dispatch_keys.without_autocast():
            if grad_logsumexp is None:
                assert grad_out is not None, "one of the two is there"
                grads = _fused_gradients(saved[:5], options, grad_out, needed)
            else:
                grads = _gradients(saved[:3], options, grad_out, grad_logsumexp, of_sinks=needed[3])
        wanted = (grad if need else None for grad, need in zip(grads, needed, strict=True))
        return None, *wanted, None, None


def _fused_gradients(
    saved: Sequence[Tensor], options: Options, grad_out: Tensor, needed: Sequence[bool]
) -> tuple[Tensor | None, ...]:
    """dq, dk, dv (None if none of them is needed) and the sinks' gradient (likewise)."""
    grads: tuple[Tensor | None, ...] = (None, None, None)
    if any(needed[:3]):
        grads = attention_backward(grad_out, *saved, *options.positional(), **options.named())
    if not needed[3]:
        return *grads, None
    assert options.sinks is not None, "they need a gradient"
    out, logsumexp = saved[3:]
    if options.packed:
        grad_out, out = grad_out.transpose(0, 1), out.transpose(0, 1)
    return *grads, _gradient_of_sinks(grad_out, out, logsumexp, options.sinks)


def _gradient_of_sinks(grad_out: Tensor, out: Tensor, logsumexp: Tensor, sinks: Tensor) -> Tensor:
    """For outputs (..., heads, rows, head_dim): one kernel, or a formula of several ops."""
    fused = out.is_cuda and out.dtype != torch.float64
    if not fused or torch.is_grad_enabled() or transforms.transforms_active():
        delta = (grad_out * out.to(logsumexp.dtype)).sum(-1)
        return softmax.sinks_gradient(sinks, logsumexp, delta)
    if out.dim() != 4:  # NOTE: not if it changes nothing, as in attention_compose.py
        sizes = math.prod(out.shape[:-3]), sinks.shape[0], *out.shape[-2:]
        grad_out, out = grad_out.reshape(sizes), out.reshape(sizes)
        logsumexp = logsumexp.reshape(sizes[:3])
    return attention_sinks_gradient(grad_out, out, logsumexp, sinks)


def _gradients(
    inputs: Iterable[Tensor],
    options: Options,
    grad_out: Tensor | None,
    grad_logsumexp: Tensor | None = None,
    *,
    of_sinks: bool = False,
) -> tuple[Tensor | None, ...]:
    """dq, dk, dv of the composition and, if requested, the sinks' gradient (else None).

    With grad mode on they can be differentiated again.
    """
    create_graph = torch.is_grad_enabled()
    with torch.enable_grad():
        # Views, because one tensor may be query, key and value at once.
        inputs = [
            tensor.view_as(tensor)
            if create_graph and tensor.requires_grad
            else tensor.detach().requires_grad_()
            for tensor in (*inputs, *((options.sinks,) if of_sinks else ()))
        ]
        if of_sinks:
            options = options._replace(sinks=inputs[3])
        ended = autograd.recomputations.ended
        outputs = attention_compose.attention(*inputs[:3], *options.positional(), **options.named())
        pairs = [
            (output, grad)
            for output, grad in zip(outputs, (grad_out, grad_logsumexp), strict=True)
            if grad is not None
        ]
    grads: tuple[Tensor, ...]
    if autograd.recomputations.ended != ended:  # outputs have no graph, and nobody reads gradients
        grads = tuple(torch.zeros_like(tensor) for tensor in inputs)
    else:
        grads = torch.autograd.grad(
            [output for output, _ in pairs],
            inputs,
            [grad for _, grad in pairs],
            create_graph=create_graph,
            materialize_grads=True,
        )
    return grads if of_sinks else (*grads, None)


def _requires_grad(values: Iterable[Any]) -> bool:
    for value in values:  # noqa: SIM110  (any() of a generator costs more, on every call)
        if isinstance(value, Tensor) and value.requires_grad:
            return True
    return False


def _has_derivative(tensor: Tensor) -> bool:
    """Whether a derivative with respect to this tensor is needed at the current level, in either
    mode."""
    if tensor.requires_grad and torch.is_grad_enabled():
        return True
    if not tensor.is_floating_point() or not _forward_mode_possible():
        return False
    return forward_ad.unpack_dual(tensor).tangent is not None


def _forward_mode_possible() -> bool:
    return transforms.dual_level_is_open() or transforms.transforms_active()


def _forward(
    made: list[Tensor],
    query: Tensor,
    key: Tensor,
    value: Tensor,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> tuple[Tensor, Tensor]:
    sinks = kwargs.get("sinks")
    beside = (value for name, value in kwargs.items() if name != "sinks")
    if _requires_grad((*args, *beside)) or _forward_mode_possible():
        return attention_compose.attention(query, key, value, *args, **kwargs)
    if _requires_grad((query, key, value, sinks)):
        return _Attention.apply(made, query, key, value, sinks, args, kwargs)
    with transforms.below_autograd():
        return forward_autograd(query, key, value, *args, **kwargs)


def _backward(tensors: tuple[Tensor, ...], options: Options) -> tuple[Tensor | None, ...]:
    grad_out, query, key, value, out, logsumexp = tensors
    beside = options.tensors().values()
    wanted = any(map(_has_derivative, (grad_out, query, key, value, *beside)))
    if wanted and _forward_mode_possible():
        checks.fail(
            "attention_backward",
            "cannot be differentiated in forward mode or inside a transform of torch.func",
            "tensors without derivatives",
            "one that has some",
            "Differentiate scaled_dot_product_attention or attention_forward instead.",
        )
    if wanted:
        # out and logsumexp are functions of the other arguments, and so are their derivatives. They
        # are not read here, but must be valid all the same.
        check_attention(
            "attention_backward", query, key, value, options,
            grad_out=grad_out, out=out, logsumexp=logsumexp,
        )  # fmt: skip
        return _gradients((query, key, value), options, grad_out)[:3]
    for name, tensor in (("out", out), ("logsumexp", logsumexp)):
        if _has_derivative(tensor):
            checks.fail(
                f"attention_backward argument '{name}'",
                "cannot be differentiated alone",
                "a query, key or value that it was computed from and that requires grad too",
                "none",
                "Pass it as .detach() if it is meant as a constant.",
            )
    return autograd.call_below_autograd(
        backward_autograd,
        *tensors,
        *options.positional(),
        **options.named(),
    )


def _forward_kernel(
    query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any
) -> tuple[Tensor, Tensor]:
    made: list[Tensor] = []
    try:
        return _forward(made, query, key, value, args, kwargs)
    except transforms.StopRecomputation:  # as in autograd.apply()
        if not made:  # for one of the ops of a composition
            with torch.no_grad():
                return attention_compose.attention(query, key, value, *args, **kwargs)
        return made[0].detach(), made[1].detach()
    except BaseException as error:
        autograd.keep(error)
        raise


def _backward_kernel(*args: Any, **kwargs: Any) -> tuple[Tensor | None, ...]:
    options = Options(*args[6:], **kwargs)
    try:
        return _backward(args[:6], options)
    except BaseException as error:
        autograd.keep(error)
        raise


def register(library: torch.library.Library) -> None:
    library.impl("_attention_forward_autograd", _forward_kernel, "Autograd")
    library.impl("_attention_backward_autograd", _backward_kernel, "Autograd")
