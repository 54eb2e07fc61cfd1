"""flash_attention_with_kvcache for PyTorch: a fake kernel, and errors for transforms that do not
support an op that writes to its caches.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from torch_cubin._ops import attention_checks, checks, mutated, refusals
from torch_cubin._ops.raw_ops import KV_CACHE as NAME
from torch_cubin._ops.raw_ops import raw_names
from torch_cubin._pytorch import operators

_DEFAULTS = {each.name: each.default for each in attention_checks.arguments_of(NAME)}


def _fake(*args: Any, **named: Any) -> Tensor:
    given = {**_DEFAULTS, **dict(zip(_DEFAULTS, args, strict=False)), **named}
    tensors = {name: x for name, x in given.items() if isinstance(x, Tensor)}
    for name, tensor in tensors.items():
        checks.check_dense(NAME, name, tensor)
    mutated.fix_offsets(NAME, [(name, tensors[name]) for name in ("k_cache", "v_cache")])
    options = attention_checks.numbers_of(given, _DEFAULTS)
    described = {name: checks.described(tensor) for name, tensor in tensors.items()}
    checks.ask("attention", {"op": NAME, "tensors": described, "options": options})
    return tensors["q"].new_empty(*tensors["q"].shape[:-1], tensors["v_cache"].shape[-1])


def register(library: torch.library.Library) -> None:
    for name in raw_names(NAME):
        operators.register_fake(f"cubin::{name}", _fake, library)
    reason, advice = ": it writes to its caches", "Call it under torch.no_grad()."
    refusals.refuse_transforms(library, NAME, advice=advice, reason=reason)
