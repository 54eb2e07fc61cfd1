"""The parameter of a recorded launch of a built-in kernel, as the kernel's header declares it."""

from __future__ import annotations

import ctypes
from typing import Any, TypeVar

Params = TypeVar("Params", bound=ctypes.Structure)


def read(launch: dict[str, Any], type_: type[Params]) -> Params:
    """`type_` is of c_layouts.structure(); the stand-in driver fills its tensor maps."""
    (text,) = launch["params"]
    content = bytes.fromhex(text)
    assert len(content) == ctypes.sizeof(type_), (launch["kernel"], len(content))
    return type_.from_buffer_copy(content)


def read_map(map_: ctypes.Structure) -> dict[str, Any]:
    """A tensor map of the stand-in driver, dims innermost first, strides in bytes."""
    words = map_.words
    rank = words[1] >> 8 & 0xFF
    boxes = (words[11] | words[12] << 64).to_bytes(16, "little")
    return {
        "address": words[0],
        "data_type": words[1] & 0xFF,
        "rank": rank,
        "swizzle": words[1] >> 24 & 0xFF,
        "promotion": words[1] >> 32 & 0xFF,
        "dims": list(words[2 : 2 + rank]),
        "strides": list(words[7 : 7 + rank - 1]),
        "box": [int.from_bytes(boxes[2 * i : 2 * i + 2], "little") for i in range(rank)],
    }


def numbers(params: ctypes.Structure) -> dict[str, Any]:
    """Its fields by name: one of them may be called `from`."""
    return {name: getattr(params, name) for name, _ in params._fields_}
