"""Attention for the library `kernels` of Hugging Face's hub (tools/hub.py): the functions of
flash-attn 2 that transformers looks for in a kernel whose repository is an `attn_implementation`.

Arguments, layouts and defaults are flash-attn's; docs/attention.md describes the ops. `s_aux` are
sinks, as in flash-attn 3. Results are deterministic, whatever `deterministic` says.
"""

from __future__ import annotations

import numbers
from typing import Any

import torch
from torch import Tensor

from torch_cubin import errors

_INTS = (numbers.Integral, torch.SymInt)  # numpy's too, and traced ones
_REALS = (numbers.Real, torch.SymInt, torch.SymFloat)


def _options(
    function: str,
    causal: bool,
    window_size: tuple[int, int],
    softcap: float,
    alibi_slopes: Tensor | None,
    s_aux: Tensor | None,
) -> dict[str, Any]:
    pair = window_size if isinstance(window_size, (tuple, list)) else ()
    if len(pair) != 2 or not all(isinstance(x, _INTS) and not isinstance(x, bool) for x in pair):
        raise _wrong(function, "window_size", "two ints", window_size)
    if not isinstance(softcap, _REALS):
        raise _wrong(function, "softcap", "a number", softcap)
    left, right = window_size
    return {
        "window_left": left,
        "window_right": -1 if causal else right,  # causal hides all to the right
        "softcap": softcap,
        "alibi_slopes": alibi_slopes,
        "sinks": None if s_aux is None else s_aux.float(),
    }


def _wrong(function: str, argument: str, expected: str, value: object) -> errors.Error:
    got = f"a tensor of {list(value.shape)}" if isinstance(value, Tensor) else repr(value)
    return errors.fault(
        "input", f"{function} argument '{argument}'", "is not supported",
        expected=expected, got=got,
    )  # fmt: skip


def _refuse(function: str, default: object, **arguments: object) -> None:
    """Raises for the first argument that is not its default. Flags that are false otherwise count
    as False: None, or NumPy's."""
    for name, value in arguments.items():
        if value is not default and (default is None or value):
            raise _wrong(function, name, repr(default), value)


def flash_attn_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    s_aux: Tensor | None = None,
) -> Tensor:
    """Attention of (batch, rows, heads, head_dim)."""
    _refuse("flash_attn_func", False, return_attn_probs=return_attn_probs)
    options = _options("flash_attn_func", causal, window_size, softcap, alibi_slopes, s_aux)
    options |= {"is_causal": causal, "scale": softmax_scale, "dropout_p": dropout_p}
    out: Tensor = torch.ops.cubin.flash_attention(q, k, v, **options)
    return out


def flash_attn_varlen_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int | Tensor,
    max_seqlen_k: int | Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    block_table: Tensor | None = None,
    s_aux: Tensor | None = None,
) -> Tensor:
    """Attention of packed sequences: (rows of all sequences, heads, head_dim)."""
    _refuse("flash_attn_varlen_func", False, return_attn_probs=return_attn_probs)
    _refuse("flash_attn_varlen_func", None, block_table=block_table)
    options = _options("flash_attn_varlen_func", causal, window_size, softcap, alibi_slopes, s_aux)
    options |= {"is_causal": causal, "scale": softmax_scale, "dropout_p": dropout_p}
    max_q, max_k = (x.item() if isinstance(x, Tensor) else x for x in (max_seqlen_q, max_seqlen_k))
    options |= {"max_seqlen_q": max_q, "max_seqlen_k": max_k}
    options |= {"cu_seqlens_q": cu_seqlens_q, "cu_seqlens_k": cu_seqlens_k}
    out: Tensor = torch.ops.cubin.flash_attention(q, k, v, **options)
    return out


def flash_attn_with_kvcache(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    k: Tensor | None = None,
    v: Tensor | None = None,
    rotary_cos: Tensor | None = None,
    rotary_sin: Tensor | None = None,
    cache_seqlens: int | Tensor | None = None,
    cache_batch_idx: Tensor | None = None,
    cache_leftpad: Tensor | None = None,
    block_table: Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    rotary_interleaved: bool = True,
    alibi_slopes: Tensor | None = None,
    num_splits: int = 0,
    return_softmax_lse: bool = False,
    s_aux: Tensor | None = None,
) -> Tensor:
    """Attention over a cache of keys and values, paged with `block_table`, to which `k` and `v` are
    written first."""
    _refuse("flash_attn_with_kvcache", None, cache_leftpad=cache_leftpad)
    _refuse("flash_attn_with_kvcache", False, return_softmax_lse=return_softmax_lse)
    if isinstance(cache_seqlens, int):
        cache_seqlens = torch.full((len(q),), cache_seqlens, dtype=torch.int32, device=q.device)
    out: Tensor = torch.ops.cubin.flash_attention_with_kvcache(
        *(q, k_cache, v_cache, k, v, rotary_cos, rotary_sin),
        *(cache_seqlens, cache_batch_idx, block_table),
        softmax_scale=softmax_scale,
        causal=causal,
        rotary_interleaved=rotary_interleaved,
        **_options("flash_attn_with_kvcache", causal, window_size, softcap, alibi_slopes, s_aux),
    )
    return out


__all__ = ["flash_attn_func", "flash_attn_varlen_func", "flash_attn_with_kvcache"]
