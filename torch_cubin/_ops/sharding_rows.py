"""Sharding rules of ops over rows (norms, softmax, losses), of 8-bit floats, and of the parts of
attention's second derivatives.

Rows are sharded; what an op reads whole, such as a row's elements, is not. Ops whose shards would
need another op to join them, as a mean over rows would, run whole on every GPU.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

from torch_cubin._ops.scaled import ROW
from torch_cubin._ops.sharding_labels import Description, Labels, of_rows, whole


def _norm(
    input: Any,
    residual: Any,
    normalized_shape: Sequence[int],
    weight: Any,
    bias: Any,
    eps: float | None,
    centered: bool,
) -> Description:
    own = [None] * len(normalized_shape)
    labels = of_rows(input, *own)
    arguments: list[Labels] = [labels, *([] if residual is None else [labels])]
    arguments += [own for each in (weight, bias) if each is not None]
    return Description(
        arguments,
        [labels, None if residual is None else labels, labels if centered else None, labels],
    )


def _norm_backward(
    grad_out: Any,
    grad_sum: Any,
    x: Any,
    mean: Any,
    rstd: Any,
    weight: Any,
    dims: int,
    eps: float | None,
    centered: bool,
    needs_weight: bool,
    bias_dtype: Any,
) -> Description:
    own = [None] * dims
    labels = of_rows(x, *own)
    arguments: list[Labels] = [labels, *([] if grad_sum is None else [labels]), labels]
    arguments += [labels if centered else [None], labels]
    arguments += [] if weight is None else [own]
    of_weight = own if weight is not None and needs_weight else None
    of_bias = None if bias_dtype is None else own
    # The gradients of weight and bias are sums over rows.
    return Description(arguments, [labels, of_weight, of_bias], summed=labels[: -dims or None])


def _along_rows(*args: Any) -> Description:
    """Tensors of one shape, whose last dim is a row."""
    tensors: list[Labels] = [
        of_rows(x, *[None][: len(x.shape)]) for x in args if hasattr(x, "shape")
    ]
    return Description(tensors, tensors[:1])


def _row_sums(input: Any, *options: Any) -> Description:
    labels = of_rows(input, None)
    return Description([labels], [labels[:-1]])


def _cross_entropy(
    input: Any, target: Any, weight: Any, reduction: str, *options: Any
) -> Description:
    if reduction == "mean":
        return whole(4, input, target, weight)
    labels = of_rows(target)
    arguments: list[Labels] = [[*labels, None], labels, *([] if weight is None else [[None]])]
    if reduction == "none":
        return Description(arguments, [labels, None, labels, labels])
    return Description(arguments, [[], [], labels, labels], summed=labels)


def _cross_entropy_backward(
    grad: Any, input: Any, target: Any, weight: Any, total: Any, max: Any, log_sum: Any, *rest: Any
) -> Description:
    labels = of_rows(target)
    of_grad = labels if len(grad.shape) == len(target.shape) else []
    of_weight: list[Labels] = [] if weight is None else [[None]]
    of_total = [None] * len(total.shape)
    arguments = [of_grad, [*labels, None], labels, *of_weight, of_total, labels, labels]
    return Description(arguments, [[*labels, None]])


def _quantize(x: Any, recipe: int, *, transpose: bool = False, **options: Any) -> Description:
    if recipe != ROW or (transpose and options.get("gate", "none") != "none"):
        return whole(2, x)
    # Transposed, the rows of the result are the columns of x.
    labels: Labels = [None, "row"] if transpose else ["row", None]
    return Description([labels], [["row", None]] * 2)


def _scaled(
    mat_a: Any, mat_b: Any, scale_a: Any, recipe_a: int, scale_b: Any, recipe_b: int, *,
    bias: Any = None, **options: Any,
) -> Description:  # fmt: skip
    if bias is not None or (recipe_a, recipe_b) != (ROW, ROW):
        return whole(1, mat_a, mat_b, scale_a, scale_b, bias)
    arguments: list[Labels] = [["m", None], [None, "n"], ["m", None], [None, "n"]]
    return Description(arguments, [["m", "n"]])


def _moe_float8(x: Any, topk_ids: Any, topk_weights: Any, *weights: Any) -> Description:
    """Of the tokens."""
    tokens: Labels = ["token", None]
    kept: list[Labels] = [[None] * len(each.shape) for each in weights]
    return Description([tokens, tokens, tokens, *kept], [tokens])


def _scale_into(out: Any, factor: Any) -> Description:
    labels = of_rows(out)
    return Description([labels, [None] * len(factor.shape)], [], fixed=[0])


RULES = {
    "norm": _norm,
    "norm_backward": _norm_backward,
    "softmax": _along_rows,
    "softmax_backward": _along_rows,
    "cross_entropy": _cross_entropy,
    "cross_entropy_backward": _cross_entropy_backward,
    "linear_cross_entropy": functools.partial(whole, 7),
    "linear_cross_entropy_backward": functools.partial(whole, 3),
    "quantize": _quantize,
    "scaled_matmul": _scaled,
    "scaled_grouped_matmul": functools.partial(whole, 1),
    "scaled_gated_matmul": functools.partial(whole, 2),
    "moe_float8": _moe_float8,
}
# Ops without an autograd variant.
PARTS = {
    "_row_sums": _row_sums,
    "_scale_into": _scale_into,
    "_attention_softmax": functools.partial(whole, 2),
    "_attention_softmax_backward": functools.partial(whole, 1),
    "_attention_dropout": functools.partial(whole, 1),
    "_attention_sinks_gradient": functools.partial(whole, 1),
}
