"""The memory layout of torch.Tensor objects, for kernel calls through the extension module.

Before torch 2.14 the stable ABI cannot convert a Python object to its tensor. So the offsets are
found at import, by searching some tensors' memory for values that private functions return.
"""

from __future__ import annotations

import ctypes

import torch

from torch_cubin._pytorch.internals import Feature

LAYOUT = Feature(
    "tensors read in place by kernel calls",
    "they are read by DLPack, which takes some hundreds of nanoseconds a tensor",
)
_allocate_handles = LAYOUT.find("_C._aoti.unsafe_alloc_void_ptrs_from_tensors", None)
_free_handles = LAYOUT.find("_C._aoti.alloc_tensors_by_stealing_from_void_ptrs", None)
_base = LAYOUT.find("_C.TensorBase", None)
_keys_of = LAYOUT.find("_C._dispatch_keys", None)
_key = LAYOUT.find("_C.DispatchKey", None)
_key_set = LAYOUT.find("_C.DispatchKeySet", None)
_negative_view = LAYOUT.find("_neg_view", None)

_FAILURES = (AttributeError, TypeError, RuntimeError, ValueError)  # of private functions


def _implementation(tensor: torch.Tensor) -> int:
    """The address of the tensor's at::TensorImpl, an at::Tensor's only member."""
    (capsule,) = _allocate_handles([tensor])
    pointer = ctypes.pythonapi.PyCapsule_GetPointer
    pointer.restype, pointer.argtypes = ctypes.c_void_p, (ctypes.py_object, ctypes.c_char_p)
    address = ctypes.c_uint64.from_address(pointer(capsule, None)).value
    _free_handles([capsule])
    return address


def tensor_offset() -> int | None:
    """The offset of the at::Tensor in a torch.Tensor object; None if it is not found.

    C++ extensions get it from PyTorch's headers (THPVariable_Unpack).
    """
    if not LAYOUT.available:
        return None
    base = torch.zeros(2, device="cpu")  # whatever torch.set_default_device says
    tensors = [base, base[1:], torch.nn.Parameter(base.clone())]
    try:
        known = [(id(tensor), _implementation(tensor)) for tensor in tensors]
    except _FAILURES:
        return None
    for offset in range(object.__basicsize__, _base.__basicsize__, 8):
        if all(ctypes.c_uint64.from_address(at + offset).value == value for at, value in known):
            return offset
    return None


def _lazy_views() -> int | None:
    """The dispatch keys that mark lazy views (conjugate, negative)."""
    if not LAYOUT.available:
        return None
    try:
        return (_key_set(_key.Conjugate) | _key_set(_key.Negative)).raw_repr()
    except _FAILURES:
        return None


_LAZY_VIEWS = _lazy_views()


def is_lazy_view(tensor: torch.Tensor) -> bool:
    """Whether the tensor is a lazily conjugated or negated view of its memory."""
    # NOTE: is_conj() and is_neg() release the GIL. A daemon thread that reacquires it during
    # interpreter shutdown is unwound through their C++ frames, which calls std::terminate().
    # Reading the dispatch keys keeps the GIL.
    if _LAZY_VIEWS is None:
        return tensor.is_conj() or tensor.is_neg()
    return bool(_keys_of(tensor).raw_repr() & _LAZY_VIEWS)


def keys_offset() -> int | None:
    """The offset of the dispatch keys in an at::TensorImpl; None if it is not found."""
    if not LAYOUT.available:
        return None
    plain = torch.zeros(2, device="cpu")
    complex_ = torch.zeros(2, device="cpu", dtype=torch.complex64)
    try:
        tensors = [plain, complex_.conj(), _negative_view(plain), plain.to_sparse()]
        known = [(_implementation(tensor), _keys_of(tensor).raw_repr()) for tensor in tensors]
    except _FAILURES:
        return None
    for offset in range(0, 192, 8):  # no at::TensorImpl is smaller
        if all(ctypes.c_uint64.from_address(at + offset).value == keys for at, keys in known):
            return offset
    return None


class _ExchangeApi(ctypes.Structure):
    """DLPackExchangeAPI of DLPack 1.x."""

    _fields_ = [
        ("major", ctypes.c_uint32),
        ("minor", ctypes.c_uint32),
        ("previous", ctypes.c_void_p),
        ("allocate", ctypes.c_void_p),
        ("managed_from_object", ctypes.c_void_p),
        ("managed_to_object", ctypes.c_void_p),
        ("tensor_from_object", ctypes.c_void_p),
    ]


def exchange_function() -> int | None:
    """The address of PyTorch's DLPack exchange function, the public path for an unknown layout.
    None if this torch lacks it or has another version."""
    capsule = getattr(torch.Tensor, "__dlpack_c_exchange_api__", None)
    if capsule is None:
        return None
    pointer = ctypes.pythonapi.PyCapsule_GetPointer
    pointer.restype, pointer.argtypes = ctypes.c_void_p, (ctypes.py_object, ctypes.c_char_p)
    try:
        api = _ExchangeApi.from_address(pointer(capsule, b"dlpack_exchange_api"))
    except ValueError:
        return None
    return api.tensor_from_object if api.major == 1 else None


def plain_keys(device: str) -> tuple[int, int] | None:
    """The dispatch keys that every tensor on the device has, and those a plain one may have."""
    if not LAYOUT.available:
        return None
    try:
        sets = [
            _key_set(getattr(_key, name)).raw_repr()
            for name in (device, f"Autograd{device}", f"Autocast{device}", "ADInplaceOrView")
        ]
    except _FAILURES:
        return None
    return sets[0], sets[0] | sets[1] | sets[2] | sets[3]
