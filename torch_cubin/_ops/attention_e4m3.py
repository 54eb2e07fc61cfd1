"""attention_forward_e4m3, the op behind flash_attention of float8_e4m3fn, for PyTorch: a fake
kernel, and errors for calls that need a derivative or a batching rule.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from torch_cubin import errors
from torch_cubin._ops import attention_checks, checks
from torch_cubin._ops.attention_checks import Options, output_strides
from torch_cubin._ops.raw_ops import E4M3 as NAME
from torch_cubin._ops.raw_ops import raw_names
from torch_cubin._pytorch import transforms


def options_of(arguments: dict[str, Any]) -> Options:
    """The keyword arguments of the op as those of attention_forward."""
    return Options(enable_gqa=True, **arguments)


def _fake(query: Tensor, key: Tensor, value: Tensor, **arguments: Any) -> tuple[Tensor, Tensor]:
    shape = attention_checks.check_attention(NAME, query, key, value, options_of(arguments))
    strides = output_strides(query, shape.out)
    out = query.new_empty_strided(shape.out, strides, dtype=torch.bfloat16)
    return out, query.new_empty(shape.logsumexp, dtype=torch.float32)


def _refusal(transform: str, advice: str) -> errors.Error:
    problem = f"has no rule for {transform}"
    return checks.fault(NAME, problem, "a call outside of it", "one inside", advice)


def _autograd(*args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
    """Refuses calls that need a derivative; all others run as without gradients."""
    tensors = [x for x in (*args, *kwargs.values()) if isinstance(x, Tensor)]
    if any(x.requires_grad for x in tensors) or transforms.dual_level_is_open():
        raise _refusal("derivatives", "Call it under torch.no_grad(), or convert to bfloat16.")
    with transforms.below_autograd():
        return torch.ops.cubin._attention_forward_e4m3.default(*args, **kwargs)


def _vmap(*args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
    raise _refusal("torch.vmap", "Give it the whole batch.")


def register(library: torch.library.Library) -> None:
    for name in raw_names(NAME):
        torch.library.register_fake(f"cubin::{name}", _fake, lib=library)
        library.impl(name, _vmap, "FuncTorchBatched")
    library.impl(f"_{NAME}_autograd", _autograd, "Autograd")
