"""The types of the public ops; written by `python tools/op_stubs.py` from their schemas."""

from collections.abc import Sequence
from typing import overload

from torch import Tensor, dtype

def add_rms_norm(
    input: Tensor,
    residual: Tensor,
    normalized_shape: Sequence[int],
    weight: Tensor | None = None,
    eps: float | None = None,
) -> tuple[Tensor, Tensor]: ...
@overload
def addmm(
    input: Tensor,
    mat1: Tensor,
    mat2: Tensor,
    *,
    beta: float = 1.0,
    alpha: float = 1.0,
) -> Tensor: ...
@overload
def addmm(
    input: Tensor,
    mat1: Tensor,
    mat2: Tensor,
    out_dtype: dtype,
    *,
    beta: float = 1.0,
    alpha: float = 1.0,
) -> Tensor: ...
def addmm_into(
    out: Tensor,
    mat1: Tensor,
    mat2: Tensor,
    *,
    beta: float = 1.0,
    alpha: float = 1.0,
) -> None: ...
def attention_backward(
    grad_out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    logsumexp: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    dropout_seed: Tensor | None = None,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
    window_left: int = -1,
    window_right: int = -1,
    bottom_right: bool = False,
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    sinks: Tensor | None = None,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    max_seqlen_q: int = 0,
    max_seqlen_k: int = 0,
) -> tuple[Tensor, Tensor, Tensor]: ...
def attention_backward_e4m3(
    grad_out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    logsumexp: Tensor,
    *,
    is_causal: bool = False,
    scale: float | None = None,
    window_left: int = -1,
    window_right: int = -1,
    bottom_right: bool = False,
    q_descale: Tensor | None = None,
    k_descale: Tensor | None = None,
    v_descale: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]: ...
def attention_forward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    dropout_seed: Tensor | None = None,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
    window_left: int = -1,
    window_right: int = -1,
    bottom_right: bool = False,
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    sinks: Tensor | None = None,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    max_seqlen_q: int = 0,
    max_seqlen_k: int = 0,
) -> tuple[Tensor, Tensor]: ...
def attention_forward_e4m3(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    is_causal: bool = False,
    scale: float | None = None,
    window_left: int = -1,
    window_right: int = -1,
    bottom_right: bool = False,
    q_descale: Tensor | None = None,
    k_descale: Tensor | None = None,
    v_descale: Tensor | None = None,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    max_seqlen_q: int = 0,
    max_seqlen_k: int = 0,
) -> tuple[Tensor, Tensor]: ...
def cross_entropy(
    input: Tensor,
    target: Tensor,
    weight: Tensor | None = None,
    ignore_index: int = -100,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
) -> Tensor: ...
def flash_attention(
    query: Tensor,
    key: Tensor | None = None,
    value: Tensor | None = None,
    *,
    is_causal: bool = False,
    scale: float | None = None,
    window_left: int = -1,
    window_right: int = -1,
    bottom_right: bool = True,
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    sinks: Tensor | None = None,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    max_seqlen_q: int = 0,
    max_seqlen_k: int = 0,
    dropout_p: float = 0.0,
    q_descale: Tensor | None = None,
    k_descale: Tensor | None = None,
    v_descale: Tensor | None = None,
) -> Tensor: ...
def flash_attention_with_kvcache(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    k: Tensor | None = None,
    v: Tensor | None = None,
    rotary_cos: Tensor | None = None,
    rotary_sin: Tensor | None = None,
    cache_seqlens: Tensor | None = None,
    cache_batch_idx: Tensor | None = None,
    block_table: Tensor | None = None,
    *,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_left: int = -1,
    window_right: int = -1,
    softcap: float = 0.0,
    rotary_interleaved: bool = True,
    alibi_slopes: Tensor | None = None,
    sinks: Tensor | None = None,
    k_descale: Tensor | None = None,
    v_descale: Tensor | None = None,
) -> Tensor: ...
def grouped_matmul(
    mat_a: Tensor,
    mat_b: Tensor,
    *,
    offs: Tensor | None = None,
    bias: Tensor | None = None,
    out_dtype: dtype | None = None,
    scale: Tensor | None = None,
    rows: Tensor | None = None,
    out_rows: Tensor | None = None,
    activation: str = "none",
) -> Tensor: ...
def layer_norm(
    input: Tensor,
    normalized_shape: Sequence[int],
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-05,
) -> Tensor: ...
def linear(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    activation: str = "none",
) -> Tensor: ...
def linear_cross_entropy(
    input: Tensor,
    linear_weight: Tensor,
    target: Tensor,
    *,
    linear_bias: Tensor | None = None,
    weight: Tensor | None = None,
    reduction: str = "mean",
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    dtype: dtype | None = None,
    recompute: bool = False,
) -> Tensor: ...
def log_softmax(
    input: Tensor,
    dim: int,
    dtype: dtype | None = None,
) -> Tensor: ...
def matmul(
    self: Tensor,
    other: Tensor,
) -> Tensor: ...
def quantize(
    x: Tensor,
    recipe: int,
    *,
    transpose: bool = False,
    power_of_two: bool = False,
    gate: str = "none",
    dtype: dtype | None = None,
) -> tuple[Tensor, Tensor]: ...
def rms_norm(
    input: Tensor,
    normalized_shape: Sequence[int],
    weight: Tensor | None = None,
    eps: float | None = None,
) -> Tensor: ...
def scaled_dot_product_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor: ...
def scaled_gated_matmul(
    mat_a: Tensor,
    mat_b: Tensor,
    scale_a: Tensor,
    scale_b: Tensor,
    *,
    gate: str = "silu",
    offs: Tensor | None = None,
    dtype: dtype | None = None,
    mat_up: Tensor | None = None,
    scale_up: Tensor | None = None,
    power_of_two: bool = False,
) -> tuple[Tensor, Tensor]: ...
def scaled_grouped_matmul(
    mat_a: Tensor,
    mat_b: Tensor,
    scale_a: Tensor,
    scale_recipe_a: int,
    scale_b: Tensor,
    scale_recipe_b: int,
    *,
    offs: Tensor,
    output_dtype: dtype | None = None,
    use_fast_accum: bool = False,
) -> Tensor: ...
def scaled_matmul(
    mat_a: Tensor,
    mat_b: Tensor,
    scale_a: Tensor,
    scale_recipe_a: int,
    scale_b: Tensor,
    scale_recipe_b: int,
    *,
    bias: Tensor | None = None,
    output_dtype: dtype | None = None,
    use_fast_accum: bool = False,
) -> Tensor: ...
def softmax(
    input: Tensor,
    dim: int,
    dtype: dtype | None = None,
) -> Tensor: ...
def symm_square(
    a: Tensor,
    c: Tensor | None = None,
    *,
    beta: float = 0.0,
    alpha: float = 1.0,
    out_dtype: dtype | None = None,
) -> Tensor: ...
def syrk(
    x: Tensor,
    c: Tensor | None = None,
    *,
    beta: float = 0.0,
    alpha: float = 1.0,
    out_dtype: dtype | None = None,
) -> Tensor: ...
