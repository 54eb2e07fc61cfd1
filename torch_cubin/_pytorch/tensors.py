"""How a torch.Tensor lies in memory: for kernel calls from Python, through the extension module.

PyTorch's stable ABI has no way from a Python object to its tensor before torch 2.14. So the bytes
are looked for at import, where the words of some tensors equal what private functions tell of them.
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
    """The address of the tensor's at::TensorImpl, which is all that an at::Tensor holds."""
    (capsule,) = _allocate_handles([tensor])
    pointer = ctypes.pythonapi.PyCapsule_GetPointer
    pointer.restype, pointer.argtypes = ctypes.c_void_p, (ctypes.py_object, ctypes.c_char_p)
    address = ctypes.c_uint64.from_address(pointer(capsule, None)).value
    _free_handles([capsule])
    return address


def tensor_offset() -> int | None:
    """Bytes from a torch.Tensor's address to the at::Tensor in it; None where that is not found.

    Every C++ extension of PyTorch knows it (THPVariable_Unpack).
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
    """The dispatch keys of which a lazy view has one."""
    if not LAYOUT.available:
        return None
    try:
        return (_key_set(_key.Conjugate) | _key_set(_key.Negative)).raw_repr()
    except _FAILURES:
        return None


_LAZY_VIEWS = _lazy_views()


def is_lazy_view(tensor: torch.Tensor) -> bool:
    """Whether the tensor's values are yet to be conjugated or negated, unlike its memory."""
    # NOTE: is_conj() and is_neg() give up the interpreter's lock. A daemon thread that takes it
    # back while Python ends is unwound through their C++ frames, and that ends the process by
    # std::terminate(). Reading the dispatch keys keeps the lock.
    if _LAZY_VIEWS is None:
        return tensor.is_conj() or tensor.is_neg()
    return bool(_keys_of(tensor).raw_repr() & _LAZY_VIEWS)


def keys_offset() -> int | None:
    """Bytes from an at::TensorImpl's address to its dispatch keys; None where not found."""
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
    """The address of PyTorch's DLPack function from an object to its tensor: the public way, for
    where the layout is not known. None where this torch has none, or another version of it."""
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
    """The dispatch keys that tensors on a "CUDA" device have, and that plain ones may have."""
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
