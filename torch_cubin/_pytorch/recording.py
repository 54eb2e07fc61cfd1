"""Whether PyTorch currently records calls in a graph, in which a raw launch would be missing."""

from __future__ import annotations

import ctypes
import os
import sys
from collections.abc import Iterable
from typing import Any

from torch_cubin._pytorch.internals import Feature

RECORDING = Feature(
    "launches of kernels inside traces", "a launch under make_fx or torch.jit.trace is not refused"
)
_tracing_state = RECORDING.find("_C._get_tracing_state", lambda: None)
_mode = RECORDING.find("_C._get_dispatch_mode", lambda key: None)
_mode_before = RECORDING.find("_ops._get_dispatch_mode_pre_dispatch", lambda key: None)
_mode_keys: Any = RECORDING.find("_C._TorchDispatchModeKey", None)

FAST_RECORDING = Feature(
    "kernel calls through the extension module", "kernel calls go through Python, which is slower"
)
_parse: Any = FAST_RECORDING.find("_C._parse_dispatch_key", None)
_TLS = "_ZN3c104impl28tls_is_dispatch_key_includedENS_11DispatchKeyE"


def recorder(arguments: Iterable[Any] = ()) -> str:
    """The recorder of this thread's calls, "torch.jit.trace", "make_fx", ..., or "". A proxy among
    the arguments indicates torch.fx.symbolic_trace."""
    if _tracing_state() is not None:
        return "torch.jit.trace"
    fx: Any = sys.modules.get("torch.fx")  # a proxy implies that the module is loaded
    if fx is not None and any(isinstance(argument, fx.Proxy) for argument in arguments):
        return "torch.fx.symbolic_trace"
    if _mode_keys is None:
        return ""
    for name, text in (
        ("PROXY", "make_fx"),
        ("FUNCTIONAL", "functionalization"),
        ("FAKE", "FakeTensorMode"),
    ):
        key = getattr(_mode_keys, name, None)
        if key is None:
            continue
        if _mode(key) is not None or (name != "FAKE" and _mode_before(key) is not None):
            return text
    return ""


def is_included() -> tuple[int, int, int, int] | None:
    """The address of c10::impl::tls_is_dispatch_key_included(DispatchKey), and the keys that are
    included during a trace or in any dispatch mode: for the extension module."""
    if _parse is None:
        return None
    try:
        function = getattr(ctypes.CDLL("libc10.so", os.RTLD_NOLOAD), _TLS)
        tracer, python, before = (int(_parse(name)) for name in ("Tracer", "Python", "PreDispatch"))
    except (AttributeError, OSError, RuntimeError, TypeError):
        return None
    address = ctypes.cast(function, ctypes.c_void_p).value
    return None if address is None else (address, tracer, python, before)


__all__ = ["is_included", "recorder"]
