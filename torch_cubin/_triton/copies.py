"""Finds kernels whose TMA copies never complete, from the IR that Triton's compiler wrote (TTGIR).

If a tile is too large for one warp group, Triton 3.6 gives half of it to another group
(`tl.range(..., warp_specialize=True)`), halves the copies, and lets the barrier expect half of the
bytes. The tensor map's box, which every launcher takes from the descriptor, keeps the full block.
The hardware then delivers twice the expected bytes, into the neighbour's memory, and the barrier's
phase never completes: the kernel hangs with any launcher.
"""

from __future__ import annotations

import math
import re

from torch_cubin import errors

_MOST = 1 << 26  # characters
_SHAPE = r"((?:\d{1,9}x){1,8})"
_COPY = re.compile(
    r"ttng\.async_tma_copy_global_to_local [^\n]{0,2000}?!tt\.tensordesc<(?:tensor<)?" + _SHAPE
    + r"[^\n]{0,2000}?-> !ttg\.memdesc<" + _SHAPE
)  # fmt: skip


def check(ttgir: str, origin: str) -> None:
    """Raises InputError [input] if a copy's size differs from its tensor map's box."""
    for box, memory in _COPY.findall(ttgir[:_MOST]):
        if _elements(box) != _elements(memory):
            raise errors.fault(
                "input", origin,
                "would never end: the compiler halved a TMA copy, and not its tensor map",
                expected=f"copies of the descriptor's block, {box[:-1]} elements", got=memory[:-1],
                advice="Take a smaller block, as 64 rows for 4 warps, or no warp_specialize=True.",
            )  # fmt: skip


def _elements(shape: str) -> int:
    return math.prod(int(size) for size in shape.split("x")[:-1])


__all__ = ["check"]
