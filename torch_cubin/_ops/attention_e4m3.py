"""attention_forward_e4m3, the op behind flash_attention of float8_e4m3fn, and its backward, for
PyTorch: fake kernels, and errors for calls that need a derivative or a batching rule.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from torch_cubin._ops import attention_checks, refusals
from torch_cubin._ops.attention_checks import Options, output_strides
from torch_cubin._ops.raw_ops import E4M3 as NAME
from torch_cubin._ops.raw_ops import E4M3_BACKWARD, raw_names
from torch_cubin._pytorch import operators


def options_of(arguments: dict[str, Any]) -> Options:
    """The keyword arguments of the op as those of attention_forward."""
    return Options(enable_gqa=True, **arguments)


def _fake(query: Tensor, key: Tensor, value: Tensor, **arguments: Any) -> tuple[Tensor, Tensor]:
    shape = attention_checks.check_attention(NAME, query, key, value, options_of(arguments))
    strides = output_strides(query, shape.out)
    out = query.new_empty_strided(shape.out, strides, dtype=torch.bfloat16)
    return out, query.new_empty(shape.logsumexp, dtype=torch.float32)


def _fake_backward(
    grad_out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    logsumexp: Tensor,
    **arguments: Any,
) -> tuple[Tensor, ...]:
    attention_checks.check_attention(
        *(E4M3_BACKWARD, query, key, value, options_of(arguments)),
        grad_out=grad_out,
        out=out,
        logsumexp=logsumexp,
    )
    return tuple(
        x.new_empty_strided(x.shape, output_strides(x, x.shape), dtype=torch.bfloat16)
        for x in (query, key, value)
    )


def register(library: torch.library.Library) -> None:
    for name in raw_names(NAME):
        operators.register_fake(f"cubin::{name}", _fake, library)
    for name in raw_names(E4M3_BACKWARD):
        operators.register_fake(f"cubin::{name}", _fake_backward, library)
    advice = "Call torch_cubin.float8_attention, or it under torch.no_grad(), or use bfloat16."
    refusals.refuse_transforms(library, NAME, advice=advice)
    advice = "Call it under torch.no_grad(), or use bfloat16."
    refusals.refuse_transforms(library, E4M3_BACKWARD, advice=advice)
