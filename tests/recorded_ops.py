"""Which operators run, seen below autograd."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode


class RecordedOps(TorchDispatchMode):
    """The operators that run inside, with their positional arguments."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[torch._ops.OpOverload, tuple[Any, ...]]] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.calls.append((func, args))
        return func(*args, **(kwargs or {}))

    @property
    def names(self) -> list[str]:
        return [func.name().split(".")[0] for func, _ in self.calls]

    @property
    def ours(self) -> list[tuple[Any, ...]]:
        """Names without their namespace, each with the tensors' shapes."""
        ours = [(func, args) for func, args in self.calls if func.namespace == "cubin"]
        shapes = [[tuple(a.shape) for a in args if isinstance(a, Tensor)] for _, args in ours]
        names = [func._overloadpacket.__name__ for func, _ in ours]
        return [(name, *each) for name, each in zip(names, shapes, strict=True)]
