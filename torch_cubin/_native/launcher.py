"""The base class of kernels: the extension module's (csrc/python_launch.c), or the Python
reference.

Both behave alike. The extension serves common calls at a few tenths of a microsecond above the
driver's own cost. The reference serves if the extension could not be built or imported (a
free-threaded Python), if torch.Tensor has another memory layout than it expects, and if
TORCH_CUBIN_PLAIN_LAUNCH=1 is set.
"""

from __future__ import annotations

import ctypes
import importlib
import os
from collections.abc import Callable
from typing import Any

import torch

from torch_cubin._native import library as _library
from torch_cubin._pytorch import recording, tensors

_DLPACK_DEVICES = {"CPU": 1, "CUDA": 2}


class PlainLauncher:
    """Forwards each call to _launch_plainly(), which the kernel defines."""

    def _bind(self, handle: int, params: tuple[tuple[int, str], ...]) -> None:
        """The extension stores its arguments here."""

    _launch_plainly: Callable[..., None]

    def __call__(self, /, *args: Any, **keywords: Any) -> None:
        self._launch_plainly(*args, **keywords)


def _launcher() -> type:
    if os.environ.get("TORCH_CUBIN_PLAIN_LAUNCH") == "1":
        return PlainLauncher
    try:
        _launch: Any = importlib.import_module("torch_cubin._launch")
    except ImportError:
        return PlainLauncher
    return _launch.Launcher if configure(_launch) else PlainLauncher


def configure(extension: Any, device: str = "CUDA") -> bool:
    """Passes to the extension the addresses that it cannot link; False if it cannot serve PyTorch.

    Tests pass another kind of device.
    """
    asked = recording.is_included()
    if asked is None:
        return False
    tensor_at, keys_at = tensors.tensor_offset(), tensors.keys_offset()
    keys = tensors.plain_keys(device)
    exchange = 0
    if tensor_at is None or keys_at is None or keys is None:
        # NOTE: measured per tensor: 8 ns in place, 60 by DLPack plus 230 to query the negative bit,
        # 84 by torch_tensor_from_pyobject of torch 2.14, which does not give that bit either.
        exchange = tensors.exchange_function() or 0
        if not exchange:
            return False
        tensor_at, keys_at, keys = 0, 0, (0, 0)
    library = _library.load()
    launch, read = (
        ctypes.cast(function, ctypes.c_void_p).value
        for function in (library.torch_cubin_kernel_launch, library.torch_cubin_read_tensor)
    )
    types = (torch.Tensor, torch.nn.Parameter)
    extension.configure(launch, types, read, tensor_at, keys_at, *keys, _library.raise_error)
    extension.recording(*asked)
    extension.exchange(exchange, _DLPACK_DEVICES[device])
    return True


Launcher: Any = _launcher()

__all__ = ["Launcher"]
