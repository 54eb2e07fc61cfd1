"""What the attention ops require of their arguments, and the sizes and layouts that follow.

The same rules, order and messages as csrc/ops/attention/checks.cpp, for callers whose sizes may be
symbols: the fake kernels, vmap and the flop formulas. Tests compare both.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from torch_cubin._ops import checks as _checks
from torch_cubin._ops.checks import dtype_name, fail, require, shape_text

MAX_LENGTH = (1 << 30) - 256  # kMaxLength in csrc/ops/attention/checks.cpp
FLOAT32 = torch.finfo(torch.float32)
_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
_HEADS = "has numbers of heads that do not go together"
_SHARING = "Pass enable_gqa=True where several heads of query share one of key and value."


class Options(NamedTuple):
    """What the schemas take beside the tensors that carry gradients, with their defaults."""

    attn_mask: Tensor | None = None
    dropout_p: float = 0.0
    is_causal: bool = False
    dropout_seed: Tensor | None = None
    scale: float | None = None
    enable_gqa: bool = False
    window_left: int = -1
    window_right: int = -1
    bottom_right: bool = False
    softcap: float = 0.0
    alibi_slopes: Tensor | None = None
    sinks: Tensor | None = None
    cu_seqlens_q: Tensor | None = None
    cu_seqlens_k: Tensor | None = None
    max_seqlen_q: int = 0
    max_seqlen_k: int = 0

    @property
    def packed(self) -> bool:
        """Whether the tensors are (rows of all sequences, heads, head_dim)."""
        return self.cu_seqlens_q is not None or self.cu_seqlens_k is not None

    def positional(self) -> tuple[Any, ...]:
        """The arguments that the schemas take by position."""
        return tuple(self[:4])

    def named(self) -> dict[str, Any]:
        """The keyword-only arguments that are not the default, which some ops lack."""
        return {
            name: value
            for name, value in zip(self._fields[4:], self[4:], strict=True)
            if isinstance(value, Tensor) or value != self._field_defaults[name]
        }


class Shape(NamedTuple):
    """The problem's sizes. `batch`: the leading dims before the heads, broadcast."""

    batch: list[int]
    heads: int
    out: list[int]
    logsumexp: list[int]


def check_attention(op: str, query: Tensor, key: Tensor, value: Tensor, options: Options) -> Shape:
    """Checks the arguments of an attention op, which messages call `op`."""
    for name, tensor in _tensors(query, key, value, options):
        _checks.check_dense(op, name, tensor)
        _checks.check_dims(tensor)
    _check_dtypes(op, query, key, value)
    shape = attention_shape(op, query.shape, key.shape, value.shape, options)
    if options.packed:
        _check_packed(op, query, options)
    if options.attn_mask is not None:
        _check_mask(op, shape, key.shape, query, options.attn_mask, options.is_causal)
    _check_per_head(op, "alibi_slopes", options.alibi_slopes, shape, query, batched=True)
    _check_per_head(op, "sinks", options.sinks, shape, query, batched=False)
    seed = options.dropout_seed
    if seed is not None and options.dropout_p > 0:
        _check_side(op, "dropout_seed", seed, query, seed.dtype)
    _check_settings(op, options)
    return shape


def attention_shape(
    op: str, query: Sequence[int], key: Sequence[int], value: Sequence[int], options: Options
) -> Shape:
    """The sizes for query, key and value of these shapes."""
    for name, shape in (("query", query), ("key", key), ("value", value)):
        if len(shape) < 2:
            fail(_argument(op, name), "has too few dimensions", "at least 2", str(len(shape)))
    rows = -3 if options.packed else -2
    require(
        key[-1] == query[-1],
        _argument(op, "key"),
        "has another head_dim (last size) than query",
        str(query[-1]),
        str(key[-1]),
    )
    key_rows, value_rows = _size(key, rows), _size(value, rows)
    require(
        key_rows == value_rows,
        _argument(op, "value"),
        "has another sequence length than key",
        str(key_rows),
        str(value_rows),
    )
    if options.packed:
        return _packed_shape(op, query, key, value, options)
    shapes = (query, key, value)
    if options.enable_gqa and min(map(len, shapes)) < 3:
        fail(
            op,
            "with enable_gqa=True needs a dimension of heads",
            "(..., heads, rows, head_dim)",
            ", ".join(map(shape_text, shapes)),
        )
    heads, _ = _heads(op, *(_size(shape, -3) for shape in shapes), options.enable_gqa)
    batch = _batch(op, shapes)
    has_heads = max(map(len, shapes)) > 2
    logsumexp = [*batch, heads, query[-2]] if has_heads else [query[-2]]
    if all(isinstance(size, int) for size in (query[-2], key[-2], heads, query[-1], value[-1])):
        _check_lengths(op, shapes, max(query[-2], key[-2], heads))
    return Shape(batch, heads, [*logsumexp, value[-1]], logsumexp)


def check_backward(
    shape: Shape, query: Tensor, grad_out: Tensor, out: Tensor, logsumexp: Tensor
) -> None:
    """Checks what a backward takes beside the arguments of its forward."""
    op = "attention_backward"
    saved = saved_dtype(query)
    tensors = (
        ("grad_out", grad_out, shape.out, query.dtype),
        ("out", out, shape.out, query.dtype),
        ("logsumexp", logsumexp, shape.logsumexp, saved),
    )
    for name, tensor, wanted, _ in tensors:
        same = tensor.dim() == len(wanted)
        details = (
            _argument(op, name),
            "has a wrong shape",
            shape_text(wanted),
            shape_text(tensor.shape),
        )
        require(same, *details)
        for size, expected in zip(tensor.shape, wanted, strict=True):
            require(size == expected, *details)
    for name, tensor, _, dtype in tensors:
        _check_side(op, name, tensor, query, dtype)


def saved_dtype(query: Tensor) -> torch.dtype:
    """The dtype of logsumexp."""
    return torch.float64 if query.dtype == torch.float64 else torch.float32


def output_strides(like: Tensor, sizes: Sequence[int]) -> list[int]:
    """Strides of a fresh tensor of `sizes` whose dims lie in memory as those of `like` do.

    That is in the order of its strides, largest first (ties: the order of the dims), where `like`
    has the same sizes but for the last, its dims lie one within the other (gaps are allowed, as a
    part of a packed tensor has them; no element is shared), and its last dim is the innermost;
    otherwise contiguous.
    """
    order = list(range(len(sizes)))
    if like.dim() == len(sizes) and all(map(_equal, like.shape[:-1], sizes[:-1])):
        order.sort(key=functools.cmp_to_key(lambda i, j: _compare(like.stride(j), like.stride(i))))
        if not _is_nested(like, order) or order[-1] != len(sizes) - 1:
            order.sort()
    strides = [1] * len(sizes)
    step = 1
    for d in reversed(order):
        strides[d] = step
        step = step * (sizes[d] if _is_symbol(sizes[d]) else max(sizes[d], 1))
    return strides


def _is_nested(tensor: Tensor, order: Sequence[int]) -> bool:
    reach = 1  # elements that the dims within span
    for d in reversed(order):
        size, stride = tensor.shape[d], tensor.stride(d)
        if _equal(size, 1):
            continue
        if _equal(size, 0) or not _reaches(stride, reach):
            return False
        reach = stride * size
    return True


def _is_symbol(size: int | torch.SymInt) -> bool:
    return not isinstance(size, int)


def _equal(a: int | torch.SymInt, b: int | torch.SymInt) -> bool:
    """Whether two sizes are equal, now; what only run time knows counts as different."""
    if _is_symbol(a) or _is_symbol(b):
        from torch.fx.experimental.symbolic_shapes import guard_or_false

        return guard_or_false(a == b)
    return a == b


def _reaches(stride: int | torch.SymInt, reach: int | torch.SymInt) -> bool:
    """Whether a dim steps over `reach` elements; what only run time knows counts as done so."""
    if _is_symbol(stride) or _is_symbol(reach):
        from torch.fx.experimental.symbolic_shapes import guard_or_true

        return guard_or_true(stride >= reach)
    return stride >= reach


def _compare(a: int | torch.SymInt, b: int | torch.SymInt) -> int:
    """-1, 0 or 1, as strides are ordered; a size that only run time knows counts as large."""
    if not (_is_symbol(a) or _is_symbol(b)):
        return int(a > b) - int(a < b)
    from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols, guard_or_false

    if guard_or_false(a > b):
        return 1
    if guard_or_false(b > a):
        return -1
    return int(bool(free_unbacked_symbols([a]))) - int(bool(free_unbacked_symbols([b])))


def _size(shape: Sequence[int], i: int) -> int:
    """A size counted from the end; 1 for a dim that is not there."""
    return shape[i] if -i <= len(shape) else 1


def _argument(op: str, name: str) -> str:
    return f"{op} argument '{name}'"


def _tensors(
    query: Tensor, key: Tensor, value: Tensor, options: Options
) -> list[tuple[str, Tensor]]:
    named = [("query", query), ("key", key), ("value", value)]
    named += zip(options._fields, options, strict=True)
    return [(name, tensor) for name, tensor in named if isinstance(tensor, Tensor)]


def _check_dtypes(op: str, query: Tensor, key: Tensor, value: Tensor) -> None:
    all_ = (("query", query), ("key", key), ("value", value))
    for name, tensor in all_:
        if tensor.dtype not in _DTYPES:
            fail(
                _argument(op, name),
                "has an unsupported dtype",
                "float16, bfloat16, float32 or float64",
                dtype_name(tensor),
                "Convert it with .to(dtype), or use torch.nn.functional."
                "scaled_dot_product_attention.",
            )
    for name, tensor in all_:
        if tensor.device != query.device:
            fail(
                _argument(op, name),
                "is on another device",
                f"{query.device} like 'query'",
                str(tensor.device),
                "Move one of them with .to(device).",
            )
        if tensor.dtype != query.dtype:
            fail(
                _argument(op, name),
                "has another dtype",
                f"{dtype_name(query)} like 'query'",
                dtype_name(tensor),
                "Convert one of them with .to(dtype).",
            )


def _check_side(op: str, name: str, tensor: Tensor, query: Tensor, dtype: torch.dtype) -> None:
    """An optional tensor beside the three: its device and dtype."""
    if tensor.device != query.device:
        fail(
            _argument(op, name),
            "is on another device",
            f"{query.device} like 'query'",
            str(tensor.device),
            "Move it with .to(device).",
        )
    if tensor.dtype != dtype:
        fail(
            _argument(op, name),
            "has a wrong dtype",
            str(dtype).removeprefix("torch."),
            dtype_name(tensor),
            "Convert it with .to(dtype).",
        )


def _heads(op: str, q: int, k: int, v: int, enable_gqa: bool) -> tuple[int, int]:
    """The heads of the output, and those of key and value that divide them."""
    got = f"query {q}, key {k}, value {v}"
    if enable_gqa:
        for size in (k, v):
            divides = q == 0 if _equal(size, 0) else q % size == 0
            require(divides, op, _HEADS, "heads of key and value that divide those of query", got)
        return q, k if _equal(k, v) else q
    heads = 1
    for size in (q, k, v):
        if _equal(size, 1):
            continue
        if not _equal(heads, 1):
            require(heads == size, op, _HEADS, "equal numbers, or 1", got, _SHARING)
        heads = size
    shared = _equal(k, 1) and _equal(v, 1) and not _equal(heads, 0)
    return heads, 1 if shared else heads


def _batch(op: str, shapes: Sequence[Sequence[int]]) -> list[int]:
    dims = max(len(shape) for shape in shapes) - 3
    batch = []
    for i in range(dims):
        size = 1
        for shape in shapes:
            own = _size(shape, -3 - dims + i)
            if _equal(own, 1):
                continue
            if not _equal(size, 1):
                require(
                    size == own,
                    op,
                    "has batch dimensions that do not broadcast",
                    f"equal sizes or 1 at batch dimension {i}",
                    f"{size} and {own}",
                )
            size = own
        batch.append(size)
    return batch


def _packed_shape(
    op: str, query: Sequence[int], key: Sequence[int], value: Sequence[int], options: Options
) -> Shape:
    if options.cu_seqlens_q is None or options.cu_seqlens_k is None:
        fail(op, "has one of 'cu_seqlens_q' and 'cu_seqlens_k' alone", "both or none", "one")
    for name, shape in (("query", query), ("key", key), ("value", value)):
        if len(shape) != 3:
            fail(
                _argument(op, name),
                "has a wrong rank for packed sequences",
                "(rows of all sequences, heads, head_dim)",
                shape_text(shape),
            )
    heads, kv_heads = _heads(op, query[1], key[1], value[1], options.enable_gqa)
    if not (_equal(query[1], heads) and _equal(key[1], kv_heads) and _equal(value[1], kv_heads)):
        fail(
            op,
            _HEADS,
            "heads of packed sequences that need no broadcasting",
            f"{shape_text(query)}, {shape_text(key)}",
            _SHARING,
        )
    sequences = options.cu_seqlens_q.shape[0] - 1 if options.cu_seqlens_q.dim() else 0
    return Shape([sequences], heads, [query[0], heads, value[2]], [heads, query[0]])


def _check_packed(op: str, query: Tensor, options: Options) -> None:
    offsets_q, offsets_k = options.cu_seqlens_q, options.cu_seqlens_k
    _check_side(op, "cu_seqlens_q", offsets_q, query, torch.int32)
    _check_side(op, "cu_seqlens_k", offsets_k, query, torch.int32)
    details = (
        op,
        "has 'cu_seqlens_q' and 'cu_seqlens_k' of wrong shapes",
        "(sequences + 1,) each",
        f"{shape_text(offsets_q.shape)} and {shape_text(offsets_k.shape)}",
    )
    require(offsets_q.dim() == offsets_k.dim() == 1, *details)
    require(offsets_q.shape[0] >= 1, *details)
    require(offsets_q.shape[0] == offsets_k.shape[0], *details)
    if options.attn_mask is not None:
        name = _argument(op, "attn_mask")
        fail(name, "cannot go with packed sequences", "no mask", "a mask")


def _check_lengths(op: str, shapes: Sequence[Sequence[int]], longest: int) -> None:
    if longest >= MAX_LENGTH or max(shapes[0][-1], shapes[2][-1]) > (1 << 31) - 1:
        fail(
            op,
            "has a dimension that is too large",
            f"less than {MAX_LENGTH}",
            ", ".join(map(shape_text, shapes)),
        )


def _check_mask(
    op: str, shape: Shape, key: Sequence[int], query: Tensor, mask: Tensor, is_causal: bool
) -> None:
    if is_causal:
        fail(
            _argument(op, "attn_mask"),
            "cannot go with is_causal=True",
            "a mask or is_causal",
            "both",
            "Put the causal part into the mask.",
        )
    own = mask.dtype in (query.dtype, torch.float32)
    _check_side(op, "attn_mask", mask, query, mask.dtype if own else torch.bool)
    check_mask_shape(op, mask.shape, [*shape.logsumexp, key[-2]])


def check_mask_shape(op: str, mask: Sequence[int], scores: Sequence[int]) -> None:
    """Fails unless a mask of this shape broadcasts to scores of that shape."""
    details = (
        _argument(op, "attn_mask"),
        "has a wrong shape",
        f"one that broadcasts to {shape_text(scores)}",
        shape_text(mask),
    )
    require(len(mask) <= len(scores), *details)
    for size, wanted in zip(reversed(mask), reversed(scores), strict=False):
        if not _equal(size, 1):
            require(size == wanted, *details)


def _check_per_head(
    op: str, name: str, tensor: Tensor | None, shape: Shape, query: Tensor, *, batched: bool
) -> None:
    if tensor is None:
        return
    _check_side(op, name, tensor, query, torch.float32)
    details = (
        _argument(op, name),
        "has a wrong shape",
        f"({shape.heads},)" + (", or (batch, heads)" if batched else ""),
        shape_text(tensor.shape),
    )
    require(tensor.dim() == 1 or (batched and tensor.dim() == 2), *details)
    require(tensor.shape[-1] == shape.heads, *details)
    if tensor.dim() == 2:
        require(tensor.shape[0] == math.prod(shape.batch), *details)


def _check_settings(op: str, options: Options) -> None:
    if not 0 <= options.dropout_p <= 1:
        p = f"{options.dropout_p:f}"
        fail(_argument(op, "dropout_p"), "is out of range", "0 to 1", p)
    if options.dropout_p > 0:
        seed, wanted = options.dropout_seed, "an int64 tensor of one element"
        if seed is None:
            name = f"{op} with dropout_p > 0"
            fail(name, "needs a seed", f"'dropout_seed', {wanted}", "none")
        if seed.dtype != torch.int64 or seed.numel() != 1:
            got = f"{dtype_name(seed)} {shape_text(seed.shape)}"
            fail(_argument(op, "dropout_seed"), "is no seed", wanted, got)
    if options.softcap != 0 and not FLOAT32.tiny <= options.softcap <= FLOAT32.max:
        expected = "0 (none) or a number that a normal float32 holds"
        fail(_argument(op, "softcap"), "is out of range", expected, f"{options.softcap:f}")
    if options.window_left < -1 or options.window_right < -1:
        got = f"{options.window_left} left, {options.window_right} right"
        fail(op, "has a negative window", "-1 (open) or more columns", got)
