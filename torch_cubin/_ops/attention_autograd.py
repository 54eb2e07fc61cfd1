"""Derivatives of the attention ops: attention_backward where it serves, else a composition.

`cubin::_attention_forward_autograd` gets a kernel on its Autograd key. Where plain backward() is
all that can be asked for, its Function saves what `attention_backward` needs and calls it. What
that op does not give (forward mode, torch.func's transforms, the gradients of a mask, of sinks and
by logsumexp) comes from ops composed in attention_compose.py, with derivatives of every order,
as does the gradient of a gradient.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
import torch.autograd.forward_ad as forward_ad
from torch import Tensor

from torch_cubin._ops import attention_compose, autograd, checks
from torch_cubin._ops.attention_checks import Options, check_attention
from torch_cubin._pytorch import dispatch_keys, transforms

attention_backward = torch.ops.cubin.attention_backward.default
forward_autograd = torch.ops.cubin._attention_forward_autograd.default
backward_autograd = torch.ops.cubin._attention_backward_autograd.default

_TENSORS = ("attn_mask", "dropout_seed", "alibi_slopes", "sinks", "cu_seqlens_q", "cu_seqlens_k")


class _Attention(transforms.SingleLevelFunction):
    @staticmethod
    def forward(
        ctx: Any,
        made: list[Tensor],
        query: Tensor,
        key: Tensor,
        value: Tensor,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> tuple[Tensor, Tensor]:
        ctx.set_materialize_grads(False)
        with transforms.below_autograd():
            made += forward_autograd(query, key, value, *args, **kwargs)
        options = Options(*args, **kwargs)
        # Saved as tensors, not as an attribute, so that hooks and in-place changes are seen.
        ctx.options = options._replace(**dict.fromkeys(_TENSORS))
        ctx.save_for_backward(
            query, key, value, *made, *(getattr(options, name) for name in _TENSORS)
        )
        return made[0], made[1]

    @staticmethod
    def backward(
        ctx: Any, grad_out: Tensor | None, grad_logsumexp: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        if grad_out is None and grad_logsumexp is None:
            return None, None, None, None, None, None
        query, key, value, out, logsumexp, *rest = ctx.saved_tensors
        options = ctx.options._replace(**dict(zip(_TENSORS, rest, strict=True)))
        # NOTE: backward() may run under autocast; PyTorch's own backward of attention ignores it.
        with dispatch_keys.without_autocast():
            if grad_logsumexp is None:
                grads = attention_backward(
                    *(grad_out, query, key, value, out, logsumexp, *options.positional()),
                    **options.named(),
                )
            else:
                grads = _gradients((query, key, value), options, grad_out, grad_logsumexp)
        needed = ctx.needs_input_grad[1:4]
        dq, dk, dv = (grad if need else None for grad, need in zip(grads, needed, strict=True))
        return None, dq, dk, dv, None, None


def _gradients(
    inputs: Iterable[Tensor],
    options: Options,
    grad_out: Tensor | None,
    grad_logsumexp: Tensor | None = None,
) -> tuple[Tensor, ...]:
    """dq, dk, dv of the composition; where grad mode is on they can be differentiated again."""
    create_graph = torch.is_grad_enabled()
    with torch.enable_grad():
        # Views, because one tensor may be query, key and value at once.
        inputs = [
            tensor.view_as(tensor)
            if create_graph and tensor.requires_grad
            else tensor.detach().requires_grad_()
            for tensor in inputs
        ]
        outputs = attention_compose.attention(*inputs, *options.positional(), **options.named())
        pairs = [
            (output, grad)
            for output, grad in zip(outputs, (grad_out, grad_logsumexp), strict=True)
            if grad is not None
        ]
    return torch.autograd.grad(
        [output for output, _ in pairs],
        inputs,
        [grad for _, grad in pairs],
        create_graph=create_graph,
        materialize_grads=True,
    )


def _requires_grad(values: Iterable[Any]) -> bool:
    for value in values:  # noqa: SIM110  (any() of a generator costs more, on every call)
        if isinstance(value, Tensor) and value.requires_grad:
            return True
    return False


def _has_derivative(tensor: Tensor) -> bool:
    """Whether a derivative by this tensor is wanted at the level at work, in either mode."""
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
    # What gradients take beside query, key and value: a mask, slopes, sinks.
    beside = _requires_grad(args) or _requires_grad(kwargs.values())
    if beside or _forward_mode_possible():
        return attention_compose.attention(query, key, value, *args, **kwargs)
    if query.requires_grad or key.requires_grad or value.requires_grad:
        return _Attention.apply(made, query, key, value, args, kwargs)
    with transforms.below_autograd():
        return forward_autograd(query, key, value, *args, **kwargs)


def _backward(tensors: tuple[Tensor, ...], options: Options) -> tuple[Tensor, ...]:
    grad_out, query, key, value, out, logsumexp = tensors
    beside = (options.attn_mask, options.alibi_slopes, options.sinks)
    wanted = any(
        tensor is not None and _has_derivative(tensor)
        for tensor in (grad_out, query, key, value, *beside)
    )
    if wanted and _forward_mode_possible():
        checks.fail(
            "attention_backward",
            "cannot be differentiated in forward mode or inside a transform of torch.func",
            "tensors without derivatives",
            "one that has some",
            "Differentiate scaled_dot_product_attention or attention_forward instead.",
        )
    if wanted:
        # out and logsumexp are functions of the others, and so are their derivatives. They are not
        # read here, and must be right all the same.
        saved = {"grad_out": grad_out, "out": out, "logsumexp": logsumexp}
        check_attention("attention_backward", query, key, value, options, **saved)
        return _gradients((query, key, value), options, grad_out)
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
        if not made:  # by one of the ops of a composition
            with torch.no_grad():
                return attention_compose.attention(query, key, value, *args, **kwargs)
        return made[0].detach(), made[1].detach()
    except BaseException as error:
        autograd.keep(error)
        raise


def _backward_kernel(*args: Any, **kwargs: Any) -> tuple[Tensor, ...]:
    options = Options(*args[6:], **kwargs)
    try:
        return _backward(args[:6], options)
    except BaseException as error:
        autograd.keep(error)
        raise


def register(library: torch.library.Library) -> None:
    library.impl("_attention_forward_autograd", _forward_kernel, "Autograd")
    library.impl("_attention_backward_autograd", _backward_kernel, "Autograd")
