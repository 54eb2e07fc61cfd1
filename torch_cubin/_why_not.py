# The checks that every served function shares: may these tensors go to torch.ops.cubin at all?
# On each call of a model, so each check is one attribute read. Shapes are the handlers' business.
"""Why tensors cannot be served from cubins, as the short reasons that report() shows."""

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch._subclasses.functional_tensor import FunctionalTensor

from torch_cubin import _lib, _private

DEVICES = "tensors on different devices"
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
    if b.dtype is not dtype and not _autocast_joins(dtype, b.dtype, a.device.type):
        return "different dtypes"
    if torch.compiler.is_compiling():
        return _why_not_traced(a, b)
    on_gpu = a.is_cuda
    if not on_gpu and not a.is_cpu:
        return f"device {a.device.type}"
    if b.is_cuda != on_gpu or b.is_cpu == on_gpu or (on_gpu and a.device != b.device):
        return DEVICES
    if a.layout is not torch.strided or b.layout is not torch.strided:
        return f"layout {str(a.layout if a.layout is not torch.strided else b.layout)[6:]}"
    if a.is_nested or b.is_nested:
        return "nested tensor"
    sm = _refused_sm(a.get_device()) if on_gpu else 0
    return f"no kernels for sm_{sm}" if sm else None


def _why_not_traced(a: torch.Tensor, b: torch.Tensor) -> str | None:
    """The rest, in attributes that torch.compile folds: others become operators of its graph.

    Layouts need no look here: torch.compile gives up on sparse and nested tensors by itself.
    """
    device = a.device
    if device.type not in ("cuda", "cpu"):
        return f"device {device.type}"
    if b.device != device:
        return DEVICES
    sm = _refused_sm_traced(device.index) if device.type == "cuda" else 0
    return f"no kernels for sm_{sm}" if sm else None


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


_refused: dict[int, int] = {}


def _refused_sm(index: int) -> int:
    """0, or the sm number of a GPU that no shipped kernel is for; asked once a device.

    Any other trouble (a catalog that cannot be read, a broken driver) is not hidden by going to
    PyTorch: the operator raises its error.
    """
    try:
        return _refused[index]
    except KeyError:
        facts = _lib.device(index)
        refused = facts.get("arch_error", {}).get("tag") == "arch"
        return _refused.setdefault(index, facts["sm"] if refused else 0)


# NOTE: a number, because a string that comes out of such a function cannot be tested in a trace.
_refused_sm_traced = _private.assume_constant_result(_refused_sm)
