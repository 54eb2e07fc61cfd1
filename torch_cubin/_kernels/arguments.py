"""A launch's arguments as bytes, one piece per parameter, checked against the binary's table.

`pack` says what a kernel call takes. csrc/python_launch.c repeats the common part
of it (contiguous tensors, ints, floats, bools, None) in C for speed, and hands every other call to
this file, wrong ones included, so that each message exists once.
"""

from __future__ import annotations

import ctypes
import dataclasses
import struct
import sys
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from torch_cubin import errors
from torch_cubin._inspection.inspect import Kernel as KernelFacts
from torch_cubin._inspection.inspect import Param
from torch_cubin._kernels import scalars
from torch_cubin._kernels.memory import has_memory
from torch_cubin._kernels.scalars import Scalar
from torch_cubin._kernels.struct_bytes import Strided, Struct, packed
from torch_cubin._kernels.tensor_map import TensorMap
from torch_cubin._native import library
from torch_cubin._pytorch.tensors import is_lazy_view

# The device type of tensors that a kernel accepts. Tests set it to "cpu".
DEVICE_TYPE = "cuda"


def strided(tensor: Any) -> Strided:
    """Declares that the kernel handles this tensor's strides, so that it need not be contiguous.

    `tensor` is a torch.Tensor or an object with `__cuda_array_interface__`. The kernel gets the
    address of its first element, as it does for a contiguous one.
    """
    return Strided(tensor)


class Bits:
    """An argument that is passed regardless of its type: see bits()."""

    __slots__ = ("argument",)

    def __init__(self, argument: Any) -> None:
        self.argument = argument


def bits(argument: Any) -> Bits:
    """Declares that the kernel takes this argument's bits, regardless of the type that the file
    states.

    `argument` is any argument of a kernel: a tensor, strided(tensor), int32(n) and similar. Without
    it, a half tensor for a `float*` and an int32(n) for a `float` are refused.
    """
    return Bits(argument)


class Stated(NamedTuple):
    """The facts that a kernel's files state of a parameter (csrc/cubin/stated_type.h)."""

    kind: str = ""  # "pointer", "value" or "unknown"; "" if only the binary is known
    type: str = ""  # "float const*"
    # "integer", "signed", "unsigned", "bool", "float"; "none" for example for a vector.
    number: str = ""
    is_pointer: bool = False
    takes: int = 0  # the dtypes as bits
    dtypes: Sequence[str] = ()  # that it is, or points to; none where nothing is stated


_UNSAID = Stated()


def pack(
    facts: KernelFacts, arguments: Sequence[Any], stated: Sequence[Stated] = (), handle: int = 0
) -> tuple[list[bytes], int | None]:
    """The bytes of every parameter, and the index of the device on which the arguments lie.

    The index is None if no argument lies on a device. Raises [params] for a wrong count or size,
    [input] for arguments that a kernel cannot take.
    """
    if len(arguments) != len(facts.params):
        advice = library.hidden_advice(handle, len(arguments)) if handle else ""
        raise wrong_count(facts, len(facts.params), len(arguments), advice)
    device: int | None = None
    pieces = []
    packer = _Packer(facts)
    for index, (param, argument) in enumerate(zip(facts.params, arguments, strict=True)):
        packer.param = param
        packer.stated = stated[index] if stated else _UNSAID
        if isinstance(argument, Bits):
            packer.stated = _UNSAID
            argument = argument.argument
        piece, where = packer.pack(argument)
        pieces.append(piece)
        if where is not None and device is not None and device != where:
            problem = "lies on another device than an argument before it"
            advice = "Copy it there with .to(), or launch on each device by itself."
            devices = f"{DEVICE_TYPE}:{device}", f"{DEVICE_TYPE}:{where}"
            raise packer.refuse(problem, *devices, advice)
        device = where if device is None else device
    return pieces, device


def wrong_count(facts: KernelFacts, expected: int, got: int, advice: str = "") -> errors.Error:
    return errors.fault(
        "params",
        f"kernel '{facts.name}'",
        "was given another number of arguments than it has parameters",
        expected=str(expected),
        got=str(got),
        advice=f"{advice} {table(facts)}".lstrip(),
    )


def table(facts: KernelFacts) -> str:
    """The kernel's parameters, as the end of an error message."""
    return f"The binary says:\n{facts}"


# Types for which isinstance() takes microseconds: torch.Tensor's check is Python code.
_TENSORS = frozenset({torch.Tensor, torch.nn.Parameter})
_CTYPES = (ctypes.Structure, ctypes.Union, ctypes.Array, ctypes._SimpleCData)
_BYTES = (bytes, bytearray, memoryview, *_CTYPES)
_NO_MEMORY = "is a tensor with no memory of its own"


class _Packer:
    """Packs the argument for `param`, which the caller sets; one object serves a whole call."""

    __slots__ = ("facts", "field", "param", "stated")
    param: Param
    stated: Stated

    def __init__(self, facts: KernelFacts, field: str = "") -> None:
        self.facts, self.field, self.stated = facts, field, _UNSAID

    def refuse(self, problem: str, expected: str, got: str, advice: str = "") -> errors.Error:
        return self._fault("input", problem, expected, got, advice)

    def _fault(
        self, tag: str, problem: str, expected: str, got: str, advice: str = ""
    ) -> errors.Error:
        what = f"{self.field}argument {self.param.index} of kernel '{self.facts.name}'"
        return errors.fault(tag, what, problem, expected=expected, got=got, advice=advice)

    def _wrong_size(self, got: str, advice: str = "") -> errors.Error:
        expected, advice = f"{self.param.size} bytes", f"{advice} {table(self.facts)}".lstrip()
        return self._fault("params", "does not fit its parameter", expected, got, advice)

    @property
    def kind(self) -> str:
        return self.stated.kind or self.param.kind

    def _wrong_type(self, got: str) -> errors.Error:
        what = "a value's bytes" if self.stated.number == "none" else "an int or a value's bytes"
        convert = "Convert it with .to(dtype)" if self.stated.is_pointer else "Convert it"
        return self._fault(
            "params",
            "is of another type than its parameter",
            f"{' or '.join(self.stated.dtypes) or what}, for '{self.stated.type}'",
            got,
            f"{convert}, or pass torch_cubin.bits(...) where its bits are meant.",
        )

    def _check_dtype(self, dtype: str, is_pointer: bool) -> None:
        """Compares the argument's dtype, or that of its memory, with the type that the file
        states."""
        stated = self.stated
        if stated.dtypes and stated.is_pointer == is_pointer and dtype not in stated.dtypes:
            raise self._wrong_type(dtype)

    def pack(self, argument: Any) -> tuple[bytes, int | None]:
        exact = type(argument)
        if exact is int:
            return self._int(argument), None
        if exact is float:
            return self._float(argument), None
        if exact in _TENSORS or isinstance(argument, torch.Tensor):
            return self._pointer(*self._tensor_address(argument, dense=True))
        if isinstance(argument, Strided):
            inner = argument.tensor
            if isinstance(inner, torch.Tensor):
                return self._pointer(*self._tensor_address(inner, dense=False))
            return self._pointer(*self._array_address(inner, dense=False))
        if isinstance(argument, Scalar):
            self._check_dtype(argument.type_name, is_pointer=False)
            return self._exact(argument.data, repr(argument)), None
        if isinstance(argument, TensorMap):
            device = self._tensor_address(argument.tensor, dense=False)[1]
            if not argument.is_current():
                raise self.refuse(
                    "is a TensorMap whose tensor has changed since it was made",
                    "a tensor with the memory and the layout that the map describes",
                    "others, as resize_() and `.data = other` give",
                    "Make a new TensorMap.",
                )
            return self._exact(argument.encoded(), "a TensorMap of 128 bytes"), device
        if isinstance(argument, Struct):
            return self._struct(argument)
        data = _raw_bytes(argument)
        if data is not None:
            if (dtype := _number_type(argument)) is not None:
                self._check_dtype(dtype, is_pointer=False)
            return self._exact(data, f"{len(data)} bytes ({exact.__name__})"), None
        if isinstance(argument, int):  # including bool
            return self._int(argument), None
        if isinstance(argument, float):
            return self._float(argument), None
        if argument is None:
            if self.param.size != 8 or self.kind == "value":
                raise self._wrong_size("None, a null pointer of 8 bytes")
            return bytes(8), None
        return self._pointer(*self._array_address(argument, dense=True))

    def _exact(self, data: bytes, shown: str) -> bytes:
        if len(data) != self.param.size:
            raise self._wrong_size(shown)
        return data

    def _struct(self, value: Struct) -> tuple[bytes, int | None]:
        data, devices = packed(value, self._in_struct)
        if len(set(devices)) > 1:
            problem = "has tensors on several devices"
            raise self.refuse(problem, "one device", ", ".join(map(str, sorted(set(devices)))))
        return self._exact(data, f"{value!r}"), devices[0] if devices else None

    def _in_struct(self, value: Any, size: int, label: str) -> tuple[bytes, int | None]:
        """Like `pack`, for a field of a struct, which the binary has no entry for."""
        field = _Packer(self.facts, f"{label} of ")
        field.param = dataclasses.replace(self.param, size=size, kind="unknown")
        return field.pack(value)

    def _int(self, value: int) -> bytes:
        size = self.param.size
        if self.stated.number == "none":
            raise self._wrong_type(f"the int {value}"[:80])
        if self.stated.number == "float":
            try:
                return self._float(float(value))
            except OverflowError:
                raise self._fault(
                    "params",
                    "is out of range for a float",
                    "a number of its range",
                    f"{value}"[:80],
                ) from None
        if size not in (1, 2, 4, 8):
            raise self._wrong_size(f"the int {value}", "Pass a struct as bytes.")
        low, high = -(1 << 8 * size - 1), (1 << 8 * size) - 1
        if self.stated.number == "signed":
            high = -low - 1
        elif self.stated.number in ("unsigned", "bool"):
            low, high = 0, 1 if self.stated.number == "bool" else high
        if not low <= value <= high:
            problem = f"is out of range for a parameter of {size} bytes"
            raise self._fault("params", problem, f"{low} to {high}", str(value)[:80])
        return value.to_bytes(size, "little", signed=value < 0)

    def _float(self, value: float) -> bytes:
        size = self.param.size
        if self.stated.number not in ("", "float"):
            raise self._wrong_type(f"the float {value!r}")
        if size == 2 and self.stated.number == "float":
            narrow = scalars.bfloat16 if "bfloat16" in self.stated.dtypes else scalars.float16
            return narrow(value).data
        code = {4: "<f", 8: "<d"}.get(size)
        if code is None or self.kind == "pointer":
            advice = "Say which 16-bit type is meant: torch_cubin.float16 or bfloat16."
            raise self._wrong_size(f"the float {value!r}", advice if size == 2 else "")
        try:
            return struct.pack(code, value)
        except OverflowError:
            problem = "is out of range for float32, which a parameter of 4 bytes takes"
            expected = "a number of at most 3.4028235e38, inf or nan"
            raise self._fault("params", problem, expected, repr(value)) from None

    def _pointer(self, address: int, device: int | None) -> tuple[bytes, int | None]:
        if self.param.size != 8 or self.kind == "value":
            number = "" if self.param.size != 8 else ", where the binary has a number"
            raise self._wrong_size(f"a tensor: a pointer{number} of 8 bytes")
        return address.to_bytes(8, "little"), device

    def _tensor_address(self, tensor: torch.Tensor, dense: bool) -> tuple[int, int]:
        """The address of a tensor's first element, and its device."""
        if type(tensor).__torch_dispatch__ is not torch.Tensor.__torch_dispatch__:
            advice = "Fake and wrapped tensors need an op: torch_cubin.define_op."
            raise self.refuse(_NO_MEMORY, "a plain tensor", type(tensor).__name__, advice)
        # By name, because importing its class takes a second; its memory is uninitialised.
        if type(tensor).__module__ == "torch.nn.attention.bias":
            raise self.refuse(_NO_MEMORY, "a plain tensor", "torch.nn.attention.bias.CausalBias")
        device = tensor.device
        if device.type != DEVICE_TYPE:
            advice = "Copy it with .cuda(); pass a number as int or float."
            expected = f"a {DEVICE_TYPE} tensor"
            raise self.refuse("lies on another kind of device", expected, str(device), advice)
        self._check_dtype(str(tensor.dtype).removeprefix("torch."), is_pointer=True)
        if tensor.layout is not torch.strided:
            raise self.refuse("is not a strided tensor", "torch.strided", str(tensor.layout))
        if is_lazy_view(tensor):
            raise self.refuse(
                "holds values that are yet to be conjugated or negated",
                "memory with the tensor's own values",
                "a lazy view",
                "Call .resolve_conj() or .resolve_neg() first.",
            )
        if dense and not tensor.is_contiguous():
            raise self.refuse(
                "is not contiguous",
                "a contiguous tensor",
                f"shape {tuple(tensor.shape)}, strides {tensor.stride()}",
                "Call .contiguous(), or pass torch_cubin.strided(tensor) to a kernel with strides.",
            )
        try:
            address, present = tensor.data_ptr(), has_memory(tensor)
        except RuntimeError as error:
            got = str(error).split("\n")[0][:200]
            raise self.refuse(_NO_MEMORY, "a plain tensor", got) from error
        if not present:
            raise self.refuse(_NO_MEMORY, "a plain tensor", "a null address")
        return address, device.index or 0

    def _array_address(self, array: Any, dense: bool) -> tuple[int, int | None]:
        """The same for an object with `__cuda_array_interface__` (CuPy, Numba)."""
        interface = getattr(array, "__cuda_array_interface__", None)
        if interface is None:
            raise self.refuse(
                "is of a type that a kernel cannot be given",
                "a tensor, an int, float, bool or None, a torch_cubin scalar or TensorMap, bytes, a"
                " ctypes.Structure or a NumPy scalar",
                type(array).__name__,
                "A CPU array must be copied to the GPU first.",
            )
        if (dtype := _ARRAY_TYPES.get(str(interface["typestr"])[1:])) is not None:
            self._check_dtype(dtype, is_pointer=True)
        address = int(interface["data"][0])
        shape, strides = tuple(interface["shape"]), interface.get("strides")
        if dense and strides is not None and 0 not in shape:
            step = int(interface["typestr"][2:])
            for size, stride in zip(reversed(shape), reversed(strides), strict=True):
                if size != 1 and stride != step:
                    got = f"shape {shape}, strides {tuple(strides)}"
                    advice = "Copy it, or pass torch_cubin.strided(array)."
                    raise self.refuse("is not contiguous", "a contiguous array", got, advice)
                step *= size
        if address == 0:
            return 0, None
        device = library.pointer_device(address)
        if device < 0:
            expected = "the address of device memory"
            raise self.refuse("is no memory of a GPU", expected, hex(address))
        return address, device


# Of `__cuda_array_interface__`, without the byte order; and NumPy's kinds with their sizes.
_ARRAY_TYPES = {
    **{f"i{size}": f"int{8 * size}" for size in (1, 2, 4, 8)},
    **{f"u{size}": f"uint{8 * size}" for size in (1, 2, 4, 8)},
    **{f"f{size}": f"float{8 * size}" for size in (2, 4, 8)},
    **{f"c{size}": f"complex{8 * size}" for size in (8, 16)},
    "b1": "bool",
}
_CTYPE_KINDS = {**dict.fromkeys("bhilq", "i"), **dict.fromkeys("BHILQ", "u"), "f": "f", "d": "f"}


def _number_type(argument: Any) -> str | None:
    """The dtype of a NumPy or ctypes number; None for bytes, structs and arrays."""
    if isinstance(argument, ctypes._SimpleCData):
        letter = getattr(argument, "_type_", "")
        code = "b" if letter == "?" else _CTYPE_KINDS.get(letter, "")
        return _ARRAY_TYPES.get(f"{code}{ctypes.sizeof(argument)}")
    dtype = getattr(argument, "dtype", None)
    return _ARRAY_TYPES.get(f"{dtype.kind}{dtype.itemsize}") if dtype is not None else None


def _raw_bytes(argument: Any) -> bytes | None:
    """The bytes of an argument that has them: bytes, ctypes objects, NumPy scalars; else None."""
    if isinstance(argument, _BYTES):
        return bytes(argument)
    numpy = sys.modules.get("numpy")
    if numpy is not None and isinstance(argument, numpy.generic):
        return argument.tobytes()
    return None


__all__ = ["Bits", "Stated", "Strided", "bits", "pack", "strided", "table"]
