# Registers kernels for aten's operators whose bits may depend on the batch and that are not among
# the products and attentions of aten_kernels.py: softmax, norms, reductions, and products with a
# float32 result. They serve calls under the switch of batch invariance only
# (csrc/ops/common/batch_invariant.h), and are registered when it is first used with install() or
# drop_in(). They are in Python because PyTorch has no C shims for most of the kernels they replace.
"""PyTorch's operators over rows, as install(batch_invariant=True) serves them."""

from __future__ import annotations

import functools
import math
import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from torch_cubin import errors
from torch_cubin._drop_in import report
from torch_cubin._native import library
from torch_cubin._native.locks import fork_safe_lock
from torch_cubin._pytorch import aten_kernels, operators
from torch_cubin._pytorch.dispatch_modes import has_kernel

_ops = torch.ops.cubin
_FLOATS = (torch.float16, torch.bfloat16, torch.float32)
# Numbered as in csrc/kernels/rows/sum_params.h.
_SUM, _SQUARES, _DEVIATIONS = range(3)
# A whole vector is one row, which one block sums; longer ones are sums over a batch.
_LONGEST_VECTOR = 1 << 18
_LONGEST_ROW = 2**31 - 2**20 - 1  # of the kernels: kMostColumns in csrc/ops/rows/kernels.cpp
# Reasons to leave a call to PyTorch. Its kernels are replaced with their checks: calls with wrong
# dims are left to it, so that it raises its errors.
_DIMS = "dims that it does not take"
_LONG = "rows that are too long"
WHOLE_TENSOR = "a sum over all elements, which all of the batch has a part in"
OVER_BATCH = "a sum over dim 0, which all of the batch has a part in"

# A kernel's result, or the reason why PyTorch's kernel is to run.
Served = Any


def _dtype_reason(*tensors: Tensor | None) -> str | None:
    for tensor in tensors:
        if tensor is not None and tensor.dtype not in _FLOATS:
            if tensor.dtype == torch.float64 and tensor.device.type == "cpu":
                continue  # the reference computes it
            return f"dtype {str(tensor.dtype).removeprefix('torch.')}"
    return None


def _is_too_long(x: Tensor, columns: int) -> bool:
    return columns > _LONGEST_ROW and x.device.type != "cpu"


# --- softmax ---


def _along(function: Callable[..., Tensor], dim: int, *inputs: Tensor) -> Served:
    """`function`, which takes rows, along any dim; contiguous as aten's results."""
    rank = max(inputs[0].dim(), 1)
    if not -rank <= dim < rank:
        return _DIMS
    if _is_too_long(inputs[0], inputs[0].shape[dim] if inputs[0].dim() else 1):
        return _LONG
    if dim in (-1, rank - 1):
        return function(*inputs)
    return function(*(each.transpose(dim, -1) for each in inputs)).transpose(dim, -1).contiguous()


def _softmax(log: bool) -> Callable[..., Served]:
    def serve(self: Tensor, dim: int, half_to_float: bool) -> Served:
        dtype = torch.float32 if half_to_float else self.dtype
        return _dtype_reason(self) or _along(lambda x: _ops._softmax(x, log, dtype), dim, self)

    return serve


def _softmax_backward(log: bool) -> Callable[..., Served]:
    def serve(grad_output: Tensor, output: Tensor, dim: int, input_dtype: torch.dtype) -> Served:
        if reason := _dtype_reason(grad_output, output):
            return reason
        if grad_output.dtype != output.dtype or grad_output.shape != output.shape:
            return "a gradient of another dtype or shape"
        backward = functools.partial(_ops._softmax_backward, log=log, dtype=input_dtype)
        return _along(backward, dim, grad_output, output)

    return serve


# --- norms ---


def _norm_reason(
    input: Tensor, normalized_shape: Sequence[int], *weights: Tensor | None
) -> str | None:
    given = [each for each in weights if each is not None]
    if reason := _dtype_reason(input, *given):
        return reason
    wide = torch.float64 if input.dtype == torch.float64 else torch.float32
    if any(each.dtype not in (input.dtype, wide) for each in given):
        return "different dtypes"
    shape = tuple(normalized_shape)
    if not shape or input.shape[-len(shape) :] != shape or any(x.shape != shape for x in given):
        return "shapes that it does not take"
    return _LONG if _is_too_long(input, math.prod(shape)) else None


def _layer_norm(
    input: Tensor,
    normalized_shape: Sequence[int],
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
) -> Served:
    if reason := _norm_reason(input, normalized_shape, weight, bias):
        return reason
    out, _, mean, rstd = _ops._norm(input, None, normalized_shape, weight, bias, eps, True)
    return out, mean, rstd


def _layer_norm_backward(
    grad_out: Tensor,
    input: Tensor,
    normalized_shape: Sequence[int],
    mean: Tensor,
    rstd: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    output_mask: Sequence[bool],
) -> Served:
    if reason := _norm_reason(input, normalized_shape, weight, bias):
        return reason
    bias_dtype = bias.dtype if bias is not None and output_mask[2] else None
    grads = _ops._norm_backward(
        *(grad_out, None, input, mean, rstd, weight, len(normalized_shape), None, True),
        *(output_mask[1] and weight is not None, bias_dtype),
    )
    wanted = (output_mask[0], output_mask[1] and weight is not None, bias_dtype is not None)
    return tuple(grad if each else None for grad, each in zip(grads, wanted, strict=True))


def _rms_norm(
    input: Tensor, normalized_shape: Sequence[int], weight: Tensor | None, eps: float | None
) -> Served:
    if reason := _norm_reason(input, normalized_shape, weight):
        return reason
    out, _, _, rstd = _ops._norm(input, None, normalized_shape, weight, None, eps, False)
    return out, rstd


def _rms_norm_backward(
    grad_out: Tensor,
    input: Tensor,
    normalized_shape: Sequence[int],
    rstd: Tensor,
    weight: Tensor | None,
    output_mask: Sequence[bool],
) -> Served:
    if reason := _norm_reason(input, normalized_shape, weight):
        return reason
    needs_weight = output_mask[1] and weight is not None
    grad_x, grad_weight, _ = _ops._norm_backward(
        *(grad_out, None, input, rstd.new_empty(0), rstd, weight, len(normalized_shape)),
        *(None, False, needs_weight, None),
    )
    return grad_x if output_mask[0] else None, grad_weight if needs_weight else None


# --- reductions ---


def _reduction(input: Tensor, dim: Any, dtype: torch.dtype | None) -> str | tuple[list[int], int]:
    """The dims that are reduced, and their number of elements; or the reason for PyTorch's."""
    if reason := _dtype_reason(input):
        return reason
    if dtype not in (None, input.dtype, torch.float32):
        return "a dtype that the sum would be rounded to"
    return reduced_dims(input, dim)


def reduced_dims(input: Tensor, dim: Any) -> str | tuple[list[int], int]:
    """The same, apart from dtypes."""
    rank = input.dim()
    given = [dim] if isinstance(dim, int) else list(dim or ())
    if rank == 0 or not given:
        return WHOLE_TENSOR
    dims = sorted({each % rank for each in given if -rank <= each < rank})
    if len(dims) < len(given):
        return _DIMS
    if len(dims) == rank and (rank > 1 or input.numel() > _LONGEST_VECTOR):
        return WHOLE_TENSOR
    if dims[0] == 0 and rank > 1:
        return OVER_BATCH
    count = math.prod(input.shape[each] for each in dims)
    return _LONG if _is_too_long(input, count) else (dims, count)


def _sums(
    input: Tensor, dims: list[int], kind: int, divisor: float, keepdim: bool, dtype: torch.dtype
) -> Tensor:
    rows = input
    if dims != [input.dim() - 1]:
        kept = [each for each in range(input.dim()) if each not in dims]
        rows = input.permute(*kept, *dims).flatten(len(kept))
    out: Tensor = _ops._row_sums(rows, kind, divisor, dtype)
    if keepdim:
        out = out.reshape([1 if i in dims else size for i, size in enumerate(input.shape)])
    return out


def _sum_or_mean(divides: bool) -> Callable[..., Served]:
    def serve(
        self: Tensor, dim: Any, keepdim: bool = False, *, dtype: torch.dtype | None = None
    ) -> Served:
        found = _reduction(self, dim, dtype)
        if isinstance(found, str):
            return found
        dims, count = found
        return _sums(self, dims, _SUM, count if divides else 1, keepdim, dtype or self.dtype)

    return serve


def _into(function: Callable[..., Served]) -> Callable[..., Served]:
    """The out= variant."""

    def serve(*args: Any, out: Tensor, dtype: torch.dtype | None = None, **rest: Any) -> Served:
        if (dtype or args[0].dtype) != out.dtype or out.device != args[0].device:
            return "out= of another dtype or device"
        result = function(*args, **rest, dtype=dtype)
        if isinstance(result, str):
            return result
        if out.shape != result.shape:
            if out.numel() > 0:
                return "out= of another shape"
            out.resize_(result.shape)
        return out.copy_(result)

    return serve


def _variance(root: bool, with_mean: bool) -> Callable[..., Served]:
    def serve(
        self: Tensor, dim: Any = None, *, correction: Any = None, keepdim: bool = False
    ) -> Served:
        found = _reduction(self, dim, None)
        if isinstance(found, str):
            return found
        dims, count = found
        divisor = count - (1 if correction is None else correction)
        if count == 0 or divisor <= 0:
            return "no degrees of freedom, of which it warns"
        wide = torch.float64 if self.dtype == torch.float64 else torch.float32
        out = _sums(self, dims, _DEVIATIONS, divisor, keepdim, wide)
        out = (out.sqrt() if root else out).to(self.dtype)
        return (out, _sums(self, dims, _SUM, count, keepdim, self.dtype)) if with_mean else out

    return serve


def _vector_norm(
    self: Tensor,
    ord: Any = 2,
    dim: Any = None,
    keepdim: bool = False,
    *,
    dtype: torch.dtype | None = None,
) -> Served:
    found = _reduction(self, dim, dtype)
    if isinstance(found, str):
        return found
    if ord != 2:
        return "an order other than 2"
    wide = torch.float64 if self.dtype == torch.float64 else torch.float32
    return _sums(self, found[0], _SQUARES, 1, keepdim, wide).sqrt().to(dtype or self.dtype)


# --- products with a float32 result ---


def _product(self: Tensor, mat2: Tensor, out_dtype: torch.dtype) -> Served:
    return _sum_of_products(self.new_zeros((), dtype=out_dtype), self, mat2, out_dtype, beta=0)


def _sum_of_products(
    self: Tensor, a: Tensor, b: Tensor, out_dtype: torch.dtype, *, beta: Any = 1, alpha: Any = 1
) -> Served:
    if out_dtype not in (a.dtype, torch.float32) or a.dtype not in _FLOATS:
        return "a dtype of the result that is not float32"
    if a.dtype != b.dtype or self.dtype not in (a.dtype, out_dtype):
        return "different dtypes"
    return _ops._addmm_dtype(self, a, b, out_dtype, beta=beta, alpha=alpha)


SERVED: dict[str, Callable[..., Served]] = {
    "_softmax": _softmax(False),
    "_log_softmax": _softmax(True),
    "_softmax_backward_data": _softmax_backward(False),
    "_log_softmax_backward_data": _softmax_backward(True),
    "native_layer_norm": _layer_norm,
    "native_layer_norm_backward": _layer_norm_backward,
    "_fused_rms_norm": _rms_norm,
    "_fused_rms_norm_backward": _rms_norm_backward,
    "sum.dim_IntList": _sum_or_mean(False),
    "sum.IntList_out": _into(_sum_or_mean(False)),
    "mean.dim": _sum_or_mean(True),
    "mean.out": _into(_sum_or_mean(True)),
    "var.correction": _variance(False, False),
    "std.correction": _variance(True, False),
    "var_mean.correction": _variance(False, True),
    "std_mean.correction": _variance(True, True),
    "linalg_vector_norm": _vector_norm,
    "mm.dtype": _product,
    "bmm.dtype": _product,
    "addmm.dtype": _sum_of_products,
    "baddbmm.dtype": _sum_of_products,
}


def _embedding_backward(pytorchs: Callable[..., Any]) -> Callable[..., Any]:
    """PyTorch's kernel, called so that it adds in one order under the switch.

    NOTE: for fewer classes than tokens, PyTorch 2.11 adds by atomics where the sums of so few rows
    would leave multiprocessors idle (its EmbeddingBackwardKernel.cu), unless its deterministic
    algorithms are on: of 20,000 tokens of 7 classes, 60 runs on an H200 had 60 results.
    """
    serves = library.load().torch_cubin_serves_invariant

    def kernel(
        grad_output: Tensor, indices: Tensor, num_weights: int, padding_idx: int, by_freq: bool
    ) -> Tensor:
        tokens = indices.numel()
        if tokens <= num_weights or not serves():
            whole: Tensor = pytorchs(grad_output, indices, num_weights, padding_idx, by_freq)
            return whole
        more: Tensor = pytorchs(grad_output, indices, tokens, padding_idx, by_freq)
        return more[:num_weights].clone()

    return kernel


def serves_embeddings() -> bool:
    """Whether the gradient of an embedding has one order of additions in this thread."""
    return torch.are_deterministic_algorithms_enabled() or (
        "CUDA" in _registered and bool(library.load().torch_cubin_serves_invariant())
    )


_lock = fork_safe_lock()
_registered: dict[str, torch.library.Library] = {}  # by dispatch key; guarded by _lock
_counts = threading.local()  # .served: calls of this thread


def register(key: str = "CUDA") -> None:
    """Registers the kernels for a dispatch key, once and permanently, as aten_kernels.py does."""
    with _lock:
        if key in _registered or (key == "CUDA" and not aten_kernels.has_cuda()):
            return
        owner = operators.registry("aten", "IMPL")
        for op, serve in SERVED.items():
            # A kernel beside a composite one would also replace its derivative.
            pytorchs = aten_kernels.own_kernel(op, key) if has_kernel(f"aten::{op}", key) else None
            if pytorchs is not None:
                owner.impl(op, _kernel(f"aten::{op}", serve, pytorchs), key, allow_override=True)
        op = "embedding_dense_backward"
        pytorchs = aten_kernels.own_kernel(op, key) if has_kernel(f"aten::{op}", key) else None
        if pytorchs is not None:
            owner.impl(op, _embedding_backward(pytorchs), key, allow_override=True)
        _registered[key] = owner


def _kernel(
    name: str, serve: Callable[..., Served], pytorchs: Callable[..., Any]
) -> Callable[..., Any]:
    serves = library.load().torch_cubin_serves_invariant

    def kernel(*args: Any, **kwargs: Any) -> Any:
        if not serves():
            return pytorchs(*args, **kwargs)
        try:
            result = serve(*args, **kwargs)
        except RuntimeError as error:
            made = errors.of_text(error)
            if isinstance(made, torch.OutOfMemoryError):  # which programs catch
                raise made from None
            raise
        if isinstance(result, str):
            report.count_declined(name, result)
            return pytorchs(*args, **kwargs)
        _counts.served = calls_served() + 1
        results = result if isinstance(result, tuple) else (result,)
        report.count_served(name, args, next((x for x in results if x is not None), args[0]))
        return result

    return kernel


def calls_served() -> int:
    """The number of calls that these kernels served in this thread."""
    return getattr(_counts, "served", 0)


__all__ = ["SERVED", "calls_served", "register", "serves_embeddings"]
