"""Attention composed of ops that have derivatives of every order: product, softmax, product.

For derivatives that `attention_backward` lacks: gradients of a mask or of slopes and through
logsumexp, forward mode, torch.func's transforms, second order. The C++ counterpart, for float64 and
wide heads, is csrc/ops/attention/compose/compose.cpp; both compute scores in float32, or in float64
for float64.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from torch_cubin._ops import attention_checks, checks, softmax
from torch_cubin._ops.attention_checks import Options
from torch_cubin._pytorch.dispatch_keys import without_autocast

matmul = torch.ops.cubin.matmul.default


def attention(
    query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any
) -> tuple[Tensor, Tensor]:
    """The result of `cubin::attention_forward`, differentiable by every floating-point tensor.

    The arguments are those of that op; packed sequences are refused. The output has the usual
    layout (attention_checks.output_strides).
    """
    options = Options(*args, **kwargs)
    op = "attention_forward"
    shape = attention_checks.check_attention(op, query, key, value, options)
    if options.packed:
        learns = (
            name for name, x in options.tensors().items() if x.requires_grad and name != "sinks"
        )
        checks.fail(
            f"{op} argument '{next(learns, 'cu_seqlens_q')}'",
            "cannot be differentiated so",
            "one backward() of float16, bfloat16 or float32, to query, key, value and sinks, and "
            "head dims up to 256",
            "another derivative of packed sequences",
            "Compute each sequence by a call of its own.",
        )
    # NOTE: products in autocast's dtype would round the scores.
    with without_autocast():
        out, logsumexp = _attention(query, key, value, options, shape)
    return _laid_out(out.to(query.dtype), query), logsumexp


def _attention(
    query: Tensor, key: Tensor, value: Tensor, options: Options, shape: attention_checks.Shape
) -> tuple[Tensor, Tensor]:
    dtype = attention_checks.saved_dtype(query)
    kv_heads = _kv_heads(key, value, shape)
    group = shape.heads // kv_heads if kv_heads else 1
    q = _operand(query.to(dtype), shape.batch, shape.heads)
    k = _operand(key.to(dtype), shape.batch, kv_heads)
    v = _operand(value.to(dtype), shape.batch, kv_heads)

    scores = _apart(matmul(_together(q, group), k.mT), group)
    of_scores = options._replace(
        attn_mask=_mask(options.attn_mask, shape.batch), scale=_scale(query, options)
    )
    probs, logsumexp = softmax.softmax(
        scores, *(getattr(of_scores, name) for name in softmax.OPTIONS)
    )
    if options.dropout_p > 0:
        probs = softmax.dropout(probs, options.dropout_seed, options.dropout_p)
    out = _apart(matmul(_together(probs, group), v), group)
    if len(shape.out) == 4:
        return out, logsumexp
    return out.reshape(shape.out), logsumexp.reshape(shape.logsumexp)


# NOTE: a reshape must not be called if it changes nothing: torch.compile spends a second on each
# with symbolic sizes.
def _together(tensor: Tensor, group: int) -> Tensor:
    """Stacks the heads that share a key as additional rows of one matrix, for a single product."""
    if group == 1:
        return tensor
    return tensor.unflatten(1, (tensor.shape[1] // group, group)).flatten(2, 3)


def _apart(tensor: Tensor, group: int) -> Tensor:
    if group == 1:
        return tensor
    return tensor.unflatten(2, (group, tensor.shape[2] // group)).flatten(1, 2)


def _kv_heads(key: Tensor, value: Tensor, shape: attention_checks.Shape) -> int:
    k, v = (tensor.shape[-3] if tensor.dim() > 2 else 1 for tensor in (key, value))
    return k if k == v else shape.heads


def _operand(tensor: Tensor, batch: list[int], heads: int) -> Tensor:
    """(batch, heads, rows, columns), broadcast."""
    *leading, rows, columns = tensor.shape
    if len(batch) == 1 and leading == [*batch, heads]:
        return tensor
    if leading and leading[-1] not in (1, heads):  # key and value share heads differently
        tensor = tensor.repeat_interleave(heads // leading[-1], -3)
    sizes = math.prod(batch), heads, rows, columns
    return tensor.expand(*batch, heads, rows, columns).reshape(sizes)


def _mask(mask: Tensor | None, batch: list[int]) -> Tensor | None:
    """At most four dims, which broadcast to those of the scores."""
    if mask is None or (len(batch) <= 1 and mask.dim() <= 4):
        return mask
    mask = mask[(None,) * (len(batch) + 3 - mask.dim())]
    matrices = mask.shape[-3:]
    if all(size == 1 for size in mask.shape[:-3]):
        return mask.reshape(matrices)
    return mask.expand(*batch, *matrices).reshape(math.prod(batch), *matrices)


def _scale(query: Tensor, options: Options) -> float:
    """The scale; finite without columns, where scores are 0 for every scale."""
    return 1 / math.sqrt(max(query.shape[-1], 1)) if options.scale is None else options.scale


def _laid_out(out: Tensor, query: Tensor) -> Tensor:
    """`out` with its dims in the order of query's in memory."""
    order = attention_checks.output_order(query, out.shape)
    if order == list(range(out.dim())):
        return out
    inverse = [order.index(d) for d in range(out.dim())]
    # Not contiguous(), which does not change the stride of a dim of size 1.
    return out.permute(order).clone(memory_format=torch.contiguous_format).permute(inverse)


def register(library: torch.library.Library) -> None:
    softmax.register(library)
