"""One launch, in Python and ctypes: serves kernel calls without the extension module, and all but
the common calls with it (csrc/python_launch.c).
"""

from __future__ import annotations

import ctypes
import operator
from collections.abc import Sequence
from typing import Any

import torch

from torch_cubin import errors
from torch_cubin._inspection.inspect import Kernel as KernelFacts
from torch_cubin._kernels import arguments as _arguments
from torch_cubin._native import library
from torch_cubin._pytorch import recording

# TORCH_CUBIN_* of csrc/runtime/launch_call.h.
COOPERATIVE, DEPENDENT, PRIORITY, STREAM, CLUSTER = 1, 2, 4, 8, 16


class Call(ctypes.Structure):
    """struct torch_cubin_launch_call of csrc/runtime/launch_call.h."""

    _fields_ = [
        ("size", ctypes.c_uint32),
        ("flags", ctypes.c_uint32),
        ("device", ctypes.c_int32),
        ("priority", ctypes.c_int32),
        ("grid", ctypes.c_int64 * 3),
        ("block", ctypes.c_int64 * 3),
        ("cluster", ctypes.c_int64 * 3),
        ("shared_memory", ctypes.c_int64),
        ("stream", ctypes.c_void_p),
        ("params", ctypes.c_void_p),
    ]


def launch(
    handle: int,
    facts: KernelFacts,
    stated: Sequence[_arguments.Stated],
    arguments: Sequence[Any],
    *,
    grid: int | Sequence[int] | None = None,
    block: int | Sequence[int] | None = None,
    shared_memory: int = 0,
    cluster: int | Sequence[int] | None = None,
    cooperative: bool = False,
    programmatic_dependent_launch: bool = False,
    priority: int | None = None,
    stream: Any = None,
) -> None:
    """Checks, packs and launches; the keywords are torch_cubin.Kernel's."""
    if by := recording.recorder(arguments):
        raise errors.fault(
            "input",
            f"the launch of kernel '{facts.name}'",
            f"would pass by {by}, which sees calls of ops alone",
            expected="an op",
            got="a kernel's own launch",
            advice="Make the kernel an op with torch_cubin.define_op.",
        )
    if grid is None:
        raise _refuse(facts, "needs a grid", "grid=blocks or grid=(x, y, z)", "none")
    if block is None:
        if facts.required_block is None:
            raise _refuse(facts, "needs a block", "block=threads or block=(x, y, z)", "none")
        block = facts.required_block
    pieces, device = _arguments.pack(facts, arguments, stated, handle)
    call = Call(ctypes.sizeof(Call))
    call.grid = _triple(facts, "grid", grid)
    call.block = _triple(facts, "block", block)
    if shared_memory != 0:
        call.shared_memory = _integer(facts, "shared_memory", shared_memory)
    if cluster is not None:
        call.cluster = _triple(facts, "cluster", cluster)
        call.flags |= CLUSTER
    if cooperative:
        call.flags |= COOPERATIVE
    if programmatic_dependent_launch:
        call.flags |= DEPENDENT
    if priority is not None:
        call.priority = _integer(facts, "priority", priority, bits=32)
        call.flags |= PRIORITY
    if stream is not None:
        call.stream, where = _stream(facts, stream)
        call.flags |= STREAM
        if where is not None and device is not None and where != device:
            raise errors.fault(
                "input",
                f"stream of the launch of kernel '{facts.name}'",
                "is of another device than the arguments",
                expected=f"a stream of cuda:{device}",
                got=f"one of cuda:{where}",
            )
        device = where if device is None else device
    call.device = current_device() if device is None else device
    # One block of memory, each piece at a multiple of 8 bytes, and a pointer to each.
    values = ctypes.create_string_buffer(b"".join(p.ljust(-(-len(p) // 8) * 8) for p in pieces))
    params = (ctypes.c_void_p * (len(pieces) or 1))()
    address = ctypes.addressof(values)
    for index, piece in enumerate(pieces):
        params[index] = address
        address += -(-len(piece) // 8) * 8
    call.params = ctypes.addressof(params)
    library.kernel_launch(handle, call)


def current_device() -> int:
    """PyTorch's current CUDA device."""
    try:
        return torch.cuda.current_device()
    except (AssertionError, RuntimeError) as error:
        raise errors.fault(
            "no_device",
            "PyTorch",
            "has no current CUDA device",
            expected="a CUDA build of torch and a GPU",
            got=str(error).split("\n")[0],
            advice="Pass CUDA tensors on a machine with a GPU.",
        ) from error


def device_index(device: int | str | torch.device | None) -> int:
    """The index of a device argument of preload() and others; None is PyTorch's current device."""
    if isinstance(device, int) and not isinstance(device, bool):
        if device.bit_length() > 31:  # the library would be asked for another one
            raise errors.fault(
                "no_device", f"cuda:{device}", "is out of range",
                expected="an index from 0 to 63", got=str(device),
            )  # fmt: skip
        return device
    if device is not None:
        problem = "is no CUDA device"
        try:
            found = torch.device(device)
        except (RuntimeError, TypeError) as error:
            got = repr(device)[:80]
            raise errors.fault("input", "device", problem, expected="cuda:0", got=got) from error
        if found.type != "cuda":
            raise errors.fault("input", "device", problem, expected="cuda:0", got=str(found))
        if found.index is not None:
            return found.index
    return current_device()


def _refuse(facts: KernelFacts, problem: str, expected: str, got: str) -> errors.Error:
    return errors.fault(
        "launch", f"the launch of kernel '{facts.name}'", problem, expected=expected, got=got
    )


def _integer(facts: KernelFacts, name: str, value: Any, bits: int = 64) -> int:
    try:
        number = operator.index(value)
    except TypeError:
        raise _refuse(facts, f"has a wrong {name}", "an int", type(value).__name__) from None
    if not -(1 << bits - 1) <= number < 1 << bits - 1:
        raise _refuse(facts, f"has a {name} out of range", f"{bits} bits", str(number)[:80])
    return number


def _triple(facts: KernelFacts, name: str, value: Any) -> tuple[int, int, int]:
    """x, or a sequence of one to three of x, y, z; missing ones are 1."""
    if type(value) is int and 0 <= value < 1 << 63:
        return value, 1, 1
    if isinstance(value, (str, bytes)) or not hasattr(value, "__len__"):
        return _integer(facts, name, value), 1, 1
    if isinstance(value, torch.Tensor) and value.dim() == 0:
        return _integer(facts, name, value), 1, 1
    if not 1 <= len(value) <= 3:
        raise _refuse(
            facts, f"has a wrong {name}", "an int or 1 to 3 ints", f"{len(value)} of them"
        )
    x, y, z = *(_integer(facts, name, number) for number in value), *[1] * (3 - len(value))
    return x, y, z


def _stream(facts: KernelFacts, stream: Any) -> tuple[int, int | None]:
    """The handle of a stream, and its device if the object gives it."""
    handle = getattr(stream, "cuda_stream", None)
    if handle is not None:
        return handle, getattr(stream, "device_index", None)
    if isinstance(stream, int) and not isinstance(stream, bool):
        if 0 <= stream < 1 << 64:
            return stream, None
    elif hasattr(stream, "__cuda_stream__"):  # cuda.core and others: (version, handle)
        version_and_handle = stream.__cuda_stream__()
        return int(version_and_handle[1]), None
    raise errors.fault(
        "input",
        f"stream of the launch of kernel '{facts.name}'",
        "is no CUDA stream",
        expected="a torch.cuda.Stream, an object with __cuda_stream__, or a handle as int",
        got=repr(stream)[:80],
    )


__all__ = ["Call", "current_device", "device_index", "launch"]
