"""TensorMap: a TMA descriptor of a tensor, passed to a kernel by value."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

import torch

from torch_cubin import errors
from torch_cubin._declared.expressions import TracedTensor
from torch_cubin._kernels.memory import has_memory
from torch_cubin._native import library as _lib

# The driver's numbers (cuda.h, CUtensorMapDataType and the enums after it).
_DATA_TYPES = {
    torch.uint8: 0,
    torch.int8: 0,
    torch.bool: 0,
    torch.uint16: 1,
    torch.int16: 1,
    torch.uint32: 2,
    torch.int32: 3,
    torch.uint64: 4,
    torch.int64: 5,
    torch.float16: 6,
    torch.float32: 7,
    torch.float64: 8,
    torch.bfloat16: 9,
    torch.float8_e4m3fn: 0,
    torch.float8_e5m2: 0,
}
_FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
_INTERLEAVE = {None: 0, "16B": 1, "32B": 2}
_SWIZZLE = {
    None: 0,
    "32B": 1,
    "64B": 2,
    "128B": 3,
    "128B_atom_32B": 4,
    "128B_atom_32B_flip_8B": 5,
    "128B_atom_64B": 6,
}
_L2_PROMOTION = {None: 0, "64B": 1, "128B": 2, "256B": 3}
_OOB_FILL = {"zeros": 0, "nan": 1}
_MAX_DIMS = 5

# The device types of tensors that have a map. Tests add "cpu".
DEVICE_TYPES = ("cuda",)


class _Spec(ctypes.Structure):
    """struct torch_cubin_tensor_map of csrc/runtime/launch_call.h."""

    _fields_ = [
        ("size", ctypes.c_uint32),
        ("rank", ctypes.c_uint32),
        ("data_type", ctypes.c_uint32),
        ("interleave", ctypes.c_uint32),
        ("swizzle", ctypes.c_uint32),
        ("l2_promotion", ctypes.c_uint32),
        ("oob_fill", ctypes.c_uint32),
        ("device", ctypes.c_int32),
        ("address", ctypes.c_void_p),
        ("dims", ctypes.c_uint64 * _MAX_DIMS),
        ("strides", ctypes.c_uint64 * _MAX_DIMS),
        ("box", ctypes.c_uint32 * _MAX_DIMS),
        ("element_strides", ctypes.c_uint32 * _MAX_DIMS),
    ]


class TensorMap:
    """A descriptor for the tensor memory accelerator (compute capability 9.0 and newer).

    A kernel declares it as `const __grid_constant__ CUtensorMap map` and gets its 128 bytes by
    value. All sequences are in the order of the tensor's dims, the last being the innermost, which
    must be contiguous; the driver's own order is the reverse. A kernel's box may begin anywhere,
    outside the tensor too, but its innermost coordinate must be a multiple of 16 bytes: at others
    the GPU raises an illegal instruction.

    - `tensor`: CUDA, 1 to 5 dims, none empty; its address and every stride but the last a multiple
      of 16 bytes (32 with interleave "32B"), but for dims of size 1. 8-bit floats and bools go as
      bytes.
    - `box`: elements of shared memory that one copy fills, 1 to 256 in each dim; the last times the
      element size a multiple of 16 bytes, and at most the swizzle's span.
    - `swizzle`: None, "32B", "64B", "128B", "128B_atom_32B", "128B_atom_32B_flip_8B" or
      "128B_atom_64B".
    - `interleave`: None, "16B" or "32B" (3 dims or more; "32B" wants swizzle "32B").
    - `l2_promotion`: None, "64B", "128B" or "256B".
    - `oob_fill`: "zeros", or "nan" for floating-point tensors.
    - `element_strides`: 1 to 8 in each dim, 1 by default.

    It holds the tensor, and is encoded once, at its first launch; a tensor that is resized
    afterwards needs a new map. Raises [input] for what breaks these rules.
    """

    def __new__(cls, tensor: torch.Tensor, *args: Any, **keywords: Any) -> Any:
        if isinstance(tensor, TracedTensor):
            return TracedTensorMap(tensor, *args, **keywords)
        return super().__new__(cls)

    def __init__(
        self,
        tensor: torch.Tensor,
        box: Sequence[int],
        *,
        swizzle: str | None = None,
        interleave: str | None = None,
        l2_promotion: str | None = "128B",
        oob_fill: str = "zeros",
        element_strides: Sequence[int] | None = None,
    ) -> None:
        if not isinstance(tensor, torch.Tensor):
            raise _refuse("tensor", "has a wrong type", "a torch.Tensor", type(tensor).__name__)
        if tensor.device.type not in DEVICE_TYPES:
            raise _refuse(
                "tensor",
                "lies on another kind of device",
                "a cuda tensor",
                str(tensor.device),
                "Copy it with .cuda().",
            )
        if tensor.dtype not in _DATA_TYPES:
            raise _refuse(
                "tensor", "has a dtype that no tensor map has", "a real dtype", str(tensor.dtype)
            )
        self.tensor = tensor
        self.box = _integers("box", box, tensor.dim(), 256)
        if element_strides is None:
            element_strides = (1,) * tensor.dim()
        self.element_strides = _integers("element_strides", element_strides, tensor.dim(), 8)
        self.swizzle = swizzle
        self.interleave = interleave
        self._spec = _Spec(
            size=ctypes.sizeof(_Spec),
            rank=tensor.dim(),
            data_type=_DATA_TYPES[tensor.dtype],
            interleave=_choice("interleave", interleave, _INTERLEAVE),
            swizzle=_choice("swizzle", swizzle, _SWIZZLE),
            l2_promotion=_choice("l2_promotion", l2_promotion, _L2_PROMOTION),
            oob_fill=_choice("oob_fill", oob_fill, _OOB_FILL),
        )
        if oob_fill == "nan" and tensor.dtype not in _FLOATS:
            raise _refuse(
                "oob_fill", "wants floating point", "a floating-point tensor", str(tensor.dtype)
            )
        self._check_tensor()
        self._check_box()
        self._encoded: bytes | None = None

    def _check_tensor(self) -> None:
        tensor, spec = self.tensor, self._spec
        rank = tensor.dim()
        least = 1 if self.interleave is None else 3
        if not least <= rank <= _MAX_DIMS:
            raise _refuse("tensor", "has too many or few dims", f"{least} to {_MAX_DIMS}", rank)
        shape, strides = tuple(tensor.shape), tensor.stride()
        if not all(0 < size <= 1 << 32 for size in shape):
            raise _refuse("tensor", "has a size out of range", "1 to 2^32 in each dim", shape)
        if strides[-1] != 1 and shape[-1] != 1:
            raise _refuse(
                "tensor", "has an innermost dim with gaps", "stride 1 in the last dim", strides
            )
        step = 32 if self.interleave == "32B" else 16
        if not has_memory(tensor):
            expected = "a tensor whose storage is allocated"
            raise _refuse("tensor", "has elements but no memory", expected, "a null address")
        if tensor.data_ptr() % step:
            raise _refuse(
                "tensor",
                "is not aligned",
                f"an address that is a multiple of {step} bytes",
                hex(tensor.data_ptr()),
            )
        item = tensor.element_size()
        for index, stride in enumerate(strides[:-1]):
            if not _fits(stride * item, step) and shape[index] != 1:
                raise _refuse(
                    "tensor",
                    f"has a stride in dim {index} that the hardware does not take",
                    f"a multiple of {step} bytes below 2^40",
                    f"{stride * item} bytes",
                )
        spec.device = tensor.device.index or 0
        spec.address = tensor.data_ptr()
        spec.dims[:rank] = shape[::-1]
        # Nothing is read by the stride of a dim of size 1: any that the hardware takes will do.
        spec.strides[: rank - 1] = [
            stride * item if _fits(stride * item, step) else step for stride in strides[-2::-1]
        ]
        spec.box[:rank] = self.box[::-1]
        spec.element_strides[:rank] = self.element_strides[::-1]

    def _check_box(self) -> None:
        inner = self.box[-1] * self.tensor.element_size()
        if self.interleave == "32B" and self.swizzle != "32B":
            raise _refuse("swizzle", "does not go with interleave '32B'", "'32B'", self.swizzle)
        if self.interleave is not None:
            return
        if inner % 16:
            raise _refuse(
                "box", "has an innermost dim out of step", "a multiple of 16 bytes", f"{inner}"
            )
        if self.swizzle is not None and inner > int(self.swizzle.split("B")[0]):
            raise _refuse(
                "box",
                f"has an innermost dim wider than the swizzle '{self.swizzle}'",
                f"at most {self.swizzle.split('B')[0]} bytes",
                f"{inner}",
            )

    def encoded(self) -> bytes:
        """The 128 bytes. The first call needs the CUDA driver."""
        if self._encoded is None:
            self._encoded = _lib.encode_tensor_map(self._spec)
        return self._encoded


class TracedTensorMap:
    """A TensorMap that each call of a declared op makes: the arguments of one, not yet known."""

    def __init__(
        self,
        tensor: TracedTensor,
        box: Sequence[Any],
        *,
        swizzle: str | None = None,
        interleave: str | None = None,
        l2_promotion: str | None = "128B",
        oob_fill: str = "zeros",
        element_strides: Sequence[int] | None = None,
    ) -> None:
        for name, value, known in (
            ("swizzle", swizzle, _SWIZZLE),
            ("interleave", interleave, _INTERLEAVE),
            ("l2_promotion", l2_promotion, _L2_PROMOTION),
            ("oob_fill", oob_fill, _OOB_FILL),
        ):
            _choice(name, value, known)
        if not isinstance(box, (list, tuple)) or not 1 <= len(box) <= _MAX_DIMS:
            raise _refuse("box", "is no sequence of sizes", f"1 to {_MAX_DIMS} ints", box)
        if element_strides is not None:
            element_strides = _integers("element_strides", element_strides, len(box), 8)
        self.tensor, self.box, self.element_strides = tensor, tuple(box), element_strides
        self.swizzle, self.interleave = swizzle, interleave
        self.l2_promotion, self.oob_fill = l2_promotion, oob_fill


def _refuse(
    argument: str, problem: str, expected: str, got: object, advice: str = ""
) -> errors.Error:
    what = f"TensorMap argument '{argument}'"
    return errors.fault("input", what, problem, expected=expected, got=str(got), advice=advice)


def _fits(stride: int, step: int) -> bool:
    return stride % step == 0 and 0 <= stride < 1 << 40


def _integers(name: str, values: Sequence[int], count: int, most: int) -> tuple[int, ...]:
    expected = f"{count} ints from 1 to {most}, one a dim"
    try:
        numbers = tuple(int(value) for value in values)
    except (TypeError, ValueError):
        raise _refuse(name, "is no sequence of ints", expected, values) from None
    if len(numbers) != count or not all(1 <= number <= most for number in numbers):
        raise _refuse(name, "does not fit the tensor", expected, numbers)
    return numbers


def _choice(name: str, value: str | None, known: dict) -> int:
    if value not in known:
        raise _refuse(name, "is unknown", " or ".join(map(repr, known)), repr(value))
    return known[value]


__all__ = ["TensorMap", "TracedTensorMap"]
