"""Attention in a graph after AOTAutograd that reads copies, of which our op reads the originals.

PyTorch's kernels that take a mask want a head of keys for each head of queries. So models that have
fewer (transformers' repeat_kv) write each several times, and attention reads it as often. Others
write queries, keys and values once more for their strides (transformers' Whisper, BART and kin).
And PyTorch makes numbers of a boolean mask, which ours takes as it is.
"""

from __future__ import annotations

import dataclasses
import math
import operator
from collections.abc import Callable, Iterator
from typing import Any

import torch

from torch_cubin._drop_in import aten_kernels, install
from torch_cubin._inductor.activations import VIEWS
from torch_cubin._inductor.products import same_number
from torch_cubin._ops.batch_invariant import is_batch_invariant
from torch_cubin._pytorch import operators

aten = torch.ops.aten
OURS = torch.ops.cubin._scaled_dot_product_attention.default
# Their first arguments: query, key, value, mask, whether logsumexp is wanted, dropout_p, is_causal.
_WITH_MASK = (
    aten._scaled_dot_product_efficient_attention.default,
    aten._scaled_dot_product_cudnn_attention.default,
)
# What PyTorch before 2.13 adds for cuDNN where a boolean mask hides a key. So a row that sees none
# has the weights of one that sees all, where -inf would make its result zero. Inductor rounds the
# number to bfloat16, which gives the second.
_CUDNNS_HIDDEN = (-65504.0, -65536.0)
_ADDS_DIM = (*VIEWS, aten.unsqueeze.default)
_COPIES = (*VIEWS, aten._unsafe_view.default, aten.clone.default)
_NAMESPACES = {"aten", "prims", "cubin"}  # of ops that take any strides
_STRIDED_ANEW = (
    aten.as_strided.default,
    aten.as_strided_copy.default,
    aten.as_strided_scatter.default,
)  # read memory by strides of their own
_TURNS = (aten.permute.default, aten.transpose.int)


@dataclasses.dataclass
class Attention:
    """Arguments of our op, of which `results` are the result: without dropout and logsumexp."""

    query: torch.fx.Node
    key: torch.fx.Node
    value: torch.fx.Node
    mask: torch.fx.Node | None
    is_causal: bool
    scale: float | None
    results: list[torch.fx.Node]
    views: list[Any]  # of the query, the first one first
    empty_rows_see_all: bool  # those of the boolean mask in which no key is visible


def with_copies(node: Any) -> Attention | None:
    """The attention of a node that reads copies, with what they are copies of."""
    if not _calls(node, (*_WITH_MASK, OURS)) or not node.kwargs.keys() <= {"scale", "enable_gqa"}:
        return None
    given: list[Any] = [*node.args, None]
    query, key, value, mask, *rest = given[: max(4, len(node.args))]
    if node.target is OURS:
        dropout_p, is_causal, *rest = rest + [0.0, False][len(rest) :]
        results = [node]
        served = not node.kwargs.get("enable_gqa", False)
    else:
        _, dropout_p, is_causal, *rest = rest + [False, 0.0, False][len(rest) :]
        results = [user for user in node.users if user.target is operator.getitem]
        alone = len(results) == len(node.users) and all(user.args[1] == 0 for user in results)
        served = alone and _is_served(query, mask)
    # PyTorch's kernels differ in the corner that a causal mask of other sizes begins in.
    causal = not is_causal or (mask is None and same_number(_length(query), _length(key)))
    if not served or not causal or dropout_p != 0 or any(rest):
        return None
    if any(map(_has_readers_of_strides, results)):
        return None
    read = query, key, value, mask
    keys, values = _unrepeated(key), _unrepeated(value)
    if keys is not None and values is not None and same_number(_heads(keys), _heads(values)):
        key, value = keys, values
    query, key, value = map(_uncopied, (query, key, value))
    query, views, scale = _unscaled(query, node.kwargs.get("scale"))
    mask, hides = _boolean(mask, query)
    if (query, key, value, mask) == read:
        return None
    sees_all = hides in _CUDNNS_HIDDEN
    return Attention(query, key, value, mask, is_causal, scale, results, views, sees_all)


def seen_by_empty_rows(insert: Callable[..., Any], mask: Any) -> Any:
    """The boolean mask in which rows without a visible key see all."""
    some = insert(aten.any.dim, mask, -1, True)
    return insert(aten.logical_or.default, mask, insert(aten.logical_not.default, some))


def copies_after(node: torch.fx.Node) -> Iterator[tuple[torch.fx.Node, torch.fx.Node]]:
    """The copies of the turned result, each with its original, that have the original's strides now
    that the result has those of another query."""
    for turned in list(node.users):
        if turned.target not in _TURNS or len(node.users) != 1:
            continue
        value = turned.target(node.meta["val"], *turned.args[1:])
        for copy in list(turned.users):
            same = _calls(copy, (aten.clone.default,)) and len(turned.users) == 1
            if same and _are_same(copy.meta["val"].stride(), value.stride()):
                turned.meta["val"] = value
                yield copy, turned


def _has_readers_of_strides(result: torch.fx.Node) -> bool:
    """Whether a result must keep the strides that it was traced with, which Inductor does for an op
    of another library only where the op reads a view of it."""
    namespaces = {getattr(user.target, "namespace", "aten") for user in result.users}
    return not namespaces <= _NAMESPACES or _is_strided_anew(result)


def _is_strided_anew(value: torch.fx.Node) -> bool:
    """Whether a call of as_strided's kin reads this value, or a view of it, or writes to it."""
    for user in value.users:
        if _calls(user, _STRIDED_ANEW):
            return True
        is_view = operators.returns_views(user.target) or user.target is operator.getitem
        if is_view and _is_strided_anew(user):
            return True
    return False


def _uncopied(node: Any) -> Any:
    """What a copy is one of, if our kernels read it as quickly."""
    while _calls(node, (aten.clone.default,)) and _is_read_quickly(node.args[0].meta["val"]):
        node = node.args[0]
    return node


def _boolean(mask: Any, query: torch.fx.Node) -> tuple[Any, float | None]:
    """The boolean mask of which these numbers are made, where it is read more quickly, and the
    number of hidden keys."""
    rows = _length(query)
    if not isinstance(rows, int) or rows < aten_kernels.QUERIES_OF_BOOLEAN_MASKS:
        return mask, None
    numbers = mask
    while _calls(numbers, (aten.expand.default,)):
        numbers = numbers.args[0]
    numbers = _unpadded(numbers)
    if not _calls(numbers, (aten.where.self,)):
        return mask, None
    visible, seen, hidden = numbers.args
    if _calls(visible, (aten.logical_not.default,)):  # of torch before 2.13
        visible, seen, hidden = visible.args[0], hidden, seen
    hides = _number(hidden)
    known = _number(seen) == 0.0 and hides in (-math.inf, *_CUDNNS_HIDDEN)
    return (visible, hides) if known and _is_boolean(visible) else (mask, None)


def _unpadded(node: Any) -> Any:
    """The numbers of which a node has the first ones after padding: PyTorch writes a mask with rows
    of a multiple of 16 elements for its efficient kernel, and reads the given ones."""
    if not _calls(node, (aten.slice.Tensor,)):
        return node
    padded, _, *bounds = node.args
    if not _calls(padded, (aten.constant_pad_nd.default,)):
        return node
    source, pads, *_ = padded.args
    from_first = bounds[:1] in ([], [0]) and bounds[2:] in ([], [1]) and not any(pads[::2])
    same = from_first and _are_same(node.meta["val"].shape, source.meta["val"].shape)
    return source if same else node


def _is_boolean(node: Any) -> bool:
    return isinstance(node, torch.fx.Node) and node.meta["val"].dtype == torch.bool


def _number(node: Any) -> float | None:
    """Of a tensor without dims; -inf where its dtype has no number so low."""
    if _calls(node, (aten.scalar_tensor.default,)):
        number = node.args[0]
    elif _calls(node, (aten.full.default,)) and node.args[0] == []:
        number = node.args[1]
    else:
        return None
    dtype = node.meta["val"].dtype
    is_float = isinstance(number, int | float) and dtype.is_floating_point
    return -math.inf if is_float and number < torch.finfo(dtype).min else number


def _is_read_quickly(value: torch.Tensor) -> bool:
    """Whether the last dim is contiguous, and all rows begin at multiples of 16 bytes."""
    step = 16 // value.dtype.itemsize
    begins = value.storage_offset(), *value.stride()[:-1]
    aligned = all(same_number(begin % step, 0) for begin in begins)
    return aligned and same_number(value.stride()[-1], 1)


def _unscaled(
    query: torch.fx.Node, scale: float | None
) -> tuple[torch.fx.Node, list[torch.fx.Node], float | None]:
    """Of a query that is the views of a product with a number: the other factor, the views, and the
    scale with that number in it."""
    node: Any = query
    views: list[torch.fx.Node] = []
    while _calls(node, (*_TURNS, *VIEWS)) and len(node.users) == 1:
        views.insert(0, node)
        node = node.args[0]
    width = query.meta["val"].shape[-1]
    if not _calls(node, (aten.mul.Tensor,)) or len(node.users) != 1 or not isinstance(width, int):
        return query, [], scale
    factor, number = node.args
    value, own = factor.meta["val"], node.meta["val"]
    same = value.dtype == own.dtype and _are_same(value.stride(), own.stride())
    positive = isinstance(number, int | float) and number > 0
    # The product is computed, and rounded, where a backward needs it. Results with and without
    # gradients have the same bits under batch_invariant().
    rounds = positive and math.frexp(number)[0] != 0.5 and is_batch_invariant()
    if not positive or rounds or not same or not _is_read_quickly(value):
        return query, [], scale
    return factor, views, float(number) * (width**-0.5 if scale is None else scale)


def _length(node: torch.fx.Node) -> Any:
    return node.meta["val"].shape[2]


def _heads(node: torch.fx.Node) -> Any:
    return node.meta["val"].shape[1]


def _is_served(query: torch.fx.Node, mask: torch.fx.Node | None) -> bool:
    value = None if mask is None else mask.meta["val"]
    return aten_kernels.serves_attention(query.meta["val"], value, install.graph_policy())


def _unrepeated(node: Any) -> torch.fx.Node | None:
    """Of [batch, heads * n, length, head_dim], each head n times, those of [batch, heads, length,
    head_dim]."""
    expanded = node
    while _calls(expanded, _COPIES):
        expanded = expanded.args[0]
    if not _calls(expanded, (aten.expand.default,)):
        return None
    wider = _sliced(expanded.args[0])
    if not _calls(wider, _ADDS_DIM):
        return None
    source = wider.args[0]
    shapes = [each.meta["val"].shape for each in (node, expanded, wider, source)]
    if [len(shape) for shape in shapes] != [4, 5, 5, 4]:
        return None
    (batch, heads, *row), (_, _, times, *_), with_dim, of_source = shapes
    kept = [batch, of_source[1], *row]
    same = same_number(heads, of_source[1] * times) and _are_same(of_source, kept)
    same = same and _are_same(with_dim, [*kept[:2], 1, *row])
    return source if same and _are_same(shapes[1], [*kept[:2], times, *row]) else None


def _sliced(node: Any) -> Any:
    """The node of which slices have everything: `x[:, :, None, :]` slices each dim."""
    while _calls(node, (aten.slice.Tensor,)):
        source = node.args[0]
        if not _are_same(node.meta["val"].shape, source.meta["val"].shape) or node.args[4:] > (1,):
            return node
        node = source
    return node


def _calls(node: Any, targets: Any) -> bool:
    return isinstance(node, torch.fx.Node) and node.op == "call_function" and node.target in targets


def _are_same(sizes: Any, others: Any) -> bool:
    return len(sizes) == len(others) and all(map(same_number, sizes, others))


__all__ = ["OURS", "Attention", "copies_after", "seen_by_empty_rows", "with_copies"]
