"""Kernels whose copies by the TMA unit never end, found in what Triton's compiler wrote of them.

Where a tile is too large for one group of warps, Triton 3.6 gives half of it to another group
(`tl.range(..., warp_specialize=True)`), halves the copies with it, and tells the barrier to wait
for half of the bytes; but the tensor map, whose box Triton's own launcher and ours take from the
descriptor, keeps the whole block. The hardware delivers twice what the barrier expects, into the
neighbour's memory, and the barrier's phase never completes: the kernel spins for ever, whoever
launches it.
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
    """Raises InputError [input] for a copy of another size than its tensor map's box."""
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
