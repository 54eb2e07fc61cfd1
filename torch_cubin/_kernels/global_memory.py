"""A tensor over a module's global variable, without a copy.

Uses DLPack, which gives the device of the memory; torch.as_tensor of `__cuda_array_interface__`
would query the driver, which knows only allocations.
"""

from __future__ import annotations

import ctypes
from typing import Any

import torch

# DLPack's number for CUDA devices. Tests set the CPU's, 1.
DEVICE_TYPE = 2


class _Device(ctypes.Structure):
    _fields_ = [("type", ctypes.c_int32), ("index", ctypes.c_int32)]


class _DataType(ctypes.Structure):
    _fields_ = [("code", ctypes.c_uint8), ("bits", ctypes.c_uint8), ("lanes", ctypes.c_uint16)]


class _Tensor(ctypes.Structure):
    _fields_ = [
        ("data", ctypes.c_void_p),
        ("device", _Device),
        ("ndim", ctypes.c_int32),
        ("dtype", _DataType),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
    ]


_Deleter = ctypes.CFUNCTYPE(None, ctypes.c_void_p)


class _Managed(ctypes.Structure):
    """DLManagedTensor of dlpack.h."""

    _fields_ = [("tensor", _Tensor), ("context", ctypes.c_void_p), ("deleter", _Deleter)]


# Objects that PyTorch still refers to, by the address of the struct: (struct, shape, module).
_alive: dict[int, tuple[_Managed, Any, Any]] = {}


@_Deleter
def _release(address: int) -> None:
    """Called by PyTorch when the last tensor over the memory is freed."""
    module = _alive.pop(address)[2]
    module._globals.discard(address)


_NAME = ctypes.create_string_buffer(b"dltensor")  # a capsule keeps the pointer
_new_capsule = ctypes.pythonapi.PyCapsule_New
_new_capsule.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p]
_new_capsule.restype = ctypes.py_object


def tensor_over(module: Any, address: int, size: int, device: int) -> torch.Tensor:
    """A tensor of the `size` bytes at `address`; it and its views keep the module loaded."""
    if DEVICE_TYPE == 2:
        torch.cuda.init()  # not done by a tensor that PyTorch did not allocate
    shape = (ctypes.c_int64 * 1)(size)
    managed = _Managed()
    managed.tensor.data = address
    managed.tensor.device = _Device(DEVICE_TYPE, device)
    managed.tensor.ndim = 1
    managed.tensor.dtype = _DataType(1, 8, 1)  # uint8
    managed.tensor.shape = ctypes.cast(shape, ctypes.POINTER(ctypes.c_int64))
    managed.deleter = _release
    key = ctypes.addressof(managed)
    _alive[key] = (managed, shape, module)
    module._globals.add(key)
    try:
        return torch.utils.dlpack.from_dlpack(_new_capsule(key, ctypes.addressof(_NAME), None))
    except BaseException:
        _release(key)
        raise


__all__ = ["tensor_over"]
