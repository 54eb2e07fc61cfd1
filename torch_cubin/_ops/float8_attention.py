"""torch_cubin.float8_attention: attention of 8-bit floats for training in 16 bits."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from torch_cubin import errors

E4M3 = torch.float8_e4m3fn
_LARGEST = 448.0  # of e4m3


def _quantise(tensor: Tensor, heads: int) -> tuple[Tensor, Tensor]:
    """(batch, heads, rows, columns) as e4m3, and its factors, (batch, heads of key)."""
    groups = tensor.unflatten(1, (heads, -1)).abs()
    most = groups.amax((2, 3, 4)) if groups.numel() > 0 else groups.new_zeros(groups.shape[:2])
    # Of a head without elements other than 0 the factor is arbitrary. A NaN makes it NaN, as it
    # makes all of its head.
    descale = torch.where(most == 0, 1.0, most.float() / _LARGEST)
    factors = descale.repeat_interleave(tensor.shape[1] // heads, 1)[..., None, None]
    # Division may round beyond the largest number, which e4m3 would make NaN.
    return (tensor / factors).clamp(-_LARGEST, _LARGEST).to(E4M3), descale


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, options: dict[str, Any]
    ) -> Tensor:
        heads = key.shape[1]
        rounded, descales = zip(*(_quantise(x, heads) for x in (query, key, value)), strict=True)
        names = ("q_descale", "k_descale", "v_descale")
        factors = dict(zip(names, descales, strict=True))
        out, logsumexp = torch.ops.cubin.attention_forward_e4m3(*rounded, **options, **factors)
        ctx.save_for_backward(*rounded, out, logsumexp, *descales)
        ctx.options = options
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_out: Tensor) -> tuple[Tensor | None, ...]:
        *tensors, q_descale, k_descale, v_descale = ctx.saved_tensors
        gradients = torch.ops.cubin.attention_backward_e4m3(
            *(grad_out, *tensors),
            **ctx.options,
            q_descale=q_descale,
            k_descale=k_descale,
            v_descale=v_descale,
        )
        return (*gradients, None)


def float8_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    is_causal: bool = False,
    scale: float | None = None,
    window_left: int = -1,
    window_right: int = -1,
    bottom_right: bool = False,
) -> Tensor:
    """Attention whose operands are rounded to float8_e4m3fn, forward and backward.

    Each head of keys, and the queries that share it, is divided by its largest magnitude / 448
    before it is rounded. Gradients are those of the rounded operands, given to the operands as they
    are (straight through); docs/attention.md says how they are computed.

    Args:
        query: bfloat16 (batch, heads, rows, head_dim).
        key, value: bfloat16, with a number of heads that divides the query's. Derivatives exist for
            head dims that are multiples of 16 up to 128.
        is_causal, scale, window_left, window_right, bottom_right: as of
            torch.ops.cubin.attention_forward.

    Returns:
        bfloat16 (batch, heads, rows, head_dim of value).

    Raises InputError [input] for other dtypes and shapes, and [no_kernel] where there is no kernel.
    """
    for name, tensor in (("query", query), ("key", key), ("value", value)):
        if tensor.dtype != torch.bfloat16 or tensor.dim() != 4:
            raise errors.fault(
                "input", f"torch_cubin.float8_attention argument '{name}'",
                "has a wrong dtype or rank", expected="bfloat16 (batch, heads, rows, head_dim)",
                got=f"{str(tensor.dtype).removeprefix('torch.')} {tuple(tensor.shape)}",
            )  # fmt: skip
    if key.shape[1] == 0 or query.shape[1] % key.shape[1] != 0:
        raise errors.fault(
            "input", "torch_cubin.float8_attention argument 'key'", "has a wrong number of heads",
            expected=f"a number that divides the query's {query.shape[1]}", got=str(key.shape[1]),
        )  # fmt: skip
    if value.shape[1] != key.shape[1]:
        raise errors.fault(
            "input", "torch_cubin.float8_attention argument 'value'", "has a wrong number of heads",
            expected=f"the key's {key.shape[1]}", got=str(value.shape[1]),
        )  # fmt: skip
    options = {
        "is_causal": is_causal, "scale": scale, "window_left": window_left,
        "window_right": window_right, "bottom_right": bottom_right,
    }  # fmt: skip
    return _Attention.apply(query, key, value, options)
