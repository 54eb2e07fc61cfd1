"""Parses a cuTile symbol: the signature that the kernel was compiled for.

    add_Kt2_A1f32_1t1_p16_A1f32_1t1_p16_A1f32_1t1_p16_I1024

is `add`, of calling convention t2, for three one-dimensional float32 arrays (of stride 1, at
addresses that are multiples of 16) and the constant 1024. Needs no cuTile. Refuses unknown
elements.
"""

from __future__ import annotations

import dataclasses
import re
import struct
from typing import Any

from torch_cubin import errors

DTYPES = {
    "b8": "bool", "u8": "uint8", "u16": "uint16", "u32": "uint32", "u64": "uint64", "i8": "int8",
    "i16": "int16", "i32": "int32", "i64": "int64", "f16": "float16", "f32": "float32",
    "f64": "float64", "bf16": "bfloat16", "f8m3fn": "float8_e4m3fn", "f8m2": "float8_e5m2",
    "f8m0fnu": "float8_e8m0fnu",
}  # fmt: skip
_CONVENTIONS = ("t1", "t2")
_MOST_DIMS, _MOST_SYMBOL = 8, 1 << 14


@dataclasses.dataclass(frozen=True)
class Dim:
    """The compiler's assumptions about a dim's size and stride."""

    size: int | None = None
    size_multiple: int = 1
    stride: int | None = None
    stride_multiple: int = 1
    least_stride: int | None = None


@dataclasses.dataclass(frozen=True)
class Array:
    dtype: str  # torch's name
    dims: tuple[Dim, ...]
    address_multiple: int
    may_share: bool  # its memory with another array, or its elements
    index_bits: int


@dataclasses.dataclass(frozen=True)
class Scalar:
    dtype: str


@dataclasses.dataclass(frozen=True)
class Constant:
    value: Any  # an int, float or bool


@dataclasses.dataclass(frozen=True)
class TileSignature:
    symbol: str
    function: str
    convention: str
    parameters: tuple[Array | Scalar | Constant | tuple[Any, ...], ...]


@errors.named_keywords
def parse(symbol: str) -> TileSignature:
    """The signature of a symbol. Raises InputError [input] if cuTile did not make it, or it
    contains unsupported elements: lists, data classes, strings."""
    at = symbol.rfind("_K")
    if at < 1 or len(symbol) > _MOST_SYMBOL:
        raise errors.fault(
            "input", f"kernel '{symbol:.80}'", "has a name that says nothing of its signature",
            expected="a name of cuTile's own, add_Kt2_A1f32_...",
            advice="Omit KernelSignature(symbol=...), so that the compiler names it.",
        )  # fmt: skip
    reader = _Reader(symbol, at + 2)
    convention = reader.take(r"[a-z0-9]+", "a calling convention")
    if convention not in _CONVENTIONS:
        raise reader.refuse(f"calling convention {' or '.join(_CONVENTIONS)}", convention)
    parameters = []
    while reader.at < len(symbol):
        reader.take("_", "an underscore")
        parameters.append(reader.parameter())
    return TileSignature(symbol, symbol[:at], convention, tuple(parameters))


class _Reader:
    def __init__(self, symbol: str, at: int) -> None:
        self.symbol, self.at = symbol, at

    def refuse(self, expected: str, got: str = "") -> errors.Error:
        where = f"kernel '{self.symbol:.80}'"
        got = got or f"'{self.symbol[self.at : self.at + 20]}'"
        problem = f"has a name that is not known at place {self.at}"
        return errors.fault("input", where, problem, expected=expected, got=got)

    def read(self, pattern: str) -> str | None:
        match = re.compile(pattern).match(self.symbol, self.at)
        if match is None:
            return None
        self.at = match.end()
        return match[0]

    def take(self, pattern: str, expected: str) -> str:
        found = self.read(pattern)
        if found is None:
            raise self.refuse(expected)
        return found

    def number(self) -> int:
        sign = -1 if self.read("_") else 1
        return sign * int(self.take(r"\d{1,18}", "a number"))

    def dtype(self) -> str:
        found = self.take(r"[a-z0-9]+", "a dtype")
        if found not in DTYPES:
            raise self.refuse("a dtype of torch's", found)
        return DTYPES[found]

    def parameter(self) -> Any:
        kind = self.take("[A-Z]", "a parameter")
        if kind == "A":
            return self.array()
        if kind == "S":
            return Scalar(self.dtype())
        if kind == "I":
            return Constant(self.number())
        if kind == "B":
            return Constant(self.take("[01]", "0 or 1") == "1")
        if kind == "F":
            bits = int(self.take("[0-9a-f]{16}", "16 digits"), 16)
            return Constant(struct.unpack("<d", struct.pack("<Q", bits))[0])
        if kind == "T":
            count = int(self.take(r"\d{1,2}", "a count"))
            return tuple(self.parameter() for _ in range(count))
        what = {"L": "a list of arrays", "D": "a data class", "M": "a tensor map", "P": "a pointer"}
        raise self.refuse(
            "arrays, numbers, constants and tuples of them", what.get(kind, f"kind {kind}")
        )

    def array(self) -> Array:
        match = re.compile(r"(\d)([a-z][a-z0-9]*)").match(self.symbol, self.at)
        if match is None or int(match[1]) > _MOST_DIMS or match[2] not in DTYPES:
            raise self.refuse("an array of a dtype of torch's")
        ndim, self.at = int(match[1]), match.end()
        dims = [Dim()] * ndim
        while (mask := self.read(r"_[0-9a-f]+(?=[sitvl])")) is not None:
            bits = int(mask[1:], 16)
            if bits == 0 or bits >> ndim:
                raise self.refuse(f"dims below {ndim}", mask)
            said = {}
            for letter, name in (
                ("s", "size"), ("i", "size_multiple"), ("t", "stride"), ("v", "stride_multiple"),
                ("l", "least_stride"),
            ):  # fmt: skip
                if self.read(letter):
                    said[name] = self.number()
                    if "multiple" in name and said[name] < 1:
                        raise self.refuse("a multiple of 1 or more", str(said[name]))
            dims = [
                dataclasses.replace(dim, **said) if bits >> i & 1 else dim
                for i, dim in enumerate(dims)
            ]
        multiple, may_share, index_bits = 1, False, 32
        if self.read(r"_(?=[pgiuw])"):
            if self.read("p"):
                multiple = self.number()
            while self.read(r"g[0-9a-f]+"):
                may_share = True
            may_share |= self.read("i") is not None
            if self.read("u"):
                raise self.refuse("indices of int32 or int64", "uint32")
            index_bits = 64 if self.read("w") else 32
        if multiple < 1 or multiple & (multiple - 1):
            raise self.refuse("an address at a power of two", str(multiple))
        return Array(DTYPES[match[2]], tuple(dims), multiple, may_share, index_bits)


__all__ = ["Array", "Constant", "Dim", "Scalar", "TileSignature", "parse"]
