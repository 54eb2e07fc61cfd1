"""A launch's arguments as bytes: one piece a parameter, checked against the binary's own table.

`pack` says what a kernel call takes. csrc/python_launch.c repeats the common part
of it (contiguous tensors, ints, floats, bools, None) in C for speed, and hands every other call to
this file, wrong ones included, so that each message exists once.
"""

from __future__ import annotations

import ctypes
import struct
import sys
from collections.abc import Sequence
from typing import Any

import torch

from torch_cubin import errors
from torch_cubin._inspection.inspect import Kernel as KernelFacts
from torch_cubin._inspection.inspect import Param
from torch_cubin._kernels.memory import has_memory
from torch_cubin._kernels.scalars import Scalar
from torch_cubin._kernels.tensor_map import TensorMap
from torch_cubin._native import library

# The device type of tensors that a kernel may be given. Tests set it to "cpu".
DEVICE_TYPE = "cuda"


class Strided:
    """A tensor that a kernel takes whatever its strides: see strided()."""

    __slots__ = ("tensor",)

    def __init__(self, tensor: Any) -> None:
        self.tensor = tensor


def strided(tensor: Any) -> Strided:
    """Says that the kernel knows this tensor's strides, so that it need not be contiguous.

    `tensor` is a torch.Tensor or an object with `__cuda_array_interface__`. The kernel gets the
    address of its first element, as it does for a contiguous one.
    """
    return Strided(tensor)


def pack(facts: KernelFacts, arguments: Sequence[Any]) -> tuple[list[bytes], int | None]:
    """The bytes of every parameter, and the index of the device on which the arguments lie.

    The index is None where no argument lies on any. Raises [params] for a wrong count or size,
    [input] for what a kernel cannot be given.
    """
    if len(arguments) != len(facts.params):
        raise errors.fault(
            "params",
            f"kernel '{facts.name}'",
            "was given another number of arguments than it has parameters",
            expected=str(len(facts.params)),
            got=str(len(arguments)),
            advice=table(facts),
        )
    device: int | None = None
    pieces = []
    for param, argument in zip(facts.params, arguments, strict=True):
        piece, where = _pack_one(facts, param, argument)
        pieces.append(piece)
        if where is None:
            continue
        if device is not None and device != where:
            raise errors.fault(
                "input",
                _object(facts, param),
                "lies on another device than an argument before it",
                expected=f"{DEVICE_TYPE}:{device}",
                got=f"{DEVICE_TYPE}:{where}",
                advice="Copy it there with .to(), or launch on each device by itself.",
            )
        device = where
    return pieces, device


def table(facts: KernelFacts) -> str:
    """The kernel's parameters, for the end of an error."""
    return f"The binary says:\n{facts}"


def _object(facts: KernelFacts, param: Param) -> str:
    return f"argument {param.index} of kernel '{facts.name}'"


def _wrong_size(facts: KernelFacts, param: Param, got: str, advice: str = "") -> errors.Error:
    return errors.fault(
        "params",
        _object(facts, param),
        "does not fit its parameter",
        expected=f"{param.size} bytes",
        got=got,
        advice=f"{advice} {table(facts)}".lstrip(),
    )


# What isinstance() takes microseconds to tell: torch.Tensor's is Python code.
_TENSORS = frozenset({torch.Tensor, torch.nn.Parameter})


def _pack_one(facts: KernelFacts, param: Param, argument: Any) -> tuple[bytes, int | None]:
    exact = type(argument)
    if exact is int:
        return _pack_int(facts, param, argument), None
    if exact is float:
        return _pack_float(facts, param, argument), None
    if exact in _TENSORS or isinstance(argument, torch.Tensor):
        return _pointer(facts, param, *_tensor_address(facts, param, argument, dense=True))
    if isinstance(argument, Strided):
        inner = argument.tensor
        if isinstance(inner, torch.Tensor):
            return _pointer(facts, param, *_tensor_address(facts, param, inner, dense=False))
        return _pointer(facts, param, *_array_address(facts, param, inner, dense=False))
    if isinstance(argument, Scalar):
        return _exact(facts, param, argument.data, repr(argument)), None
    if isinstance(argument, TensorMap):
        device = _tensor_address(facts, param, argument.tensor, dense=False)[1]
        return _exact(facts, param, argument.encoded(), "a TensorMap of 128 bytes"), device
    data = _raw_bytes(argument)
    if data is not None:
        shown = f"{len(data)} bytes ({type(argument).__name__})"
        return _exact(facts, param, data, shown), None
    if isinstance(argument, int):  # a bool, too
        return _pack_int(facts, param, argument), None
    if isinstance(argument, float):
        return _pack_float(facts, param, argument), None
    if argument is None:
        if param.size != 8 or param.kind == "value":
            raise _wrong_size(facts, param, "None, a null pointer of 8 bytes")
        return bytes(8), None
    return _pointer(facts, param, *_array_address(facts, param, argument, dense=True))


def _exact(facts: KernelFacts, param: Param, data: bytes, shown: str) -> bytes:
    if len(data) != param.size:
        raise _wrong_size(facts, param, shown)
    return data


def _raw_bytes(argument: Any) -> bytes | None:
    """The bytes of what brings its own: bytes, ctypes objects, NumPy scalars; otherwise None."""
    if isinstance(argument, (bytes, bytearray, memoryview)):
        return bytes(argument)
    if isinstance(argument, _CTYPES):
        return bytes(argument)
    numpy = sys.modules.get("numpy")
    if numpy is not None and isinstance(argument, numpy.generic):
        return argument.tobytes()
    return None


_CTYPES = (ctypes.Structure, ctypes.Union, ctypes.Array, ctypes._SimpleCData)


def _pack_int(facts: KernelFacts, param: Param, value: int) -> bytes:
    if param.size not in (1, 2, 4, 8):
        raise _wrong_size(facts, param, f"the int {value}", "Pass a struct as bytes.")
    bits = 8 * param.size
    if not -(1 << bits - 1) <= value < 1 << bits:
        raise errors.fault(
            "params",
            _object(facts, param),
            f"is out of range for a parameter of {param.size} bytes",
            expected=f"{-(1 << bits - 1)} to {(1 << bits) - 1}",
            got=str(value)[:80],
        )
    return value.to_bytes(param.size, "little", signed=value < 0)


def _pack_float(facts: KernelFacts, param: Param, value: float) -> bytes:
    code = {4: "<f", 8: "<d"}.get(param.size)
    if code is None or param.kind == "pointer":
        advice = "Say which 16-bit type is meant: torch_cubin.float16 or bfloat16."
        raise _wrong_size(facts, param, f"the float {value!r}", advice if param.size == 2 else "")
    try:
        return struct.pack(code, value)
    except OverflowError:
        raise errors.fault(
            "params",
            _object(facts, param),
            "is out of range for float32, which a parameter of 4 bytes takes",
            expected="a number of at most 3.4028235e38, inf or nan",
            got=repr(value),
        ) from None


def _pointer(
    facts: KernelFacts, param: Param, address: int, device: int | None
) -> tuple[bytes, int | None]:
    if param.size != 8 or param.kind == "value":
        what = "a pointer" if param.size != 8 else "a pointer, where the binary has a number"
        raise _wrong_size(facts, param, f"a tensor: {what} of 8 bytes")
    return address.to_bytes(8, "little"), device


def _refuse(
    facts: KernelFacts, param: Param, problem: str, expected: str, got: str, advice: str = ""
) -> errors.Error:
    return errors.fault(
        "input", _object(facts, param), problem, expected=expected, got=got, advice=advice
    )


def _tensor_address(
    facts: KernelFacts, param: Param, tensor: torch.Tensor, dense: bool
) -> tuple[int, int]:
    """The address of a tensor's first element, and its device."""
    if type(tensor).__torch_dispatch__ is not torch.Tensor.__torch_dispatch__:
        raise _refuse(
            facts,
            param,
            "is a tensor with no memory of its own",
            "a plain tensor",
            type(tensor).__name__,
            "Fake and wrapped tensors need an op: torch_cubin.define_op.",
        )
    device = tensor.device
    if device.type != DEVICE_TYPE:
        raise _refuse(
            facts,
            param,
            "lies on another kind of device",
            f"a {DEVICE_TYPE} tensor",
            str(device),
            "Copy it with .cuda(); pass a number as int or float.",
        )
    if tensor.layout is not torch.strided:
        raise _refuse(facts, param, "is not a strided tensor", "torch.strided", str(tensor.layout))
    if tensor.is_conj() or tensor.is_neg():
        raise _refuse(
            facts,
            param,
            "holds values that are yet to be conjugated or negated",
            "memory with the tensor's own values",
            "a lazy view",
            "Call .resolve_conj() or .resolve_neg() first.",
        )
    if dense and not tensor.is_contiguous():
        raise _refuse(
            facts,
            param,
            "is not contiguous",
            "a contiguous tensor",
            f"shape {tuple(tensor.shape)}, strides {tensor.stride()}",
            "Call .contiguous(), or pass torch_cubin.strided(tensor) to a kernel with strides.",
        )
    try:
        address, present = tensor.data_ptr(), has_memory(tensor)
    except RuntimeError as error:
        raise _refuse(
            facts,
            param,
            "is a tensor with no memory of its own",
            "a plain tensor",
            str(error).split("\n")[0][:200],
        ) from error
    if not present:
        raise _refuse(
            facts,
            param,
            "is a tensor with no memory of its own",
            "a plain tensor",
            "a null address",
        )
    return address, device.index or 0


def _array_address(
    facts: KernelFacts, param: Param, array: Any, dense: bool
) -> tuple[int, int | None]:
    """The same of an object with `__cuda_array_interface__` (CuPy, Numba)."""
    interface = getattr(array, "__cuda_array_interface__", None)
    if interface is None:
        raise errors.fault(
            "input",
            _object(facts, param),
            "is of a type that a kernel cannot be given",
            expected="a tensor, an int, float, bool or None, a torch_cubin scalar or TensorMap, "
            "bytes, a ctypes.Structure or a NumPy scalar",
            got=type(array).__name__,
            advice="A CPU array must be copied to the GPU first.",
        )
    address = int(interface["data"][0])
    shape, strides = tuple(interface["shape"]), interface.get("strides")
    if dense and strides is not None and 0 not in shape:
        step = int(interface["typestr"][2:])
        for size, stride in zip(reversed(shape), reversed(strides), strict=True):
            if size != 1 and stride != step:
                raise _refuse(
                    facts,
                    param,
                    "is not contiguous",
                    "a contiguous array",
                    f"shape {shape}, strides {tuple(strides)}",
                    "Copy it, or pass torch_cubin.strided(array).",
                )
            step *= size
    if address == 0:
        return 0, None
    device = library.pointer_device(address)
    if device < 0:
        raise _refuse(
            facts, param, "is no memory of a GPU", "the address of device memory", hex(address)
        )
    return address, device


__all__ = ["Strided", "pack", "strided", "table"]
