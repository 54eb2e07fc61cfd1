"""TensorMap: a TMA descriptor of a tensor, passed to a kernel by value."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Sequence
from typing import Any

import torch

from torch_cubin import errors
from torch_cubin._declared.expressions import Traced, TracedTensor, TracedView, untraceable
from torch_cubin._kernels.memory import has_memory
from torch_cubin._native import library

# The device types of tensors that have a map. Tests add "cpu".
DEVICE_TYPES = ("cuda",)


class _TensorMap:
    """The fields of a tensor map."""

    @errors.named_keywords
    def __init__(
        self,
        tensor: Any,
        box: Sequence[Any],
        *,
        swizzle: str | None = None,
        interleave: str | None = None,
        l2_promotion: str | None = "128B",
        oob_fill: str = "zeros",
        element_strides: Sequence[int] | None = None,
    ) -> None:
        self.tensor, self.box = tensor, _plain(box)
        self.swizzle, self.interleave = swizzle, interleave
        self.l2_promotion, self.oob_fill = l2_promotion, oob_fill
        self.element_strides = None if element_strides is None else _plain(element_strides)

    def fields(self, tensor: str, box: list[Any]) -> dict[str, Any]:
        """The fields in the form of a contract (docs/manifest.md)."""
        return {
            "tensor": tensor,
            "box": box,
            "swizzle": self.swizzle,
            "interleave": self.interleave,
            "l2_promotion": self.l2_promotion,
            "oob_fill": self.oob_fill,
            "element_strides": self.element_strides,
        }


class TensorMap(_TensorMap):
    """A descriptor for the tensor memory accelerator (compute capability 9.0 and newer).

    A kernel declares it as `const __grid_constant__ CUtensorMap map` and gets its 128 bytes by
    value. All sequences are in the order of the tensor's dims: the last is the innermost, which
    must be contiguous; the driver's order is the reverse. A kernel's box may begin anywhere, even
    outside the tensor, but its innermost coordinate must be a multiple of 16 bytes; otherwise the
    GPU raises an illegal instruction.

    - `tensor`: CUDA, 1 to 5 dims, none empty; its address and every stride but the last a multiple
      of 16 bytes (32 with interleave "32B"), except for dims of size 1. 8-bit floats and bools are
      mapped as bytes.
    - `box`: elements of shared memory that one copy fills, 1 to 256 in each dim; the last times the
      element size a multiple of 16 bytes, and at most the swizzle's span.
    - `swizzle`: None, "32B", "64B", "128B", "128B_atom_32B", "128B_atom_32B_flip_8B" or
      "128B_atom_64B".
    - `interleave`: None, "16B" or "32B" (3 dims or more; "32B" wants swizzle "32B").
    - `l2_promotion`: None, "64B", "128B" or "256B".
    - `oob_fill`: "zeros", or "nan" for floating-point tensors.
    - `element_strides`: 1 to 8 in each dim, 1 by default.

    It keeps the tensor alive, and is encoded once, at its first launch. A tensor whose memory or
    layout changes afterwards (resize_(), `.data = other`, as .to() does for parameters) needs a new
    map: launches with the old one raise. Raises [input] for violations of these rules.
    """

    def __new__(cls, tensor: torch.Tensor, *args: Any, **keywords: Any) -> Any:
        if isinstance(tensor, TracedView):
            untraceable(
                "makes a TensorMap of a part of a tensor",
                "Give the whole tensor, and begin the box elsewhere in the kernel.",
            )
        if isinstance(tensor, TracedTensor):
            return TracedTensorMap(tensor, *args, **keywords)
        return super().__new__(cls)

    def __init__(self, tensor: torch.Tensor, box: Sequence[int], **options: Any) -> None:
        if not isinstance(tensor, torch.Tensor):
            raise errors.wrong_type("TensorMap argument 'tensor'", "a torch.Tensor", tensor)
        if tensor.device.type not in DEVICE_TYPES:
            problem, advice = "lies on another kind of device", "Copy it with .cuda()."
            raise _refuse("tensor", problem, "a cuda tensor", str(tensor.device), advice)
        if tensor.numel() and not has_memory(tensor):
            expected = "a tensor whose storage is allocated"
            raise _refuse("tensor", "has elements but no memory", expected, "a null address")
        super().__init__(tensor, box, **options)
        self._layout = _layout(tensor)
        dtype, sizes, strides, address, device = self._layout
        self._fields = {
            "map": self.fields("tensor", self.box),
            "dtype": str(dtype).removeprefix("torch."),
            "itemsize": tensor.element_size(),
            "sizes": tuple(sizes),
            "strides": strides,
            "address": address,
            "device": device.index or 0,
        }
        library.encode_tensor_map(self._fields, check_only=True)
        self._encoded: bytes | None = None

    def encoded(self) -> bytes:
        """The 128 bytes. The first call needs the CUDA driver."""
        if self._encoded is None:
            self._encoded = library.encode_tensor_map(self._fields)
        return self._encoded

    def is_current(self) -> bool:
        """Whether the tensor still has the memory and the layout that the map describes."""
        return _layout(self.tensor) == self._layout


class TracedTensorMap(_TensorMap):
    """A TensorMap that each call of a declared op makes, from the call's arguments."""


def _layout(tensor: torch.Tensor) -> tuple[Any, ...]:
    """What a map describes; every launch asks."""
    return tensor.dtype, tensor.shape, tensor.stride(), tensor.data_ptr(), tensor.device


def _refuse(
    argument: str, problem: str, expected: str, got: object, advice: str = ""
) -> errors.Error:
    what = f"TensorMap argument '{argument}'"
    return errors.fault("input", what, problem, expected=expected, got=str(got), advice=advice)


def _plain(values: Any) -> list[Any]:
    """Sizes for the library, which refuses values that are not ints."""
    if not isinstance(values, Iterable) or isinstance(values, str):
        values = [values]
    known = (int, float, Traced)
    return [value if isinstance(value, known) else _index(value) for value in values]


def _index(value: Any) -> Any:
    try:
        return operator.index(value)  # NumPy's ints
    except TypeError:
        return value


__all__ = ["TensorMap", "TracedTensorMap"]
