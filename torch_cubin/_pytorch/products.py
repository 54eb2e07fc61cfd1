"""PyTorch's products and attention that no op of ours replaces: drop_in() reports them as left to
PyTorch.

Private names among them are not registered as a feature: if a PyTorch lacks one, it cannot call it.
"""

from __future__ import annotations

import contextlib
from types import ModuleType
from typing import Any

import torch
import torch.nn.functional as F

from torch_cubin._pytorch.imports import when_imported

_OWNERS = (
    ("torch", torch),
    ("torch.nn.functional", F),
    ("torch.linalg", torch.linalg),
    ("torch.sparse", torch.sparse),
    ("Tensor", torch.Tensor),
)
# Looked up by name in each of these. Served functions are also in _drop_in/served.py, which is
# checked first.
_NAMES = (
    # grouped and scaled
    *("grouped_mm", "scaled_mm", "scaled_grouped_mm", "linear_cross_entropy"),
    *("_grouped_mm", "_scaled_mm", "_scaled_mm_v2", "_scaled_grouped_mm", "_scaled_grouped_mm_v2"),
    *("_foreach_mm", "_addmm_activation"),
    # integers and packed weights
    *("_int_mm", "_weight_int8pack_mm", "_weight_int4pack_mm", "_weight_int4pack_mm_for_cpu"),
    *("_weight_int4pack_mm_with_scales_and_zeros", "_dyn_quant_matmul_4bit"),
    *("_mixed_dtypes_linear", "_wrapped_quantized_linear_prepacked"),
    *("fbgemm_linear_fp16_weight", "fbgemm_linear_fp16_weight_fp32_activation"),
    *("fbgemm_linear_int8_weight", "fbgemm_linear_int8_weight_fp32_activation"),
    # sparse matrices
    *("_sparse_mm", "_sparse_addmm", "_sparse_sparse_matmul", "sparse_sampled_addmm"),
    *("_sparse_semi_structured_mm", "_sparse_semi_structured_addmm", "_cslt_sparse_mm"),
    *("_sparse_semi_structured_linear", "sampled_addmm", "smm", "sspaddmm", "hspmm", "saddmm"),
    *("spmm", "dsmm", "hsmm"),
    # several operands
    *("chain_matmul", "multi_dot", "tensordot", "bilinear", "_trilinear"),
    *("matrix_power", "matrix_exp", "cov", "corrcoef", "cdist", "vecdot"),
    *("linalg_multi_dot", "linalg_matrix_power", "linalg_matrix_exp", "linalg_vecdot"),
    *("linalg_matmul", "_cdist_forward", "_euclidean_dist"),
    # recurrent layers
    *("lstm", "gru", "rnn_tanh", "rnn_relu", "_cudnn_rnn", "mkldnn_rnn_layer"),
    *("lstm_cell", "gru_cell", "rnn_tanh_cell", "rnn_relu_cell"),
    *("_thnn_fused_lstm_cell", "_thnn_fused_gru_cell"),
    # attention
    *("_scaled_dot_product_attention_math", "_scaled_dot_product_flash_attention"),
    *("_scaled_dot_product_flash_attention_for_cpu", "_scaled_dot_product_efficient_attention"),
    *("_scaled_dot_product_cudnn_attention", "_triton_scaled_dot_attention"),
    *("_scaled_dot_product_fused_attention_overrideable", "_triton_multi_head_attention"),
    *("_flash_attention_forward", "_efficient_attention_forward", "_cudnn_attention_forward"),
    *("_flash_attention_forward_no_dropout_inplace",),
    # served when called as functions
    *("mm", "mv", "bmm", "dot", "vdot", "inner", "matmul", "linear", "einsum"),
    *("addmm", "addmv", "addbmm", "baddbmm", "addmm_", "addmv_", "addbmm_", "baddbmm_"),
    "scaled_dot_product_attention",
)
# Whole layers; calls of them as functions are listed by modes.fused_layers.
_LAYERS = ("_native_multi_head_attention", "_transformer_encoder_layer_fwd")


def functions() -> dict[Any, str]:
    """Maps what a torch-function mode receives for them to their names in report()."""
    found: dict[Any, str] = {}
    for name in _NAMES:
        for label, owner in _OWNERS:
            function = getattr(owner, name, None)
            if function is not None:
                found.setdefault(function, f"{label}.{name}")
    # torch.nn.attention.flex_attention calls this operator, compiled or not; torch imports it.
    with contextlib.suppress(ImportError):
        from torch._higher_order_ops.flex_attention import flex_attention

        found[flex_attention] = "torch.nn.attention.flex_attention.flex_attention"
    return found


def operators() -> dict[Any, str]:
    """The same for direct calls of torch.ops.aten: the operators and all of their overloads."""
    found: dict[Any, str] = {}
    for name in (*_NAMES, *_LAYERS):
        packet = getattr(torch.ops.aten, name, None)
        if packet is not None:
            overloads = [getattr(packet, overload) for overload in packet.overloads()]
            found.update(dict.fromkeys((packet, *overloads), f"torch.ops.aten.{name}"))
    return found


def _show_to_modes(dynamo: ModuleType) -> None:
    """torch.compile passes a mode only the functions that PyTorch lists as overridable. This adds
    the others that a mode receives in eager code, so that report() lists them in compiled code
    too."""
    find = getattr(dynamo, "get_overridable_functions", None)
    listed = find() if find is not None else None
    if isinstance(listed, set):  # the set that PyTorch caches
        listed.update(functions())


def register() -> None:
    when_imported("torch._dynamo.variables.torch", _show_to_modes)
