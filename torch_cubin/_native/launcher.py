"""The base class of kernels: the extension module's (csrc/python_launch.c), or its twin in Python.

Both mean the same. The extension takes the common calls at a few tenths of a microsecond beyond
the driver's own cost; the twin serves where it could not be built or imported (a free-threaded
Python), where a torch.Tensor is not laid out as it expects, and where TORCH_CUBIN_PLAIN_LAUNCH=1
asks for it.
"""

from __future__ import annotations

import ctypes
import os
from typing import Any

import torch

from torch_cubin._native import library as _lib


class PlainLauncher:
    """Each call goes to _launch_plainly(), which the kernel defines."""

    def _bind(self, handle: int, params: tuple[tuple[int, str], ...]) -> None:
        """The extension keeps what it is told here."""

    def __call__(self, /, *args: Any, **keywords: Any) -> None:
        self._launch_plainly(*args, **keywords)


def _launcher() -> type:
    if os.environ.get("TORCH_CUBIN_PLAIN_LAUNCH") == "1":
        return PlainLauncher
    try:
        from torch_cubin import _launch
    except ImportError:
        return PlainLauncher
    return _launch.Launcher if configure(_launch) else PlainLauncher


def _implementation(tensor: torch.Tensor) -> int:
    """The address of the tensor's at::TensorImpl, which is all that an at::Tensor holds."""
    (capsule,) = torch._C._aoti.unsafe_alloc_void_ptrs_from_tensors([tensor])
    pointer = ctypes.pythonapi.PyCapsule_GetPointer
    pointer.restype, pointer.argtypes = ctypes.c_void_p, (ctypes.py_object, ctypes.c_char_p)
    address = ctypes.c_uint64.from_address(pointer(capsule, None)).value
    torch._C._aoti.alloc_tensors_by_stealing_from_void_ptrs([capsule])  # frees it
    return address


def _tensor_offset() -> int | None:
    """Bytes from a torch.Tensor's address to the at::Tensor in it; None where that is not found.

    Every C++ extension of PyTorch knows it (THPVariable_Unpack), and PyTorch's stable ABI has no
    way to ask. So it is looked for, in tensors whose at::TensorImpl is known.
    """
    base = torch.zeros(2, device="cpu")  # whatever torch.set_default_device says
    tensors = [base, base[1:], torch.nn.Parameter(base.clone())]
    try:
        known = [(id(tensor), _implementation(tensor)) for tensor in tensors]
    except (AttributeError, TypeError, RuntimeError):  # private functions of PyTorch
        return None
    for offset in range(object.__basicsize__, torch._C.TensorBase.__basicsize__, 8):
        if all(ctypes.c_uint64.from_address(at + offset).value == value for at, value in known):
            return offset
    return None


def _keys_offset() -> int | None:
    """Bytes from an at::TensorImpl's address to its dispatch keys; None where not found."""
    plain = torch.zeros(2, device="cpu")
    complex_ = torch.zeros(2, device="cpu", dtype=torch.complex64)
    try:
        tensors = [plain, complex_.conj(), torch._neg_view(plain), plain.to_sparse()]
        known = [
            (_implementation(tensor), torch._C._dispatch_keys(tensor).raw_repr())
            for tensor in tensors
        ]
    except (AttributeError, TypeError, RuntimeError):  # private functions of PyTorch
        return None
    for offset in range(0, 192, 8):  # no at::TensorImpl is smaller
        if all(ctypes.c_uint64.from_address(at + offset).value == keys for at, keys in known):
            return offset
    return None


def _keys(device: str) -> tuple[int, int] | None:
    """The dispatch keys that tensors on a "CUDA" device have, and that plain ones may have."""
    try:
        sets = [
            torch._C.DispatchKeySet(getattr(torch._C.DispatchKey, name)).raw_repr()
            for name in (device, f"Autograd{device}", f"Autocast{device}", "ADInplaceOrView")
        ]
    except (AttributeError, TypeError, RuntimeError):  # private functions of PyTorch
        return None
    return sets[0], sets[0] | sets[1] | sets[2] | sets[3]


def configure(extension: Any, device: str = "CUDA") -> bool:
    """Gives the extension what it cannot link; False where it cannot serve this PyTorch.

    Tests pass another kind of device.
    """
    tensor_at, keys_at, keys = _tensor_offset(), _keys_offset(), _keys(device)
    if tensor_at is None or keys_at is None or keys is None:
        return False
    library = _lib.load()
    launch, read = (
        ctypes.cast(function, ctypes.c_void_p).value
        for function in (library.torch_cubin_kernel_launch, library.torch_cubin_read_tensor)
    )
    types = (torch.Tensor, torch.nn.Parameter)
    extension.configure(launch, types, read, tensor_at, keys_at, *keys, _lib.raise_error)
    return True


Launcher: Any = _launcher()

__all__ = ["Launcher"]
