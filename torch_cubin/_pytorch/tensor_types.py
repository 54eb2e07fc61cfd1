"""For the library's errors: the Python types of tensors that it knows by address, and the names of
arguments that it knows by index."""

from __future__ import annotations

import ctypes
import gc
from collections.abc import Iterator
from typing import Any

import torch

from torch_cubin._pytorch import operators
from torch_cubin._pytorch.internals import Feature

_NAMED = Feature("types of tensors without memory in the library's errors", "they are not named")
_address = _NAMED.find("_C.TensorBase._cdata", None)  # of the at::TensorImpl
_storage = _NAMED.find("UntypedStorage._cdata", None)  # of the c10::StorageImpl
_as_plain = _NAMED.find("_C.DisableTorchFunctionSubclass", None)


def _tensors() -> Iterator[torch.Tensor]:
    """All tensors of the process; expensive, so only for errors."""
    for value in gc.get_objects():
        if issubclass(type(value), torch.Tensor):  # isinstance would call into proxies
            yield value


def _find(implementation: int) -> str:
    """The type of the tensor with that address, or of the subclass that it is a view of; "" if none
    is found."""
    found = [x for x in _tensors() if _address.__get__(x) == implementation]
    if found and type(found[0]) is torch.Tensor:
        with _as_plain():
            storage = _storage.__get__(found[0].untyped_storage())
            subclasses = [x for x in _tensors() if type(x) is not torch.Tensor]
            same = (x for x in subclasses if _storage.__get__(x.untyped_storage()) == storage)
            found = [*same, found[0]]
    return type(found[0]).__name__ if found else ""


@ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)
def _find_type(implementation: int, name: int, size: int) -> None:
    _write(_find(implementation), name, size)


@ctypes.CFUNCTYPE(None, ctypes.c_char_p, ctypes.c_size_t, ctypes.c_void_p, ctypes.c_size_t)
def _find_argument(op: bytes, argument: int, name: int, size: int) -> None:
    raw_op = getattr(torch.ops.cubin, f"_{op.decode()}", None)
    if raw_op is not None:
        _write(operators.argument_names(raw_op.default)[argument - 1], name, size)


def _write(text: str, place: int, size: int) -> None:
    found = text.encode()[: size - 1]
    if found:
        ctypes.memmove(place, found + b"\0", len(found) + 1)


def register(library: Any) -> None:
    """Lets the library name types and arguments; `library` is _C.so."""
    if _NAMED.available:
        library.torch_cubin_set_error_names(_find_type, _find_argument)


__all__ = ["register"]
