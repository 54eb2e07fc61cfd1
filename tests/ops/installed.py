"""install() on the CPU, whose kernels take the same path as the GPU's and end in the reference."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch_cubin
from torch_cubin._drop_in import aten_kernels


@contextlib.contextmanager
def installed(policy: str = "all") -> Iterator[torch_cubin.Installation]:
    aten_kernels.register("CPU")
    with torch_cubin.install(policy=policy) as handle:
        yield handle
