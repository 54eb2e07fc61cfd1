"""Registration of kernels over PyTorch's own, and calls of the kernels that they replace."""

from __future__ import annotations

import ctypes
import os
import re
import warnings
from collections.abc import Callable
from typing import Any

import torch

from torch_cubin._pytorch import operators, tensors
from torch_cubin._pytorch.internals import Feature

SUMS = Feature(
    "install() of addmm, baddbmm and addmv (nn.Linear with a bias)",
    "PyTorch's kernels compute them; mm, bmm and mv are served",
)
_key = SUMS.find("_C.DispatchKey", None)
_key_set = SUMS.find("_C.DispatchKeySet", None)
_base = SUMS.find("_C.TensorBase", None)
_get_kernel: Any = SUMS.find("library.get_kernel", None)

# THPVariable_Wrap(const at::TensorBase&). An older torch has (at::TensorBase), which is passed by
# reference too, and may move the tensor out.
_WRAP = ("_Z16THPVariable_WrapRKN2at10TensorBaseE", "_Z16THPVariable_WrapN2at10TensorBaseE")


def has_cuda() -> bool:
    """Whether PyTorch has CUDA kernels to replace: a CPU build has none."""
    try:
        ctypes.CDLL("libtorch_cuda.so", os.RTLD_NOLOAD)
    except OSError:
        return False
    return True


def wrap_function() -> int | None:
    """The address of PyTorch's function that converts an at::Tensor to a torch.Tensor, or None."""
    try:
        library = ctypes.CDLL("libtorch_python.so", os.RTLD_NOLOAD)
    except OSError:
        return None
    for name in _WRAP:
        function = getattr(library, name, None)
        if function is not None:
            return ctypes.cast(function, ctypes.c_void_p).value
    return None


def tensor_base() -> tuple[type, int] | None:
    """The base class of all tensors, and the offset of the at::Tensor in its objects."""
    offset = tensors.tensor_offset()
    return None if _base is None or offset is None else (_base, offset)


def own_kernel(op: str, key: str) -> Callable[..., Any] | None:
    """PyTorch's kernel of an operator for a dispatch key, as a function; None if it has none.

    Call it before registering another kernel: afterwards it would return that one.
    """
    if not SUMS.available:
        return None
    try:
        kernel = _get_kernel(f"aten::{op}", key)
    except RuntimeError:  # a PyTorch without CUDA
        return None
    keys = _key_set(getattr(_key, key))
    return lambda *args, **kwargs: kernel.call_boxed(keys, *args, **kwargs)


OVERRIDES = Feature(
    "doctor's check of kernels that stand over ours", "it does not see such kernels"
)
_dump = OVERRIDES.find("_C._dispatch_dump", lambda name: "")


def registered_at(op: str, key: str) -> str:
    """The source line that registered the current kernel of an operator for a dispatch key."""
    match = re.search(rf"^{key}: registered at (\S+)", _dump(f"aten::{op}"), re.M)
    return match.group(1) if match else ""


def warn_of_override_now() -> None:
    """Triggers PyTorch's once-per-process warning that a kernel is registered over another.

    Our kernels are registered from C++, where Python's warning filters do not apply.
    """
    always = torch.is_warn_always_enabled()
    torch.set_warn_always(False)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        library = operators.registry("cubin_override", "FRAGMENT")
        library.define("f(Tensor x) -> Tensor")
        for function in (lambda x: x, lambda x: x + 0):
            library.impl("f", function, "CPU", allow_override=True)
    torch.set_warn_always(always)


__all__ = [
    "has_cuda",
    "own_kernel",
    "registered_at",
    "tensor_base",
    "warn_of_override_now",
    "wrap_function",
]
