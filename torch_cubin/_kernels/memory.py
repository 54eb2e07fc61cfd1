"""Whether a tensor has an address in memory, like is_memory() in csrc/pytorch/tensor.cpp."""

from __future__ import annotations

import torch


def has_memory(tensor: torch.Tensor) -> bool:
    """False for elements without memory: the storage was resized to 0, or is a wrapper's.

    Such a storage begins at null, to which PyTorch adds the tensor's offset. Raises RuntimeError
    if the tensor has no storage at all.
    """
    null = tensor.storage_offset() * tensor.element_size()
    return tensor.numel() == 0 or tensor.data_ptr() != null


__all__ = ["has_memory"]
