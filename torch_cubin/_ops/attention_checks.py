"""Shapes and strides of the attention ops' outputs for arguments whose sizes may be symbolic.

C++ checks the arguments (csrc/ops/attention/problem/arguments.cpp), also for fake tensors and under
vmap, which Python describes. The shapes and strides of outputs are computed both there and here,
because formulas of symbols must be in Python; tests compare both on random layouts.
"""

from __future__ import annotations

import collections
import functools
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from torch_cubin._native import library
from torch_cubin._ops import checks
from torch_cubin._ops.raw_ops import E4M3, E4M3_BACKWARD


class Argument(NamedTuple):
    """An argument of one of the ops, for example "float softcap=0.0"."""

    type: str
    name: str
    default: Any  # None if it has no default
    by_name: bool  # keyword-only


# Defaults that are not numbers. (ast.literal_eval() of all takes 5 ms of the import.)
_WORDS = {"": None, "None": None, "False": False, "True": True}


@functools.cache
def arguments_of(op: str) -> tuple[Argument, ...]:
    """The arguments in the library's schema. The list of the options is
    csrc/ops/attention/problem/arguments.h."""
    schema = library.attention_schemas()[op]
    arguments, by_name = [], False
    for text in schema[schema.index("(") + 1 : schema.rindex(") ->")].split(", "):
        if text == "*":
            by_name = True
            continue
        type_, _, rest = text.partition(" ")
        name, _, default = rest.partition("=")
        # Of a float, the schema's text has no decimal point, which would depend on the locale.
        number = float if type_ == "float" else int
        value = _WORDS[default] if default in _WORDS else number(default)
        arguments.append(Argument(type_, name, value, by_name))
    return tuple(arguments)


def _option_arguments() -> list[Argument]:
    """The arguments of attention_forward after query, key and value, then those that only
    float8_e4m3fn has."""
    forward, e4m3 = (arguments_of(op)[3:] for op in ("attention_forward", E4M3))
    names = {argument.name for argument in forward}
    return [*forward, *(argument for argument in e4m3 if argument.name not in names)]


_ARGUMENTS = _option_arguments()
TENSOR_OPTIONS = tuple(option.name for option in _ARGUMENTS if option.type == "Tensor?")
PER_HEAD_OPTIONS = ("alibi_slopes", "sinks")  # tensors (heads,) or (batch, heads)
_POSITIONAL = sum(not option.by_name for option in _ARGUMENTS)


def _fields() -> Any:
    return collections.namedtuple(
        "_Fields",
        [option.name for option in _ARGUMENTS],
        defaults=[option.default for option in _ARGUMENTS],
    )


def numbers_of(values: Mapping[str, Any], defaults: Mapping[str, Any]) -> dict[str, Any]:
    """The numeric options of a call as JSON, with floats as strings, because JSON has neither
    infinities nor NaN."""
    return {
        name: str(float(values[name])) if isinstance(default, float) else values[name]
        for name, default in defaults.items()
        if isinstance(default, (bool, int, float))
    }


class Options(_fields()):  # type: ignore[misc]  # the names are the schemas'
    """Values of the schemas' arguments other than the differentiable tensors, by name."""

    __slots__ = ()

    @property
    def packed(self) -> bool:
        """Whether the tensors are (rows of all sequences, heads, head_dim)."""
        return self.cu_seqlens_q is not None or self.cu_seqlens_k is not None

    def tensors(self) -> dict[str, Tensor]:
        """The tensors among the options that are given, by name."""
        return {name: x for name, x in self._asdict().items() if isinstance(x, Tensor)}

    def numbers(self) -> dict[str, Any]:
        return numbers_of(self._asdict(), self._field_defaults)

    def positional(self) -> tuple[Any, ...]:
        """The arguments that the schemas take by position."""
        return tuple(self[:_POSITIONAL])

    def named(self) -> dict[str, Any]:
        """The keyword-only arguments that are not the default, which some ops lack."""
        return {
            name: value
            for name, value in zip(self._fields[_POSITIONAL:], self[_POSITIONAL:], strict=True)
            if isinstance(value, Tensor) or value != self._field_defaults[name]
        }


def options_of(op: str, *args: Any, **kwargs: Any) -> Options:
    """The options of a call. In the ops of float8_e4m3fn the numbers of heads say which share."""
    if op in (E4M3, E4M3_BACKWARD):
        kwargs["enable_gqa"] = True
    return Options(*args, **kwargs)


class Shape(NamedTuple):
    """The problem's sizes. `batch`: the leading dims before the heads, broadcast."""

    batch: list[int]
    heads: int
    out: list[int]
    logsumexp: list[int]


def check_attention(
    op: str,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    options: Options,
    *,
    dims: Mapping[str, int | None] | None = None,
    **saved: Tensor,
) -> Shape:
    """Raises the op's error for these arguments, else returns the sizes of its outputs.

    `saved`: grad_out, out and logsumexp of a backward. `dims`: for each tensor the dim that vmap
    maps over.
    """
    dims = dims or {}
    tensors = {"query": query, "key": key, "value": value, **options.tensors(), **saved}
    for name, tensor in tensors.items():
        checks.check_dense(op, name, tensor)
    described = {name: checks.described(tensor, dims.get(name)) for name, tensor in tensors.items()}
    checks.ask("attention", {"op": op, "tensors": described, "options": options.numbers()})

    def shape_of(name: str) -> Sequence[int]:
        return checks.shape_of(tensors[name], dims.get(name))

    return _shape(shape_of("query"), shape_of("key"), shape_of("value"), options)


def _shape(
    query: Sequence[int], key: Sequence[int], value: Sequence[int], options: Options
) -> Shape:
    """The sizes for arguments of these shapes, which must be compatible."""
    if options.cu_seqlens_q is not None:  # packed
        checks.unify(key[0], value[0])
        sequences = options.cu_seqlens_q.shape[0] - 1
        return Shape([sequences], query[1], [*query[:2], value[2]], [query[1], query[0]])
    checks.unify(key[-1], query[-1])
    checks.unify(key[-2], value[-2])
    shapes = (query, key, value)
    leading = []  # batch and heads
    for i in range(-max(map(len, shapes)), -2):
        shared = i == -3 and options.enable_gqa
        leading.append(query[i] if shared else _broadcast(*(_size(shape, i) for shape in shapes)))
    logsumexp = [*leading, query[-2]]
    return Shape(leading[:-1], leading[-1] if leading else 1, [*logsumexp, value[-1]], logsumexp)


def _broadcast(*sizes: int) -> int:
    found = 1
    for size in sizes:
        if checks.equal(size, 1):
            continue
        if not checks.equal(found, 1):
            checks.unify(found, size)
        found = size
    return found


def out_dtype(operand: Tensor) -> torch.dtype:
    """The dtype of the output, and of an operand's gradient."""
    return torch.bfloat16 if operand.dtype == torch.float8_e4m3fn else operand.dtype


def saved_dtype(query: Tensor) -> torch.dtype:
    """The dtype of logsumexp."""
    return torch.float64 if query.dtype == torch.float64 else torch.float32


def output_order(like: Tensor, sizes: Sequence[int]) -> list[int]:
    """The dims of a fresh tensor of `sizes`, in their order in memory.

    This is the order of `like`'s strides, largest first (ties: the order of the dims). If `like`
    differs in a size other than the last, its elements overlap (gaps are allowed, as in a part of a
    packed tensor), or its last dim is not the innermost, it is the order of the dims.
    """
    order = list(range(len(sizes)))
    if like.dim() == len(sizes) and all(map(checks.equal, like.shape[:-1], sizes[:-1])):

        def compare(i: int, j: int) -> int:
            return _compare(like.stride(j), like.stride(i))

        order.sort(key=functools.cmp_to_key(compare))
        if not _is_nested(like, order) or order[-1] != len(sizes) - 1:
            order.sort()
    return order


def output_strides(like: Tensor, sizes: Sequence[int]) -> list[int]:
    """Strides of a fresh tensor of `sizes` with the dims in output_order()."""
    strides = [1] * len(sizes)
    step = 1
    for d in reversed(output_order(like, sizes)):
        strides[d] = step
        step = step * (sizes[d] if _is_symbol(sizes[d]) else max(sizes[d], 1))
    return strides


def _is_nested(tensor: Tensor, order: Sequence[int]) -> bool:
    reach = 1  # number of elements that the inner dims span
    for d in reversed(order):
        size, stride = tensor.shape[d], tensor.stride(d)
        if checks.equal(size, 1):
            continue
        if checks.equal(size, 0) or not _reaches(stride, reach):
            return False
        reach = stride * size
    return True


def _is_symbol(size: int | torch.SymInt) -> bool:
    return not isinstance(size, int)


def _reaches(stride: int | torch.SymInt, reach: int | torch.SymInt) -> bool:
    """Whether a dim steps over `reach` elements; assumed if it depends on data."""
    if _is_symbol(stride) or _is_symbol(reach):
        from torch.fx.experimental.symbolic_shapes import guard_or_true

        return guard_or_true(stride >= reach)
    return stride >= reach


def _compare(a: int | torch.SymInt, b: int | torch.SymInt) -> int:
    """-1, 0 or 1 for comparing strides; a data-dependent size counts as large."""
    if not (_is_symbol(a) or _is_symbol(b)):
        return int(a > b) - int(a < b)
    from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols, guard_or_false

    if guard_or_false(a > b):
        return 1
    if guard_or_false(b > a):
        return -1
    return int(bool(free_unbacked_symbols([a]))) - int(bool(free_unbacked_symbols([b])))


def _size(shape: Sequence[int], i: int) -> int:
    """A size counted from the end; 1 for a dim that does not exist."""
    return shape[i] if -i <= len(shape) else 1
