"""Operators as the dispatcher sees them, and the base class of contexts that see every call."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch_cubin._pytorch.internals import Feature

DISPATCH_MODES = Feature("audit()", "it raises InternalError")
Mode: Any = DISPATCH_MODES.find("utils._python_dispatch.TorchDispatchMode", object)
_has_kernel: Any = DISPATCH_MODES.find(
    "_C._dispatch_has_kernel_for_dispatch_key", lambda name, key: True
)
_is_wrapper: Any = DISPATCH_MODES.find(
    "utils._python_dispatch.is_traceable_wrapper_subclass_type", lambda kind: False
)
_HigherOrder: Any = DISPATCH_MODES.find("_ops.HigherOrderOperator", ())
_mode_stack: Any = DISPATCH_MODES.find(
    "utils._python_dispatch._get_current_dispatch_mode_stack", list
)


def current_modes() -> list[Any]:
    """The contexts that see this thread's calls, also in the threads of its backward()."""
    modes: list[Any] = _mode_stack()
    return modes


def has_subclass(types: Iterable[type]) -> bool:
    """Whether a tensor of a call is made of others, as a DTensor or a nested tensor is."""
    return any(map(_is_wrapper, types))


def is_higher_order(func: Any) -> bool:
    """Whether a call is of an operator that takes functions, such as flex_attention."""
    return isinstance(func, _HigherOrder)


def has_kernel(name: str, key: str) -> bool:
    """Whether an operator has a kernel of its own for a dispatch key, besides a composite one."""
    has: bool = _has_kernel(name, key)
    return has


def is_composite(func: Any) -> bool:
    """Whether an operator only calls others, which a mode sees by itself only in inference mode."""
    if func.namespace == "prim":  # of TorchScript: the dispatcher does not know them
        return False
    keys = ("CompositeImplicitAutograd", "CUDA", "CPU")
    implicit, on_cuda, on_cpu = (has_kernel(func.name(), key) for key in keys)
    return implicit and not on_cuda and not on_cpu


__all__ = [
    *("DISPATCH_MODES", "Mode", "current_modes", "has_kernel", "has_subclass", "is_composite"),
    "is_higher_order",
]
