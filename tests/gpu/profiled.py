"""Which kernels a part of a test launched, by PyTorch's profiler, or the process has loaded."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from torch_cubin._native import library


def kernels_loaded() -> set[str]:
    """The names of those of the catalog that a call of this process has used."""
    return {kernel["name"] for kernel in library.catalog()["loaded"]}


@contextmanager
def kernels_that_run() -> Iterator[set[str]]:
    """The names of those that the block launches: they are in the set at its end."""
    names: set[str] = set()
    activities = [torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profile:
        yield names
        torch.cuda.synchronize()
    names.update(event.name for event in profile.events() if event.device_type.name == "CUDA")
