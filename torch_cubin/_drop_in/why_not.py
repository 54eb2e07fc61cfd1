# The checks that all served functions share: can these tensors be passed to torch.ops.cubin at all?
# They run on each call of a model, so each check is one attribute read. The handlers check shapes.
"""Why tensors cannot be served from cubins, as the short reasons that report() shows."""

import torch

from torch_cubin import errors
from torch_cubin._native import library
from torch_cubin._ops.checks import MAX_DIMS
from torch_cubin._pytorch.compiler import TRACING_TYPES, assume_constant_result

SHAPES = "shapes that it does not take"  # PyTorch then serves it, or raises its own error

# Any other subclass (DTensor, quantised and nested tensors, a user's own) may change the semantics.
PLAIN = frozenset({torch.Tensor, torch.nn.Parameter, *TRACING_TYPES})
_DTYPES = frozenset({torch.float16, torch.bfloat16, torch.float32, torch.float64})
_EIGHT_BIT = frozenset({torch.float8_e4m3fn, torch.float8_e5m2})
_CAST = _DTYPES - {torch.float64}
_TOO_MANY_DIMS = f"more than {MAX_DIMS} dimensions"


def plain(types: tuple[type, ...]) -> bool:
    """Whether none of these types overrides torch functions itself."""
    return all(kind in PLAIN for kind in types)


def unlike(rest: tuple[object, ...], out: object, others: dict[str, object]) -> str | None:
    """The reason not to serve a call with arguments that its handler does not name."""
    if out is not None:
        return "out= was given"
    if others:
        return f"argument {next(iter(others))}"
    return "more arguments than it takes" if rest else None


def why_not(a: torch.Tensor, b: torch.Tensor) -> str | None:
    """The reason why this pair of tensors is left to PyTorch, or None."""
    if type(a) not in PLAIN:
        return _strange(a)
    if a.dtype not in _DTYPES:
        return f"dtype {str(a.dtype)[6:]}"
    if a.dim() > MAX_DIMS:
        return _TOO_MANY_DIMS
    reason = _where_traced(a) if torch.compiler.is_compiling() else _where(a)
    return reason or why_not_with(a, b)


def why_not_8_bit(
    a: torch.Tensor,
    b: torch.Tensor,
    scale_a: torch.Tensor,
    scale_b: torch.Tensor,
    beside: torch.Tensor | None,
    dims: tuple[int, int] = (2, 2),
) -> str | None:
    """The same for operands of 8-bit floats, their scales, and a bias or the ends of groups; the
    kernels are Hopper's."""
    for tensor, dim in zip((a, b), dims, strict=True):
        if type(tensor) not in PLAIN:
            return _strange(tensor)
        if tensor.dtype not in _EIGHT_BIT:
            return f"dtype {str(tensor.dtype)[6:]}"
        if tensor.dim() != dim:
            return SHAPES
    if a.dtype is b.dtype is torch.float8_e5m2:
        return "two operands of float8_e5m2"
    reason = _where_traced(a) if torch.compiler.is_compiling() else _where(a)
    others = (b, scale_a, scale_b, *(() if beside is None else (beside,)))
    for other in others:
        reason = reason or (_why_not_beside(a, other) if type(other) in PLAIN else _strange(other))
    if reason is None and not scale_a.dtype is scale_b.dtype is torch.float32:
        return "scales that are not float32"
    if reason is None and a.is_cuda and not _is_hopper(a.get_device()):
        return "a GPU that is not Hopper"
    # PyTorch's result then has a gradient that raises; ours would raise here.
    if reason is None and torch.is_grad_enabled() and any(x.requires_grad for x in (a, *others)):
        return "arguments that require grad"
    return reason


def why_not_with(a: torch.Tensor, b: torch.Tensor) -> str | None:
    """The same for another tensor together with `a`, which has passed the checks."""
    if type(b) not in PLAIN:
        return _strange(b)
    if b.dtype is not a.dtype and not _autocast_joins(a.dtype, b.dtype, a.device.type):
        return "different dtypes"
    return _why_not_beside(a, b)


def why_no_mask(query: torch.Tensor, mask: torch.Tensor) -> str | None:
    """The same for an attention mask together with the query: bool and float32 work with every
    dtype."""
    if type(mask) in PLAIN and mask.dtype in (torch.bool, torch.float32):
        return _why_not_beside(query, mask)
    return why_not_with(query, mask)


def _why_not_beside(a: torch.Tensor, b: torch.Tensor) -> str | None:
    if b.device != a.device:
        return "tensors on different devices"
    if b.dim() > MAX_DIMS:
        return _TOO_MANY_DIMS
    if torch.compiler.is_compiling() or (b.layout is torch.strided and not b.is_nested):
        return None
    return _laid_out(b)


def _where(a: torch.Tensor) -> str | None:
    """The reason why its device or layout is not served, or None."""
    if a.layout is not torch.strided or a.is_nested:
        return _laid_out(a)
    if a.is_cuda:
        sm = _refused_sm(a.get_device())
        return f"no kernels for sm_{sm}" if sm else None
    return None if a.is_cpu else f"device {a.device.type}"


def _where_traced(a: torch.Tensor) -> str | None:
    """The same as _where(), using only attributes that torch.compile folds: others would become
    part of its graph.

    Layouts need no check here: torch.compile itself refuses sparse and nested tensors.
    """
    device = a.device
    if device.type not in ("cuda", "cpu"):
        return f"device {device.type}"
    sm = _refused_sm_traced(device.index) if device.type == "cuda" else 0
    return f"no kernels for sm_{sm}" if sm else None


def _laid_out(tensor: torch.Tensor) -> str:
    return "nested tensor" if tensor.is_nested else f"layout {str(tensor.layout)[6:]}"


def _autocast_joins(a: torch.dtype, b: torch.dtype, device: str) -> bool:
    """Whether autocast converts both to its own dtype; it does not convert float64."""
    return a in _CAST and b in _CAST and torch.is_autocast_enabled(device)


def _strange(value: object) -> str:
    if isinstance(value, torch.Tensor):
        return f"tensor subclass {type(value).__name__}"
    return f"argument of type {type(value).__name__}"


_refused: dict[int, int] = {}


def _refused_sm(index: int) -> int:
    """0, or the sm number of a GPU for which no kernel ships; looked up once for each device.

    Other failures (a catalog that cannot be read, a broken driver) are not hidden by leaving the
    call to PyTorch: the operator raises its error. For fake tensors it raises none, because this
    machine may not have their device.
    """
    try:
        return _refused[index]
    except KeyError:
        pass
    try:
        facts = library.device(index)
    except errors.Error:
        return 0
    refused = facts.get("arch_error", {}).get("tag") == "arch"
    return _refused.setdefault(index, facts["sm"] if refused else 0)


@assume_constant_result
def _is_hopper(index: int) -> bool:
    return torch.cuda.get_device_capability(index)[0] == 9


# NOTE: a number, because a string returned by such a function cannot be tested in a trace.
_refused_sm_traced = assume_constant_result(_refused_sm)
