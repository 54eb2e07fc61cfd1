"""What a function computes with, as far as it can be known, for keys of caches on disk."""

from __future__ import annotations

import functools
import hashlib
import marshal
import secrets
import types
from pathlib import Path
from typing import Any

import torch

_PLAIN = (type(None), bool, int, float, complex, str, bytes)
_OF_TORCH = (torch.dtype, torch.device, torch.layout, torch.memory_format)


class _UnknownError(Exception):
    pass


def digest(*functions: Any) -> bytes:
    """Of their code, of the files that it is in, whose functions it may call, and of the values in
    closures, defaults, functools.partial and `self`. Of its own if nothing identifies one of these,
    such as a tensor: then nobody has the same."""
    hashed = hashlib.sha256()
    seen: dict[int, tuple[int, Any]] = {}  # with the value, so that no other one gets its id

    def add(value: Any) -> None:
        if isinstance(value, _PLAIN + _OF_TORCH):
            text = repr(value).encode()
            hashed.update(f"{type(value).__qualname__} {len(text)} ".encode() + text)
            return
        number, _ = seen.get(id(value), (-1, None))
        hashed.update(f"{type(value).__qualname__} {number} ".encode())
        if number >= 0:
            return
        seen[id(value)] = len(seen), value
        parts = _parts(value)
        hashed.update(f"{len(parts)} ".encode())
        for part in parts:
            add(part)

    try:
        for function in functions:
            add(function)
    except (_UnknownError, RecursionError, OSError):
        return secrets.token_bytes()
    return hashed.digest()


def _parts(value: Any) -> list[Any]:
    from torch_cubin._declared.op import Op

    if type(value) in (tuple, list):
        return [*value]
    if type(value) is dict:
        return [*value.items()]
    if isinstance(value, types.FunctionType):
        cells = [_content(cell) for cell in value.__closure__ or ()]
        own = [value.__defaults__, value.__kwdefaults__, *cells]
        return [marshal.dumps(value.__code__), _file(value.__code__.co_filename), *own]
    if isinstance(value, types.MethodType):
        return [value.__func__, value.__self__]
    if type(value) is functools.partial:
        return [value.func, value.args, value.keywords]
    if isinstance(value, types.BuiltinFunctionType):
        return [value.__name__, value.__self__]
    if isinstance(value, types.ModuleType):
        return [value.__name__]
    if isinstance(value, type):
        files = (name for of in value.__mro__ for name in _files_of(of))
        return [value.__module__, value.__qualname__, *map(_file, files)]
    if isinstance(value, Op):  # whose own digest says the rest
        return [value.name]
    if type(value).__module__ == "torch._ops":
        return [str(value)]
    # All that an instance of classes written in Python holds is in its __dict__.
    classes = type(value).__mro__[:-1]
    if any("__slots__" in vars(of) or not _files_of(of) for of in classes):
        raise _UnknownError
    return [type(value), vars(value)]


def _files_of(of: type) -> list[str]:
    """Where its methods are."""
    methods = (getattr(each, "__func__", each) for each in vars(of).values())
    functions = [each for each in methods if isinstance(each, types.FunctionType)]
    return sorted({function.__code__.co_filename for function in functions})


def _content(cell: types.CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # not set yet
        raise _UnknownError from None


def _file(name: str) -> bytes:
    """Of its content. What was typed in has no file: nobody knows what it calls."""
    return hashlib.sha256(Path(name).read_bytes()).digest()
