"""flash_attention_with_kvcache for PyTorch: a fake kernel, and errors for transforms that do not
support an op that writes to its caches.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from torch_cubin import errors
from torch_cubin._ops import checks, mutated
from torch_cubin._ops.raw_ops import KV_CACHE as NAME
from torch_cubin._ops.raw_ops import raw_names
from torch_cubin._pytorch import transforms

_TENSORS = (
    *("q", "k_cache", "v_cache", "k", "v", "rotary_cos", "rotary_sin", "cache_seqlens"),
    *("cache_batch_idx", "block_table"),
)


def _fake(
    *args: Any,
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
    **named: Any,
) -> Tensor:
    given = {**dict(zip(_TENSORS, args, strict=False)), **named}
    given |= {"alibi_slopes": alibi_slopes, "sinks": sinks}
    given |= {"k_descale": k_descale, "v_descale": v_descale}
    tensors = {name: x for name, x in given.items() if x is not None}
    for name, tensor in tensors.items():
        checks.check_dense(NAME, name, tensor)
    mutated.fix_offsets(NAME, [(name, tensors[name]) for name in ("k_cache", "v_cache")])
    options = {
        "causal": causal,
        "window_left": window_left,
        "window_right": window_right,
        "softcap": str(float(softcap)),
    }
    described = {name: checks.described(tensor) for name, tensor in tensors.items()}
    checks.ask("check_attention", {"op": NAME, "tensors": described, "options": options})
    return tensors["q"].new_empty(*tensors["q"].shape[:-1], tensors["v_cache"].shape[-1])


def _refusal(transform: str, advice: str) -> errors.Error:
    problem = f"has no rule for {transform}: it writes to its caches"
    return checks.fault(NAME, problem, "a call outside of it", "one inside", advice)


def _autograd(*args: Any, **kwargs: Any) -> Tensor:
    """Refuses calls that need a derivative; all others run as without gradients."""
    tensors = [x for x in (*args, *kwargs.values()) if isinstance(x, Tensor)]
    if any(x.requires_grad for x in tensors) or transforms.dual_level_is_open():
        raise _refusal("derivatives", "Call it under torch.no_grad().")
    with transforms.below_autograd():
        return torch.ops.cubin._flash_attention_with_kvcache.default(*args, **kwargs)


def _vmap(*args: Any, **kwargs: Any) -> Tensor:
    raise _refusal("torch.vmap", "Give it the whole batch.")


def register(library: torch.library.Library) -> None:
    for name in raw_names(NAME):
        torch.library.register_fake(f"cubin::{name}", _fake, lib=library)
        library.impl(name, _vmap, "FuncTorchBatched")
    library.impl(f"_{NAME}_autograd", _autograd, "Autograd")
