"""Flop formulas for torch.utils.flop_counter, equal to its formulas for torch's functions.

A FlopCounterMode sees the op that a public op forwards to, not the public op, so the raw op and its
autograd variant have the formula as well; each call is counted once.
"""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from torch_cubin._ops import raw_ops
from torch_cubin._ops.attention_checks import Options
from torch_cubin._pytorch.compiler import TRACING_TYPES


def _matmul_flops(a: Tensor, b: Tensor, *args: Any, out_val: Tensor, **kwargs: Any) -> int:
    flops = 2 * out_val.numel() * a.shape[-1]
    if a.dim() == b.dim() == 1:
        return flops if _is_counted(torch.ops.aten.dot) else 0
    matrices, other = (a, b) if a.dim() >= b.dim() else (b.mT, a)
    if other.dim() == 1 and (b.dim() == 1 or b.dim() > 2) and _is_folded(matrices, other):
        return flops if _is_counted(torch.ops.aten.mv) else 0
    return flops


def _linear_flops(input: Tensor, weight: Tensor, *args: Any, out_val: Tensor, **kwargs: Any) -> int:
    if weight.dim() == 1:
        return _matmul_flops(input, weight, out_val=out_val)
    return 2 * out_val.numel() * input.shape[-1]


def _addmm_flops(
    input: Tensor, mat1: Tensor, mat2: Tensor, *args: Any, out_val: Tensor, **kwargs: Any
) -> int:
    return 2 * out_val.numel() * mat1.shape[-1]


def _symmetric_flops(operand: Tensor, *args: Any, out_val: Tensor, **kwargs: Any) -> int:
    """Of the whole product, as torch counts it."""
    return 2 * out_val.numel() * operand.shape[-1]


def _addmm_into_flops(out: Tensor, mat1: Tensor, *args: Any, **kwargs: Any) -> int:
    return 2 * out.numel() * mat1.shape[-1]


def _linear_cross_entropy_flops(input: Tensor, linear_weight: Tensor, *args: Any, **_: Any) -> int:
    products = 1 + args[-3] + args[-2]  # with the gradients of input and linear_weight
    return 2 * products * input.numel() * linear_weight.shape[0]


def _linear_cross_entropy_backward_flops(
    grad: Tensor, input: Tensor, linear_weight: Tensor, *args: Any, **_: Any
) -> int:
    return _linear_cross_entropy_flops(input, linear_weight, *args)


def _linear_glu_flops(input: Tensor, gate: Tensor, *args: Any, out_val: Any, **kwargs: Any) -> int:
    out = out_val if isinstance(out_val, Tensor) else out_val[0]
    return 4 * out.numel() * input.shape[-1]


def _linears_flops(input: Tensor, *args: Any, out_val: list[Tensor], **kwargs: Any) -> int:
    return sum(2 * out.numel() * input.shape[-1] for out in out_val)


def _linear_aux_flops(input: Tensor, *args: Any, out_val: Any, **kwargs: Any) -> int:
    out = out_val if isinstance(out_val, Tensor) else out_val[0]
    return 2 * out.numel() * input.shape[-1]


def _grouped_flops(mat_a: Tensor, mat_b: Tensor, *args: Any, out_val: Tensor, **kwargs: Any) -> int:
    """As if every row, or every column of K, belonged to a group."""
    if mat_a.dim() == mat_b.dim() == 3:
        return _matmul_flops(mat_a, mat_b, out_val=out_val)
    rows = out_val.shape[0] if mat_b.dim() == 3 else mat_a.shape[-2]
    return 2 * rows * mat_a.shape[-1] * mat_b.shape[-1]


def _scaled_flops(mat_a: Tensor, mat_b: Tensor, *args: Any, **kwargs: Any) -> int:
    numbers = kwargs.get("rows")  # of scaled_grouped_matmul
    rows = mat_a.shape[0] if numbers is None else numbers.shape[0]
    return 2 * rows * mat_a.shape[1] * mat_b.shape[-1]


def _scaled_gated_flops(mat_a: Tensor, mat_b: Tensor, *args: Any, **kwargs: Any) -> int:
    two = kwargs.get("mat_up") is not None
    return (1 + two) * _scaled_flops(mat_a, mat_b)


def _moe_flops(
    x: Tensor,
    topk_ids: Tensor,
    topk_weights: Tensor,
    w13: Tensor,
    w2: Tensor,
    *args: Any,
    **kw: Any,
) -> int:
    """As if every id were an expert's."""
    matrices = w13.shape[1] * w13.shape[2] + w2.shape[1] * w2.shape[2]
    return 2 * topk_ids.numel() * matrices


def _moe_float8_flops(
    x: Tensor,
    topk_ids: Tensor,
    topk_weights: Tensor,
    w13: Tensor,
    w13_scale: Tensor,
    w2: Tensor,
    *args: Any,
    **kw: Any,
) -> int:
    return _moe_flops(x, topk_ids, topk_weights, w13, w2)


def _moe_backward_flops(
    grad: Tensor,
    x: Tensor,
    topk_weights: Tensor,
    w13: Tensor,
    w2: Tensor,
    before: Tensor,
    order: Tensor,
    activation: str,
    interleaved: bool,
    of_x: bool,
    of_w13: bool,
    of_w2: bool,
    *args: Any,
    **kw: Any,
) -> int:
    first, second = (2 * topk_weights.numel() * w.shape[1] * w.shape[2] for w in (w13, w2))
    return first * (of_x + of_w13) + second * (1 + of_w2)


def _weight_gradient_flops(grad: Tensor, input: Tensor, **kwargs: Any) -> int:
    return 2 * grad.numel() * input.shape[1]


def _attention_flops(
    query: Tensor, key: Tensor, value: Tensor, *args: Any, out_val: Any, **kwargs: Any
) -> int:
    options = Options(*args, **kwargs)
    out = out_val if isinstance(out_val, Tensor) else out_val[0]
    # One product with keys, one with values.
    return _scores(query, key, out, options) * 2 * (query.shape[-1] + value.shape[-1])


def _attention_backward_flops(
    grad_out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    logsumexp: Tensor,
    *args: Any,
    out_val: Any,
    **kwargs: Any,
) -> int:
    options = Options(*args, **kwargs)
    # The scores again and what dq and dk come from; the gradient of the scores, and dv.
    return _scores(query, key, out, options) * 2 * (3 * query.shape[-1] + 2 * value.shape[-1])


def _flash_attention_flops(
    query: Tensor,
    key: Tensor | None = None,
    value: Tensor | None = None,
    *,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    max_seqlen_q: int = 0,
    max_seqlen_k: int = 0,
    out_val: Tensor,
    **kwargs: Any,
) -> int:
    """For inference mode, where a mode sees the op itself; elsewhere it sees the inner ops."""
    keys = query if key is None else key
    head_dim, head_dim_v = query.shape[-1], (keys if value is None else value).shape[-1]
    if cu_seqlens_q is None:
        scores = out_val.shape[:-1].numel() * keys.shape[1]
    else:
        rows = _lengths(cu_seqlens_q, max_seqlen_q or query.shape[0])
        offsets = cu_seqlens_q if cu_seqlens_k is None else cu_seqlens_k
        columns = _lengths(offsets, max_seqlen_k or keys.shape[0])
        scores = out_val.shape[-2] * sum(n * m for n, m in zip(rows, columns, strict=True))
    return scores * 2 * (head_dim + head_dim_v)


def _scores(query: Tensor, key: Tensor, out: Tensor, options: Options) -> int:
    """The number of scores. Like torch's formula, it ignores masks and causality."""
    if options.cu_seqlens_q is None or options.cu_seqlens_k is None:
        return out.shape[:-1].numel() * key.shape[-2]
    rows = _lengths(options.cu_seqlens_q, options.max_seqlen_q or query.shape[0])
    columns = _lengths(options.cu_seqlens_k, options.max_seqlen_k or key.shape[0])
    return query.shape[1] * sum(n * m for n, m in zip(rows, columns, strict=True))


def _lengths(offsets: Tensor, longest: int) -> list[int]:
    """The length of each sequence; for offsets without values, the maximum for all."""
    if isinstance(offsets, TRACING_TYPES) or offsets.device.type == "meta":
        return [longest] * (offsets.shape[0] - 1)
    return offsets.diff().tolist()


def _is_folded(matrices: Tensor, vector: Tensor) -> bool:
    """Whether torch.matmul folds it to one mv (should_fold in ATen/native/LinearAlgebra.cpp)."""
    if matrices.dim() == 2 or vector.requires_grad or matrices.numel() == 0:
        return True
    shape, stride = matrices.shape, matrices.stride()
    return all(stride[i] == stride[i + 1] * shape[i + 1] for i in range(matrices.dim() - 2))


def _is_counted(op: Any) -> bool:
    """Whether torch counts the op: not yet mv and dot."""
    return op in sys.modules["torch.utils.flop_counter"].flop_registry


def register(counter: ModuleType) -> None:
    """Registers the formulas when the counter is imported: its module loads Triton, which takes
    0.6 s, and most processes do not count flops."""
    for op, formula in (
        ("matmul", _matmul_flops),
        ("linear", _linear_flops),
        ("linear_activation", _linear_flops),
        ("addmm", _addmm_flops),
        ("addmm_dtype", _addmm_flops),
        *((name, _symmetric_flops) for name in raw_ops.SYMMETRIC),
        (raw_ops.ADDMM_INTO, _addmm_into_flops),
        ("linear_glu", _linear_glu_flops),
        ("linear_glu_aux", _linear_glu_flops),
        ("linears", _linears_flops),
        ("linear_cross_entropy", _linear_cross_entropy_flops),
        ("linear_cross_entropy_backward", _linear_cross_entropy_backward_flops),
        ("linear_activation_aux", _linear_aux_flops),
        ("linear_activation_backward", _linear_aux_flops),
        (raw_ops.GROUPED, _grouped_flops),
        (raw_ops.SCALED, _scaled_flops),
        (raw_ops.SCALED_GROUPED, _scaled_flops),
        (raw_ops.SCALED_GATED, _scaled_gated_flops),
        (raw_ops.MOE, _moe_flops),
        (raw_ops.MOE_FLOAT8, _moe_float8_flops),
        ("scaled_dot_product_attention", _attention_flops),
        ("attention_forward", _attention_flops),
        (raw_ops.E4M3, _attention_flops),
        ("attention_backward", _attention_backward_flops),
        (raw_ops.E4M3_BACKWARD, _attention_backward_flops),
    ):
        targets = [getattr(torch.ops.cubin, name) for name in raw_ops.all_names(op)]
        counter.register_flop_formula(targets, get_raw=True)(formula)
    counter.register_flop_formula(torch.ops.cubin._moe_forward, get_raw=True)(_moe_flops)
    counter.register_flop_formula(torch.ops.cubin._moe_backward, get_raw=True)(_moe_backward_flops)
    counter.register_flop_formula(torch.ops.cubin._weight_and_bias_gradient, get_raw=True)(
        _weight_gradient_flops
    )
    counter.register_flop_formula(torch.ops.cubin.flash_attention, get_raw=True)(
        _flash_attention_flops
    )
