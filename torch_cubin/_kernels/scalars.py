"""Scalars with an explicit type: torch_cubin.int32(n), float16(x), ...

A cubin records the size of a parameter, but not whether it is signed or floating point. A Python
int or float is packed by the size only; these classes give the type, and their size is compared
with the parameter's.
"""

from __future__ import annotations

import math
import operator
import struct
from typing import SupportsFloat, SupportsIndex

from torch_cubin import errors
from torch_cubin._declared.expressions import Traced, untraceable


class TracedScalar:
    """A number of a given type whose value each call of a declared op determines."""

    __slots__ = ("number", "type_name")

    def __init__(self, type_name: str, number: Traced) -> None:
        wanted = (int,) if "int" in type_name else (int, float)
        if number.type not in wanted:
            untraceable(
                f"gives torch_cubin.{type_name} a {number.type.__name__}",
                f"Give it {' or '.join(t.__name__ for t in wanted)}: // divides integers.",
            )
        self.type_name = type_name
        self.number = number


class Scalar:
    """A number packed as one type: `data` holds the bytes, `type_name` is e.g. "int32"."""

    __slots__ = ("data", "type_name", "value")

    def __init__(self, type_name: str, value: int | float, data: bytes) -> None:
        self.type_name = type_name
        self.value = value
        self.data = data

    def __repr__(self) -> str:
        return f"torch_cubin.{self.type_name}({self.value!r})"


def _refuse(name: str, value: object, expected: str) -> errors.Error:
    return errors.fault(
        "params",
        f"torch_cubin.{name}",
        "does not hold this value",
        expected=expected,
        got=repr(value)[:80],
    )


def _integer(name: str, value: SupportsIndex) -> Scalar:
    if isinstance(value, Traced):
        return TracedScalar(name, value)  # type: ignore[return-value]
    signed = name.startswith("int")
    bits = int(name.removeprefix("u").removeprefix("int"))
    low, high = (-(1 << bits - 1), (1 << bits - 1) - 1) if signed else (0, (1 << bits) - 1)
    try:
        number = operator.index(value)
    except TypeError:
        raise _refuse(name, value, "an int") from None
    if not low <= number <= high:
        raise _refuse(name, number, f"{low} to {high}")
    return Scalar(name, number, number.to_bytes(bits // 8, "little", signed=signed))


def _float_number(name: str, value: SupportsFloat) -> float:
    try:
        return float(value)
    except (TypeError, ValueError):
        raise _refuse(name, value, "a float") from None
    except OverflowError:
        raise _refuse(name, value, "a number of that range") from None


def _packed_float(name: str, code: str, value: SupportsFloat) -> Scalar:
    if isinstance(value, Traced):
        return TracedScalar(name, value)  # type: ignore[return-value]
    number = _float_number(name, value)
    try:
        return Scalar(name, number, struct.pack(code, number))
    except OverflowError:
        raise _refuse(name, number, "a number of that range, inf or nan") from None


def int8(value: SupportsIndex) -> Scalar:
    """An 8-bit signed integer; [params] out of its range."""
    return _integer("int8", value)


def int16(value: SupportsIndex) -> Scalar:
    """A 16-bit signed integer; [params] out of its range."""
    return _integer("int16", value)


def int32(value: SupportsIndex) -> Scalar:
    """A 32-bit signed integer; [params] out of its range."""
    return _integer("int32", value)


def int64(value: SupportsIndex) -> Scalar:
    """A 64-bit signed integer; [params] out of its range."""
    return _integer("int64", value)


def uint8(value: SupportsIndex) -> Scalar:
    """An 8-bit unsigned integer; [params] out of its range."""
    return _integer("uint8", value)


def uint16(value: SupportsIndex) -> Scalar:
    """A 16-bit unsigned integer; [params] out of its range."""
    return _integer("uint16", value)


def uint32(value: SupportsIndex) -> Scalar:
    """A 32-bit unsigned integer; [params] out of its range."""
    return _integer("uint32", value)


def uint64(value: SupportsIndex) -> Scalar:
    """A 64-bit unsigned integer; [params] out of its range."""
    return _integer("uint64", value)


def float16(value: SupportsFloat) -> Scalar:
    """An IEEE half, rounded to nearest even; [params] for finite numbers out of its range."""
    return _packed_float("float16", "<e", value)


def bfloat16(value: SupportsFloat) -> Scalar:
    """A bfloat16, rounded through float32 as PyTorch does; [params] out of its range."""
    if isinstance(value, Traced):
        return TracedScalar("bfloat16", value)  # type: ignore[return-value]
    number = _float_number("bfloat16", value)
    if math.isnan(number):
        return Scalar("bfloat16", number, b"\xc0\x7f")
    bits = int.from_bytes(_packed_float("bfloat16", "<f", number).data, "little")
    rounded = (bits + 0x7FFF + (bits >> 16 & 1)) >> 16
    if rounded & 0x7FFF == 0x7F80 and math.isfinite(number):
        raise _refuse("bfloat16", number, "a number of that range, inf or nan")
    return Scalar("bfloat16", number, rounded.to_bytes(2, "little"))


def float32(value: SupportsFloat) -> Scalar:
    """A 32-bit float, rounded to nearest even; [params] for finite numbers out of its range."""
    return _packed_float("float32", "<f", value)


def float64(value: SupportsFloat) -> Scalar:
    """A 64-bit float."""
    return _packed_float("float64", "<d", value)


__all__ = [
    *("Scalar", "TracedScalar", "bfloat16", "float16", "float32", "float64"),
    *("int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"),
]
