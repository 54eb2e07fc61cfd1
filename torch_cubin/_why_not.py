# The checks that every served function shares: may these tensors go to torch.ops.cubin at all?
# On each call of a model, so each check is one attribute read. Shapes are the handlers' business.
"""Why tensors cannot be served from cubins, as the short reasons that report() shows."""

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch._subclasses.functional_tensor import FunctionalTensor

from torch_cubin import _lib

SHAPES = "shapes that it does not take"  # PyTorch then serves it, or raises its own error

# Any other subclass (DTensor, quantised and nested tensors, a user's own) brings its own meaning.
# The last two are what torch.export and torch.compile trace with: they stand for plain tensors.
_PLAIN = frozenset({torch.Tensor, torch.nn.Parameter, FakeTensor, FunctionalTensor})
_DTYPES = frozenset({torch.float16, torch.bfloat16, torch.float32, torch.float64})
_CAST = _DTYPES - {torch.float64}


def plain(types: tuple[type, ...]) -> bool:
    """Whether none of these types overrides torch functions itself."""
    return all(kind in _PLAIN for kind in types)


def why_not(a: torch.Tensor, b: torch.Tensor) -> str | None:
    """The reason why this pair of tensors goes to PyTorch, or None."""
    if type(a) not in _PLAIN or type(b) not in _PLAIN:
        return _strange(a if type(a) not in _PLAIN else b)
    dtype = a.dtype
    if dtype not in _DTYPES:
        return f"dtype {str(dtype)[6:]}"
    on_gpu = a.is_cuda
    if not on_gpu and not a.is_cpu:
        return f"device {a.device.type}"
    if b.is_cuda != on_gpu or b.is_cpu == on_gpu or (on_gpu and a.device != b.device):
        return "tensors on different devices"
    if b.dtype is not dtype and not _autocast_joins(dtype, b.dtype, a.device.type):
        return "different dtypes"
    if torch.compiler.is_compiling():  # where a layout is always strided, and reading it costs
        return _traced_device(a.device.index) or None if on_gpu else None
    if a.layout is not torch.strided or b.layout is not torch.strided:
        return f"layout {str(a.layout if a.layout is not torch.strided else b.layout)[6:]}"
    if a.is_nested or b.is_nested:
        return "nested tensor"
    return _device(a.get_device()) if on_gpu else None


def why_not_all(a: torch.Tensor, b: torch.Tensor, c: torch.Tensor) -> str | None:
    """As :func:`why_not` for three tensors."""
    return why_not(a, b) or why_not(a, c)


def _autocast_joins(a: torch.dtype, b: torch.dtype, device: str) -> bool:
    """Whether autocast gives both its own dtype; it leaves float64 as it is."""
    return a in _CAST and b in _CAST and torch.is_autocast_enabled(device)


def _strange(value: object) -> str:
    if isinstance(value, torch.Tensor):
        return f"tensor subclass {type(value).__name__}"
    return f"argument of type {type(value).__name__}"


_device_reasons: dict[int, str | None] = {}


def _device(index: int) -> str | None:
    """Whether the shipped kernels run on this GPU at all; asked once a device."""
    try:
        return _device_reasons[index]
    except KeyError:
        facts = _lib.device(index)
        reason = None if facts["arch"] else f"no kernels for sm_{facts['sm']}"
        return _device_reasons.setdefault(index, reason)


@torch.compiler.assume_constant_result
def _traced_device(index: int) -> str:
    return _device(index) or ""
