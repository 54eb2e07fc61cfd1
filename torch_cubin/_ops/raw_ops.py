"""Names of the ops that csrc/ops_<family>.cpp define, for which the rules here are registered.

Most have a public op, e.g. `cubin::matmul`, which forwards to the raw op `cubin::_matmul` or, with
gradients enabled, to its autograd variant `cubin::_matmul_autograd`.
"""

from __future__ import annotations

from typing import Any

import torch

PRODUCTS = ("matmul", "linear", "linear_activation", "addmm", "addmm_dtype")
SYMMETRIC = ("syrk", "symm_square")
ADDMM_INTO = "addmm_into"
FUSED = (  # for graphs, with their own derivatives (fused_autograd.py)
    *("linear_glu", "linear_glu_aux", "linears"),
    *("linear_activation_aux", "linear_activation_backward"),
)
# Of those, what graphs call by an overload that never has a derivative.
BELOW_AUTOGRAD = ("linear_glu_aux", "linears", "linear_activation_aux")
ATTENTION = ("scaled_dot_product_attention", "attention_forward", "attention_backward")
E4M3 = "attention_forward_e4m3"  # called by flash_attention of float8_e4m3fn
E4M3_BACKWARD = "attention_backward_e4m3"  # called by torch_cubin.float8_attention
GROUPED = "grouped_matmul"
SCALED, QUANTIZE = "scaled_matmul", "quantize"
SCALED_GROUPED, SCALED_GATED = "scaled_grouped_matmul", "scaled_gated_matmul"
MOE, MOE_FLOAT8 = "moe", "moe_float8"  # called by torch_cubin.moe
EXPERTS = ("expert_rows", "expert_sum")  # parts of layers that are differentiated
KV_CACHE = "flash_attention_with_kvcache"
FLOAT8 = (
    E4M3,
    E4M3_BACKWARD,
    SCALED,
    SCALED_GROUPED,
    SCALED_GATED,
    QUANTIZE,
    MOE_FLOAT8,
)  # autocast does not cast their arguments
ALL = (
    *(*PRODUCTS, *SYMMETRIC, ADDMM_INTO, *FUSED, GROUPED, SCALED, SCALED_GROUPED, SCALED_GATED),
    QUANTIZE,
    *(MOE, MOE_FLOAT8, *EXPERTS, *ATTENTION, E4M3, E4M3_BACKWARD, KV_CACHE),
)
# Parts of the public ops in rows.py, cross_entropy.py and linear_cross_entropy.py, which have all
# of their rules.
ROWS = (
    *("norm", "norm_backward", "softmax", "softmax_backward"),
    *("cross_entropy", "cross_entropy_backward"),
    *("linear_cross_entropy", "linear_cross_entropy_backward"),
)
# Parts of cubin::linear and cubin::addmm, and ops that Python functions call.
_WITHOUT_PUBLIC_OP = (
    *("linear_activation", "addmm_dtype", *FUSED, MOE, MOE_FLOAT8, *EXPERTS),
    "linear_cross_entropy_backward",
)
# attention_forward has the derivative of scaled_dot_product_attention.
_WITHOUT_AUTOGRAD = ("scaled_dot_product_attention", *FUSED)
# Autograd variants with formulas; those of FLOAT8, KV_CACHE and ADDMM_INTO refuse to be
# differentiated.
DIFFERENTIABLE = tuple(
    name
    for name in (*PRODUCTS, *SYMMETRIC, GROUPED, MOE, *EXPERTS, *ATTENTION, *ROWS)
    if name not in _WITHOUT_AUTOGRAD
)


def raw_names(name: str) -> list[str]:
    """For "matmul": "_matmul" and "_matmul_autograd"."""
    return [f"_{name}"] if name in _WITHOUT_AUTOGRAD else [f"_{name}", f"_{name}_autograd"]


def has_public_op(name: str) -> bool:
    return name not in _WITHOUT_PUBLIC_OP


def all_names(name: str) -> list[str]:
    """raw_names(), after the public op if there is one."""
    return [*([name] if has_public_op(name) else []), *raw_names(name)]


def below_autograd(name: str) -> Any:
    """The overload of BELOW_AUTOGRAD, else the raw op."""
    op = getattr(torch.ops.cubin, f"_{name}")
    return op.below_autograd if name in BELOW_AUTOGRAD else op.default


def overload(name: str) -> Any:
    """torch.ops.cubin.<name>.default"""
    return getattr(torch.ops.cubin, name).default
