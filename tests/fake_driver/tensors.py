"""Tensors that PyTorch takes for CUDA's, in a process with the stand-in driver (fake_tensors.cpp).

They have shape, strides, dtype, device and memory, which is the host's; nothing can be computed
with them. In a process that was started with the stand-in's folder in LD_LIBRARY_PATH.
"""

from __future__ import annotations

import functools
import math
import os
from pathlib import Path

import torch


@functools.cache
def _load() -> None:
    folder = os.environ["LD_LIBRARY_PATH"].split(":")[0]
    torch.ops.load_library(str(Path(folder) / "fake_tensors.so"))


def strided(
    size: tuple[int, ...],
    stride: tuple[int, ...],
    dtype: torch.dtype = torch.float32,
    device: int = 0,
    offset: int = 0,
) -> torch.Tensor:
    """A tensor whose storage begins `offset` elements before it, at a multiple of 512 bytes."""
    _load()
    return torch.ops.fake_cuda.make(list(size), list(stride), dtype, device, offset)


def part(base: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """A tensor in the memory of `base`, laid out as `like`, a meta tensor that is a view, is."""
    return torch.ops.fake_cuda.part(base, like.shape, like.stride(), like.storage_offset())


def empty(*size: int, dtype: torch.dtype = torch.float32, device: int = 0) -> torch.Tensor:
    """A contiguous one."""
    stride = [math.prod(max(n, 1) for n in size[i + 1 :]) for i in range(len(size))]
    return strided(size, tuple(stride), dtype, device)


def without_memory(*size: int) -> torch.Tensor:
    """A float32 one whose storage holds no bytes, as after `untyped_storage().resize_(0)`."""
    return strided(size, empty(*size).stride(), offset=-1)


__all__ = ["empty", "part", "strided", "without_memory"]
