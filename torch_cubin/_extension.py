"""The base class of kernels: the extension module's (csrc/python_launch.c), or its twin in Python.

Both mean the same. The extension takes the common calls at a few tenths of a microsecond beyond
the driver's own cost; the twin serves where it could not be built or imported (a free-threaded
Python), and where TORCH_CUBIN_PLAIN_LAUNCH=1 asks for it.
"""

from __future__ import annotations

import ctypes
import os
from typing import Any

import torch

from torch_cubin import _lib

_CUDA = 2  # DLPack's number for CUDA devices


class PlainLauncher:
    """Each call goes to _launch_plainly(), which the kernel defines."""

    def _bind(self, handle: int, params: tuple[tuple[int, str], ...]) -> None:
        """The extension keeps what it is told here."""

    def __call__(self, *args: Any, **keywords: Any) -> None:
        self._launch_plainly(*args, **keywords)


def _launcher() -> type:
    if os.environ.get("TORCH_CUBIN_PLAIN_LAUNCH") == "1":
        return PlainLauncher
    try:
        from torch_cubin import _launch
    except ImportError:
        return PlainLauncher
    exchange = getattr(torch.Tensor, "__dlpack_c_exchange_api__", None)
    if exchange is None:
        return PlainLauncher
    configure(_launch, _CUDA)
    return _launch.Launcher


def configure(extension: Any, device_type: int) -> None:
    """Gives the extension what it cannot link. Tests pass another device type."""
    address = ctypes.cast(_lib.load().torch_cubin_kernel_launch, ctypes.c_void_p).value
    extension.configure(
        address,
        (torch.Tensor, torch.nn.Parameter),
        torch.Tensor.__dlpack_c_exchange_api__,
        device_type,
        _lib.raise_error,
    )


Launcher: Any = _launcher()

__all__ = ["Launcher"]
