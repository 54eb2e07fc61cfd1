"""Loads torch_cubin/_C.so and wraps its C functions.

The library uses no Python C API, so Python talks to it twice: torch registers the ops
(torch.ops.load_library), ctypes calls the few functions that are no ops. Nothing here touches the
CUDA driver: only `device()` does, when called.
"""

from __future__ import annotations

import ctypes
import functools
import json
from pathlib import Path
from typing import Any

import torch

from torch_cubin import errors

PATH = Path(__file__).resolve().parent / "_C.so"


@functools.cache
def load() -> ctypes.CDLL:
    """Registers the ops and returns the library; ImportError where it is missing or too old."""
    if not PATH.is_file():
        message = errors.fault(
            "file",
            f"library '{PATH}'",
            "is missing",
            expected="the compiled half of torch_cubin",
            advice="Build it: `make build` in a checkout, or install the wheel "
            "(`pip install --no-build-isolation .`).",
        )
        raise ImportError(str(message), path=str(PATH))
    try:
        torch.ops.load_library(str(PATH))
        library = ctypes.CDLL(str(PATH))  # the same file: the loader hands out the same library
    except OSError as error:
        message = errors.fault(
            "file",
            f"library '{PATH}'",
            f"cannot be loaded by torch {torch.__version__} ({error})",
            advice="Build it again with this torch: `make build`.",
        )
        raise ImportError(str(message), path=str(PATH)) from error
    # The strings are freed by the library that made them, so they come as plain addresses.
    library.torch_cubin_inspect.argtypes = [ctypes.c_char_p, ctypes.c_size_t, ctypes.c_char_p]
    library.torch_cubin_inspect.restype = ctypes.c_void_p
    library.torch_cubin_catalog.argtypes = []
    library.torch_cubin_catalog.restype = ctypes.c_void_p
    library.torch_cubin_device.argtypes = [ctypes.c_int]
    library.torch_cubin_device.restype = ctypes.c_void_p
    library.torch_cubin_free.argtypes = [ctypes.c_void_p]
    library.torch_cubin_free.restype = None
    library.torch_cubin_launches.argtypes = []
    library.torch_cubin_launches.restype = ctypes.c_int64
    library.torch_cubin_keep_error.argtypes = [ctypes.c_char_p]
    library.torch_cubin_keep_error.restype = None
    return library


def _answer(address: int | None) -> dict[str, Any]:
    """Takes over a JSON string of the library; raises the error that it holds, if any."""
    if not address:
        raise errors.fault("internal", "torch_cubin", "could not allocate an answer")
    try:
        answer = json.loads(ctypes.string_at(address))
    finally:
        load().torch_cubin_free(address)
    if "error" in answer:
        raise errors.make(answer["error"]["tag"], answer["error"]["message"])
    return answer


def inspect(data: bytes, origin: str) -> dict[str, Any]:
    """What a file's bytes hold (csrc/cubin/inspect.h). `origin` names it in errors."""
    origin_bytes = origin.encode("utf-8", "backslashreplace").replace(b"\0", b"\\0")
    return _answer(load().torch_cubin_inspect(data, len(data), origin_bytes))["file"]


def catalog() -> dict[str, Any]:
    """The built-in kernels: the manifest and more (Catalog::to_json in csrc/contract/catalog.h)."""
    return _answer(load().torch_cubin_catalog())


def device(index: int) -> dict[str, Any]:
    """What the driver says of a GPU, and the arch chosen for it. Initialises the driver."""
    return _answer(load().torch_cubin_device(index))


def launches() -> int:
    """Kernels launched so far by this process."""
    return load().torch_cubin_launches()
