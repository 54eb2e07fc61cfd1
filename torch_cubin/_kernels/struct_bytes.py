"""Structs by value: the result of torch_cubin.struct(), and its bytes for a raw launch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from torch_cubin import errors
from torch_cubin._kernels import scalars
from torch_cubin._kernels.tensor_map import TensorMap


class Strided:
    """A tensor that is passed regardless of its strides: see torch_cubin.strided()."""

    __slots__ = ("tensor",)

    def __init__(self, tensor: Any) -> None:
        self.tensor = tensor


class Struct:
    """A struct passed by value: see torch_cubin.struct.

    `members` are offsets, each with an entry of a contract, a Struct or a Raw.
    """

    def __init__(self, size: int, members: list[tuple[int, Any]], label: str = "struct") -> None:
        self.size, self.members, self.label = size, members, label

    def __repr__(self) -> str:
        return f"<{self.label} of {self.size} bytes>"


class Raw:
    """A tensor with memory, or a TensorMap of one: allowed in a launch, not in a contract."""

    __slots__ = ("label", "value")

    def __init__(self, value: Any, label: str) -> None:
        self.value, self.label = value, label


def is_raw(value: Any) -> bool:
    """Whether a launch accepts it for a pointer."""
    return isinstance(value, (torch.Tensor, Strided)) or hasattr(value, "__cuda_array_interface__")


def packed(
    value: Struct, bytes_of: Callable[[Any, int, str], tuple[bytes, int | None]]
) -> tuple[bytes, list[int]]:
    """The struct's bytes, and the indices of the devices of its tensors.

    `bytes_of` gives the bytes and the device of a Raw's object, from its size and its label.
    """
    data, devices = bytearray(value.size), []
    for offset, member in value.members:
        if isinstance(member, Raw):
            size = 128 if isinstance(member.value, TensorMap) else 8
            piece, device = bytes_of(member.value, size, member.label)
            if device is not None:
                devices.append(device)
        elif isinstance(member, Struct):
            piece, more = packed(member, bytes_of)
            devices += more
        else:
            piece = _bytes(member, value.label)
        data[offset : offset + len(piece)] = piece
    return bytes(data), devices


def _bytes(member: list[Any], label: str) -> bytes:
    kind, number = member[0], member[1]
    if kind == "bytes":
        return bytes.fromhex(number)
    if kind == "bool" and type(number) is bool:
        return bytes([number])
    if type(number) in (int, float) and hasattr(scalars, kind):
        return getattr(scalars, kind)(number).data
    raise errors.fault(
        "input", label, "holds an argument of an op", expected="tensors and numbers",
        got=f"{member!r:.80}", advice="A launch takes values; define_op takes functions of them.",
    )  # fmt: skip
