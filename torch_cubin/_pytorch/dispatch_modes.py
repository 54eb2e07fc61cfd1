"""The base class of contexts that see every call of an operator."""

from __future__ import annotations

from typing import Any

from torch_cubin._pytorch.internals import Feature

DISPATCH_MODES = Feature("audit()", "it raises InternalError")
Mode: Any = DISPATCH_MODES.find("utils._python_dispatch.TorchDispatchMode", object)
_has_kernel: Any = DISPATCH_MODES.find("_C._dispatch_has_kernel_for_dispatch_key", None)


def is_composite(func: Any) -> bool:
    """Whether an operator only calls others, which a mode sees by itself only in inference mode."""
    keys = ("CompositeImplicitAutograd", "CUDA", "CPU")
    implicit, on_cuda, on_cpu = (_has_kernel(func.name(), key) for key in keys)
    return implicit and not on_cuda and not on_cpu


__all__ = ["DISPATCH_MODES", "Mode", "is_composite"]
