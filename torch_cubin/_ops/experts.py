"""Mixtures of experts made of grouped_matmul: torch_cubin.moe, and transformers' experts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from torch_cubin import errors
from torch_cubin._ops import checks
from torch_cubin._ops.autograd import ACTIVATIONS
from torch_cubin._ops.expert_rows import rows_of, sum_of
from torch_cubin._ops.grouped import grouped

Gate = Callable[[Tensor], Tensor]

_moe = torch.ops.cubin._moe_autograd.default


def moe(
    x: Tensor,
    topk_ids: Tensor,
    topk_weights: Tensor,
    w13: Tensor,
    w2: Tensor,
    *,
    activation: str | Gate = "silu",
    b13: Tensor | None = None,
    b2: Tensor | None = None,
    w13_scale: Tensor | None = None,
    w2_scale: Tensor | None = None,
    interleaved: bool = False,
    recipe: str | None = None,
) -> Tensor:
    """A mixture of experts' output: each token's experts, by their weights.

        gate, up = linear(x[t], w13[e], b13[e]).chunk(2, -1)    # of each expert e of token t
        out[t] = sum over e of topk_weights * linear(silu(gate) * up, w2[e], b2[e])

    Nothing waits for the GPU, the same inputs give the same bits, and it has derivatives of every
    order. Calls without derivatives, biases and functions for gates run as one op (docs/moe.md).

    Args:
        x: (tokens, hidden).
        topk_ids: (tokens, k), the experts of each token, int32 or int64. Numbers that are no
            expert's, such as those of another rank's experts, are skipped, whatever their weights.
        topk_weights: (tokens, k), of any floating dtype; sums over experts are in float32.
        w13: (experts, 2 * inner, hidden), gate above up. Any strides: weights that are stored
            transposed are passed as `w13.mT`.
        w2: (experts, hidden, inner).
        activation: the gate's: "silu", "gelu", "gelu_tanh" or "relu"; or a function from the first
            product (rows, w13.shape[1]) to the second one's rows (rows, w2.shape[2]), which is the
            model's own gate, or an activation without one.
        b13, b2: the experts' biases, (experts, w13.shape[1]) and (experts, hidden).
        w13_scale, w2_scale: for w13 and w2 of float8_e4m3fn, which are for inference, with silu and
            without biases: float32 or UE8M0 scales of their blocks of 128 x 128, (experts,
            ceil(2 * inner / 128), ceil(hidden / 128)) and (experts, ceil(hidden / 128),
            ceil(inner / 128)), as DeepSeek's checkpoints have them. Rows are quantised with a scale
            for each 128 columns.
        interleaved: rows of w13 (and b13) alternate between gate and up, in place of gate above up.
            A function as `activation` splits its rows itself.
        recipe: "block" for products of float8_e4m3fn, forward and backward, of weights of x's dtype
            with silu and without biases. Operands are quantised in the call, as in the layers of
            `torch_cubin.float8(model, training=True)`: rows by 1x128, weights by 128x128 of each
            expert. The first derivative, by backward(), alone.

    Returns:
        (tokens, hidden), of x's dtype.

    Raises InputError [input] for arguments that do not fit together; the ops' own errors.
    """
    _check(x, topk_ids, topk_weights, w13, w2, activation, b13, b2, interleaved)
    if recipe is not None:
        _check_recipe(recipe, x, w13, w13_scale, w2_scale, activation, b13, b2, interleaved)
        return _moe(x, topk_ids, topk_weights, w13, w2, activation, interleaved, recipe)
    if w13_scale is not None or w2_scale is not None or w13.dtype == torch.float8_e4m3fn:
        scales = w13_scale, w2_scale
        _check_float8(*scales, activation, b13, b2, interleaved)
        return _moe_float8(x, topk_ids, topk_weights, w13, w2, *scales)
    if isinstance(activation, str) and b13 is None and b2 is None:
        return _moe(x, topk_ids, topk_weights, w13, w2, activation, interleaved)
    if isinstance(activation, str):
        activation = gated(ACTIVATIONS[activation], interleaved)
    return experts(x, topk_ids, topk_weights, w13.mT, w2.mT, activation, b13, b2)


def _check(
    x: Tensor,
    topk_ids: Tensor,
    topk_weights: Tensor,
    w13: Tensor,
    w2: Tensor,
    activation: str | Gate,
    b13: Tensor | None,
    b2: Tensor | None,
    interleaved: bool,
) -> None:
    tensors = {"x": (x, 2), "topk_ids": (topk_ids, 2), "topk_weights": (topk_weights, 2),
               "w13": (w13, 3), "w2": (w2, 3)}  # fmt: skip
    for name, (tensor, dims) in tensors.items():
        checks.require_tensors("torch_cubin.moe", **{name: tensor})
        if tensor.dim() != dims:
            raise _fault(name, "has a wrong rank", f"{dims} dimensions", str(tuple(tensor.shape)))
    if topk_ids.dtype not in (torch.int32, torch.int64):
        raise _fault("topk_ids", "has a wrong dtype", "int32 or int64", str(topk_ids.dtype))
    if topk_weights.shape != topk_ids.shape or topk_ids.shape[0] != x.shape[0]:
        got = f"{tuple(topk_ids.shape)} and {tuple(topk_weights.shape)}"
        expected = f"two of ({x.shape[0]}, k)"
        raise _fault("topk_ids", "and topk_weights do not fit the tokens", expected, got)
    if not topk_weights.is_floating_point():
        raise _fault("topk_weights", "has a wrong dtype", "floating", str(topk_weights.dtype))
    if w13.shape[0] != w2.shape[0] or w13.shape[0] == 0:
        got = f"{w13.shape[0]} and {w2.shape[0]}"
        raise _fault("w13", "and w2 are of other numbers of experts", "one number, not 0", got)
    if isinstance(activation, str) and activation not in ACTIVATIONS:
        expected = "a function, or one of " + ", ".join(map(repr, ACTIVATIONS))
        raise _fault("activation", "is not known", expected, repr(activation)[:200])
    if isinstance(activation, str) and w13.shape[1] != 2 * w2.shape[2]:
        expected = f"2 * {w2.shape[2]} outputs: w2's columns, as gate and as up"
        raise _fault("w13", "and w2 do not fit together", expected, str(w13.shape[1]))
    if interleaved and not isinstance(activation, str):
        what = "is given with a function for the gate, which splits its rows itself"
        raise _fault("interleaved", what, "False, or the name of an activation", "True")
    # Others might broadcast.
    for name, bias, weight in (("b13", b13, w13), ("b2", b2, w2)):
        if bias is not None and bias.shape != weight.shape[:2]:
            got = str(tuple(bias.shape))
            raise _fault(name, "has a wrong shape", str(tuple(weight.shape[:2])), got)


def _check_recipe(
    recipe: str,
    x: Tensor,
    w13: Tensor,
    w13_scale: Tensor | None,
    w2_scale: Tensor | None,
    *options: Any,
) -> None:
    if recipe != "block":
        raise _fault("recipe", "is not known", "'block' or None", repr(recipe)[:200])
    if w13_scale is not None or w2_scale is not None or w13.dtype == torch.float8_e4m3fn:
        what = "is given with weights of 8-bit floats, which have theirs"
        raise _fault("recipe", what, "None, or weights of x's dtype without scales", repr(recipe))
    if x.dtype == torch.float64:
        what = "has a dtype that is not quantised"
        raise _fault("x", what, "float16, bfloat16 or float32", "float64")
    _check_options(*options)


def _check_float8(
    w13_scale: Tensor | None,
    w2_scale: Tensor | None,
    activation: str | Gate,
    b13: Tensor | None,
    b2: Tensor | None,
    interleaved: bool,
) -> None:
    if w13_scale is None or w2_scale is None:
        missing = "w13_scale" if w13_scale is None else "w2_scale"
        raise _fault(missing, "is missing", "scales of both weights", "None")
    _check_options(activation, b13, b2, interleaved)


def _check_options(
    activation: str | Gate, b13: Tensor | None, b2: Tensor | None, interleaved: bool
) -> None:
    """Of products of 8-bit floats."""
    if activation != "silu":
        what = "is not supported in 8-bit floats"
        raise _fault("activation", what, "'silu'", repr(activation)[:200])
    if b13 is not None or b2 is not None:
        what = "is not supported in 8-bit floats"
        raise _fault("b2" if b13 is None else "b13", what, "None", "a tensor")
    if interleaved:
        what = "is not supported in 8-bit floats, whose blocks have 128 rows"
        raise _fault("interleaved", what, "False, and gate above up", "True")


def _moe_float8(
    x: Tensor,
    topk_ids: Tensor,
    topk_weights: Tensor,
    w13: Tensor,
    w2: Tensor,
    *scales: Any,
) -> Tensor:
    name = "_moe_float8_autograd" if torch.is_grad_enabled() else "_moe_float8"
    op = getattr(torch.ops.cubin, name).default
    first, second = (
        scale.float() if scale.dtype == torch.float8_e8m0fnu else scale for scale in scales
    )
    if torch.is_autocast_enabled(x.device.type):  # as layers of other weights do
        x = x.to(torch.get_autocast_dtype(x.device.type))
    result: Tensor = op(x, topk_ids, topk_weights, w13, first, w2, second)
    return result


def _fault(argument: str, problem: str, expected: str, got: str) -> errors.Error:
    what = f"torch_cubin.moe argument '{argument}'"
    return errors.fault("input", what, problem, expected=expected, got=got)


def gated(activation: Gate, interleaved: bool = False) -> Gate:
    """activation(gate) * up, for rows of both."""

    def gate(rows: Tensor) -> Tensor:
        gates, ups = (rows[:, ::2], rows[:, 1::2]) if interleaved else rows.chunk(2, -1)
        return activation(gates) * ups

    return gate


def experts(
    x: Tensor,
    ids: Tensor,
    weights: Tensor,
    first: Tensor,
    second: Tensor,
    gate: Gate,
    first_bias: Tensor | None = None,
    second_bias: Tensor | None = None,
) -> Tensor:
    """moe() with matrices that rows are multiplied by: first (experts, hidden, outputs)."""
    count = first.shape[0]
    # The others' rows come last, where they belong to no group.
    flat = ids.masked_fill((ids < 0) | (ids >= count), count).reshape(-1)
    own, order = torch.sort(flat, stable=True)
    numbers = torch.arange(count, device=own.device, dtype=own.dtype)
    ends = torch.searchsorted(own, numbers, right=True)
    numbers = torch.arange(order.shape[0], device=order.device)
    places = torch.empty_like(order).scatter(0, order, numbers)
    places = places.masked_fill(flat == count, -1).view(ids.shape).int()
    index = (order // ids.shape[1], order, places)

    rows = grouped(rows_of(x, *index), first, ends, True)
    served = own.clamp(max=count - 1)
    if first_bias is not None:
        rows = rows + first_bias[served]
    # The gate's derivative at rows of no expert, NaN perhaps, belongs to no bias.
    if first_bias is not None:
        rows = torch.where((own == count).unsqueeze(-1), rows.detach(), rows)
    rows = grouped(gate(rows), second, ends, True)
    if second_bias is not None:
        rows = rows + second_bias[served]
    return sum_of(rows, *index, weights)


__all__ = ["moe"]
