"""Operators as the dispatcher sees them, and the base class of contexts that see every call."""

from __future__ import annotations

from typing import Any

from torch_cubin._pytorch.internals import Feature

DISPATCH_MODES = Feature("audit()", "it raises InternalError")
Mode: Any = DISPATCH_MODES.find("utils._python_dispatch.TorchDispatchMode", object)
_has_kernel: Any = DISPATCH_MODES.find(
    "_C._dispatch_has_kernel_for_dispatch_key", lambda name, key: True
)


def has_kernel(name: str, key: str) -> bool:
    """Whether an operator has a kernel of its own for a dispatch key, besides a composite one."""
    has: bool = _has_kernel(name, key)
    return has


def is_composite(func: Any) -> bool:
    """Whether an operator only calls others, which a mode sees by itself only in inference mode."""
    keys = ("CompositeImplicitAutograd", "CUDA", "CPU")
    implicit, on_cuda, on_cpu = (has_kernel(func.name(), key) for key in keys)
    return implicit and not on_cuda and not on_cpu


__all__ = ["DISPATCH_MODES", "Mode", "has_kernel", "is_composite"]
