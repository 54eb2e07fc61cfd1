"""Dispatch keys, for autocast: which keys a call excludes, and which a context disables."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from typing import Any

import torch

from torch_cubin._pytorch.internals import Feature

AUTOCAST = Feature(
    "torch.autocast of the built-in ops", "it leaves their arguments in the dtypes that they have"
)
_exclude = AUTOCAST.find("_C._ExcludeDispatchKeyGuard", None)
_key = AUTOCAST.find("_C.DispatchKey", None)
_key_set = AUTOCAST.find("_C.DispatchKeySet", None)
AUTOCAST.find("ops.aten.mm.default._schema", None)

_local = threading.local()


def without_key(name: str) -> Any:
    """A function that returns a context in which the dispatch key is excluded."""
    keys = _key_set(getattr(_key, name))
    return lambda: _exclude(keys)


def _without_autocast_keys() -> contextlib.AbstractContextManager[Any]:
    if AUTOCAST.available:
        return _exclude(_key_set(_key.AutocastCUDA) | _key_set(_key.AutocastCPU))
    stack = contextlib.ExitStack()
    for device in ("cuda", "cpu"):
        stack.enter_context(torch.autocast(device, enabled=False))
    return stack


@contextlib.contextmanager
def without_autocast() -> Iterator[None]:
    """A context in which no op casts its arguments.

    NOTE: inside torch.func's transforms each outer level restores the dispatch keys of the op that
    entered it, so the excluded keys return. Our kernels therefore also check a flag.
    """
    before = autocast_is_off()
    _local.autocast_is_off = True
    try:
        with _without_autocast_keys():
            yield
    finally:
        _local.autocast_is_off = before


def autocast_is_off() -> bool:
    """Whether this thread is inside :func:`without_autocast`."""
    return getattr(_local, "autocast_is_off", False)
