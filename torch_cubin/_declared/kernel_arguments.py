"""Converts the result of a declared op's `args` to the contract's JSON: one entry for each kernel
parameter."""

from __future__ import annotations

import ctypes
import math
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from torch_cubin import errors
from torch_cubin._declared.c_struct import CStruct, Field
from torch_cubin._declared.expressions import (
    Traced,
    TracedDtype,
    TracedList,
    TracedTensor,
    TracedText,
    TracedView,
    tree_of,
)
from torch_cubin._kernels import scalars
from torch_cubin._kernels.arguments import Bits
from torch_cubin._kernels.scalars import Scalar, TracedScalar
from torch_cubin._kernels.struct_bytes import Raw, Struct, is_raw
from torch_cubin._kernels.tensor_map import TensorMap, TracedTensorMap

_EXPECTED = (
    "a tensor argument, output or scratch, a number, torch_cubin.int32(...) and its kin, None,"
    " bytes, a ctypes.Structure, torch_cubin.struct(...) or torch_cubin.TensorMap(...)"
)


def struct(type: Any, /, **members: Any) -> Struct:
    """A struct by value, for define_op's `args`, where each call may compute members, and for
    direct launches of a kernel.

    `type` is a subclass of ctypes.Structure, or a structured NumPy dtype, with the layout of the
    kernel's struct; `members` has a value for each field: a tensor for a pointer, a number, a
    struct() for a struct, a sequence for an array.

    With a layout of torch_cubin.c_struct, fields may be omitted: they are zero, or have the value
    of their initialiser; a dict stands for a struct or a union in it. One member of a union takes a
    value. A bit field takes a constant.

    Raises InputError [input] for a field without a value, and for an unknown field.
    """
    if isinstance(type, CStruct):
        return _of_c(type, members)
    size, fields = _fields(type)
    label = f"torch_cubin.struct of '{getattr(type, '__name__', type)}'"
    for name in {**fields, **members}:
        if name not in members or name not in fields:
            what = "value for the field" if name in fields else "field"
            expected, got = ", ".join(fields), ", ".join(members) or "none"
            raise errors.fault(
                "input", label, f"has no {what} '{name}'", expected=expected, got=got
            )
    out: list[tuple[int, Any]] = []
    for name, (offset, kind, count, step) in fields.items():
        value = members[name]
        if count is None:
            out.append((offset, _member(kind, value, f"{label} field '{name}'")))
            continue
        if not isinstance(value, Sequence) or len(value) != count:
            raise errors.fault(
                "input", f"{label} field '{name}'", "is an array", expected=f"{count} values"
            )
        for index, item in enumerate(value):
            where = f"{label} field '{name}[{index}]'"
            out.append((offset + index * step, _member(kind, item, where)))
    return Struct(size, out, label)


def _of_c(layout: CStruct, members: Mapping[str, Any]) -> Struct:
    label = f"torch_cubin.struct of '{layout.name}'"
    for name in members:
        if name not in layout.fields:
            raise errors.fault(
                "input", label, f"has no field '{name}'",
                expected=errors.nearest(name, list(layout.fields)), got=f"'{name}'",
            )  # fmt: skip
    overlapping = _overlapping(layout)
    for name in members:
        both = sorted(overlapping.get(name, frozenset()) & members.keys())
        if both:
            raise errors.fault("input", label, "has a value for two members of one union",
                               expected=f"'{name}' or '{both[0]}'", got="both")  # fmt: skip
    out: list[tuple[int, Any]] = []
    bits: dict[int, int] = {}  # bytes of bit fields, by offset
    names = list(layout.fields)
    for name, field in layout.fields.items():
        where = f"{label} field '{name}'"
        others = overlapping.get(name, frozenset())
        if name not in members and others & members.keys():
            continue  # another member of the union has a value
        if name not in members and isinstance(field.default, errors.Error):
            raise field.default
        value = members.get(name, field.default)
        if field.bits is not None:
            _set_bits(bits, field, value, where)
        elif name not in members and isinstance(field.kind, CStruct):
            # The initialisers of the fields; for a union only its first member's.
            if not any(names.index(other) < names.index(name) for other in others):
                for index in range(1 if field.count is None else field.count):
                    inner = _of_c(field.kind, {}).members
                    out += [(field.offset + index * field.step + at, m) for at, m in inner]
        elif name in members or field.default:
            out += _of_c_items(field, value, where)
    out += [(at, ["uint8", byte]) for at, byte in bits.items()]
    return Struct(layout.size, out, label)


def _overlapping(layout: CStruct) -> dict[str, frozenset[str]]:
    """For each field that shares bits with others, as members of unions do: those others."""

    def span(field: Field) -> tuple[int, int]:
        first = 8 * field.offset + field.bit
        return first, first + field.bits if field.bits is not None else 8 * field.end

    spans = sorted((*span(field), name) for name, field in layout.fields.items())
    found: dict[str, set[str]] = {}
    for index, (_, end, name) in enumerate(spans):
        for first, _, other in spans[index + 1 :]:
            if first >= end:
                break
            found.setdefault(name, set()).add(other)
            found.setdefault(other, set()).add(name)
    return {name: frozenset(others) for name, others in found.items()}


def _set_bits(bits: dict[int, int], field: Field, value: Any, label: str) -> None:
    count = field.bits or 0
    signed = isinstance(field.kind, str) and not field.kind.startswith(("u", "bool"))
    low, high = (-(1 << count - 1), (1 << count - 1) - 1) if signed else (0, (1 << count) - 1)
    if not isinstance(value, int) or not low <= value <= high:
        expected = f"a constant from {low} to {high}, of {errors.counted(count, 'bit')}"
        raise _wrong_value(label, expected, value)
    placed = (value & (1 << count) - 1) << field.bit
    for index in range((field.bit + count + 7) // 8):
        at = field.offset + index
        bits[at] = bits.get(at, 0) | (placed >> 8 * index & 0xFF)


def _of_c_items(field: Field, value: Any, where: str) -> list[tuple[int, Any]]:
    """The members of a field, or of an array's items."""
    if field.count is None:
        return _of_c_field(field, field.offset, value, where)
    if isinstance(value, (int, float)) and value == 0:
        return []
    if not isinstance(value, Sequence) or len(value) != field.count:
        got = f"{len(value)}" if isinstance(value, Sequence) else _shown(value)
        expected = f"{field.count} values, or 0"
        raise errors.fault("input", where, "is an array", expected=expected, got=got)
    out = []
    for index, item in enumerate(value):
        at = field.offset + index * field.step
        out += _of_c_field(field, at, item, f"{where[:-1]}[{index}]'")
    return out


def _of_c_field(field: Field, offset: int, value: Any, label: str) -> list[tuple[int, Any]]:
    kind = field.kind
    if isinstance(kind, CStruct):
        if isinstance(value, Mapping):
            value = _of_c(kind, value)
        if not isinstance(value, Struct) or value.size != kind.size:
            expected = f"torch_cubin.struct of '{kind.name}', or a dict of its fields"
            raise _wrong_value(label, expected, value)
        return [(offset + at, member) for at, member in value.members]
    if kind == "bool" and type(value) is int and value in (0, 1):
        value = bool(value)
    if kind == "bytes":  # long double and pointers to members have no number in a contract
        if not isinstance(value, (bytes, bytearray)) or len(value) != field.step:
            raise _wrong_value(label, errors.counted(field.step, "byte"), value)
        return [(offset, entry(value, label))]
    if kind == "tensor_map":
        if isinstance(value, TensorMap):
            return [(offset, Raw(value, label))]
        if not isinstance(value, TracedTensorMap):
            raise _wrong_value(label, "torch_cubin.TensorMap(...)", value)
        return [(offset, entry(value, label))]
    return [(offset, _member(kind, value, label))]


_CTYPES = {
    **dict.fromkeys("bhilq", "int"),
    **dict.fromkeys("BHILQ", "uint"),
    **dict.fromkeys("fd", "float"),
    "?": "bool",
    "P": "pointer",
    "z": "pointer",
}
_BITS = {
    "bfloat16": ("uint16",),
    "float16": ("uint16",),
    "float32": ("uint32",),
    "float64": ("uint64",),
}
_NUMPY = {"i": "int", "u": "uint", "f": "float", "b": "bool"}


def _is_swapped(ctype: Any) -> bool:
    """Whether a number's bytes are in reverse order, as in a ctypes.BigEndianStructure."""
    other = "__ctype_be__" if sys.byteorder == "little" else "__ctype_le__"
    return isinstance(getattr(ctype, "_type_", None), str) and (
        ctypes.sizeof(ctype) > 1 and ctype is getattr(ctype, other, None)
    )


# Offset, kind, number of items of an array, bytes between them.
_Place = tuple[int, Any, int | None, int]


def _fields(type_: Any) -> tuple[int, dict[str, _Place]]:
    """The struct's size, and its fields. A kind is "int32" etc., "pointer", or a struct."""

    def refuse(got: str) -> errors.Error:
        expected = "a ctypes.Structure of numbers, pointers, structs and arrays, or such a dtype"
        return errors.fault(
            "input", "torch_cubin.struct", "takes another type", expected=expected, got=got
        )

    def of_ctype(ctype: Any) -> Any:
        if issubclass(ctype, ctypes.Structure):
            return ctype
        code = getattr(ctype, "_type_", None)
        if not isinstance(code, str):
            return "pointer" if issubclass(ctype, ctypes._Pointer) else None
        kind = _CTYPES.get(code)
        if kind in ("bool", "pointer", None):
            return kind
        return f"{kind}{8 * ctypes.sizeof(ctype)}"

    def of_dtype(dtype: Any) -> Any:
        if dtype.fields is not None:
            return dtype
        kind = _NUMPY.get(dtype.kind)
        return kind if kind in ("bool", None) else f"{kind}{8 * dtype.itemsize}"

    fields: dict[str, _Place] = {}
    if isinstance(type_, type) and issubclass(type_, ctypes.Structure):
        bases = [base for base in reversed(type_.__mro__) if "_fields_" in vars(base)]
        for name, ctype, *bits in [field for base in bases for field in vars(base)["_fields_"]]:
            if name in fields:
                raise refuse(f"field '{name}' in {type_.__name__} and in its base, too")
            count, step = None, 0
            if issubclass(ctype, ctypes.Array):
                count, ctype = ctype._length_, ctype._type_
                step = ctypes.sizeof(ctype)
            kind = of_ctype(ctype)
            if _is_swapped(ctype):
                raise refuse(f"field '{name}' of {ctype.__name__}, of the other byte order")
            if kind is None or bits:
                raise refuse(f"field '{name}' of {ctype.__name__}{' with bits' if bits else ''}")
            fields[name] = (getattr(type_, name).offset, kind, count, step)
        return ctypes.sizeof(type_), fields
    if getattr(type_, "fields", None) and getattr(type_, "itemsize", 0):
        for name in type_.names:
            dtype, offset = type_.fields[name][:2]
            count, step = None, 0
            if dtype.subdtype is not None:
                dtype, shape = dtype.subdtype
                count, step = shape[0], dtype.itemsize
                if len(shape) != 1:
                    raise refuse(f"field '{name}', an array of {errors.counted(len(shape), 'dim')}")
            kind = of_dtype(dtype)
            if kind is None or not dtype.isnative:
                raise refuse(f"field '{name}' of {dtype}")
            fields[name] = (offset, kind, count, step)
        return type_.itemsize, fields
    raise refuse(repr(type_)[:80])


def _member(kind: Any, value: Any, label: str) -> Any:
    """The entry of a struct's member, or a Raw."""
    if not isinstance(kind, str):
        if isinstance(value, Struct) and value.size == _fields(kind)[0]:
            return value
    elif kind == "pointer":
        if value is None or isinstance(value, TracedTensor):
            return entry(value, label)
        if is_raw(value):
            return Raw(value, label)
    elif isinstance(value, (Scalar, TracedScalar)):
        # A float's bits may be stored in an unsigned field of the same size.
        if value.type_name == kind or kind in _BITS.get(value.type_name, ()):
            return entry(value, label)
    else:
        numbers: tuple[type, ...] = (bool,) if kind == "bool" else (int,)
        if "float" in kind:
            numbers = (int, float)
        found = value.type if isinstance(value, Traced) else type(value)
        if found is float and not isinstance(value, Traced) and not math.isfinite(value):
            return entry(getattr(scalars, kind)(value), label)  # JSON has no infinities
        if found is int and kind == "uint64" and not isinstance(value, Traced):
            return entry(scalars.uint64(value), label)  # expressions have no integers beyond int64
        if found in numbers:
            return [kind, tree_of(value)]
    expected = kind if isinstance(kind, str) else f"torch_cubin.struct({kind}, ...)"
    raise _wrong_value(label, expected, value)


def _wrong_value(label: str, expected: str, value: Any) -> errors.Error:
    got = _shown(value)
    return errors.fault("input", label, "has a wrong value", expected=expected, got=got)


def entry(value: Any, label: str) -> list[Any]:
    """The contract's entry for one argument of a kernel."""
    if isinstance(value, Bits):
        return ["bits", entry(value.argument, label)]
    if isinstance(value, TracedView):
        return ["address", value._name, tree_of(value._element), value._parts]
    if isinstance(value, TracedTensor):
        return pointer(value._name)
    if isinstance(value, (Traced, bool, int, float)):
        return ["number", tree_of(value)]
    if isinstance(value, TracedScalar):
        return [value.type_name, value.number.tree]
    if isinstance(value, Scalar):
        # JSON has neither infinities nor NaN; expressions have no integers beyond 64 signed bits.
        if not math.isfinite(value.value) or abs(value.value) >= 2**63:
            return ["bytes", value.data.hex()]
        return [value.type_name, value.value]
    if value is None:
        return ["uint64", 0]
    if isinstance(value, (bytes, bytearray, memoryview, ctypes.Structure)):
        data = bytes(value)
        if data:
            return ["bytes", data.hex()]
    if isinstance(value, Struct):
        return ["struct", value.size, [_in_contract(*member) for member in value.members]]
    if isinstance(value, TracedTensorMap):
        return ["tensor_map", value.fields(value.tensor._name, [*map(tree_of, value.box)])]
    raise errors.fault(
        "input", label, "is nothing that a kernel takes", expected=_EXPECTED, got=_shown(value)
    )


def _in_contract(offset: int, member: Any) -> list[Any]:
    if isinstance(member, Raw):
        raise errors.fault(
            "input", member.label, "is given a tensor that is no argument of the op",
            expected="a tensor argument, output or scratch", got=_shown(member.value),
        )  # fmt: skip
    return [offset, entry(member, member.label) if isinstance(member, Struct) else member]


def entries(values: Any, names: Mapping[str, Any], label: str) -> list[Any]:
    """The contract's entries for the result of `args`: a sequence, or a single argument."""
    if not isinstance(values, (list, tuple)):
        values = (values,)
    out = []
    for index, value in enumerate(values):
        if isinstance(value, str) and isinstance(names.get(value), TracedTensor):
            value = names[value]  # args=("x", "out"), without a function
        elif isinstance(value, str) and value in names:
            raise errors.fault(
                "input", f"{label}: argument {index}", "names a number",
                expected="a tensor's name, or a function, which may name everything",
                got=f"'{value}'", advice=f"Write args=lambda x, {value}: (x, {value}).",
            )  # fmt: skip
        out.append(entry(value, f"{label}: argument {index}"))
    return out


def pointer(name: str) -> list[Any]:
    """["pointer", "x"], or ["pointer", "xs", 2] for "xs[2]"."""
    list_, bracket, index = name.partition("[")
    return ["pointer", list_, int(index[:-1])] if bracket else ["pointer", name]


def _shown(value: Any) -> str:
    if isinstance(value, TracedList):
        return f"the list '{value._name}': give its items, {value._name}[0]"
    if isinstance(value, (TracedText, TracedDtype)):
        return f"'{value.name}': compare it, torch_cubin.select(...)"
    if isinstance(value, Traced):
        return f"an expression of type {value.type.__name__}"
    if isinstance(value, TensorMap):
        return "a TensorMap of a tensor that is no argument"
    return f"{type(value).__name__} {value!r:.80}"
