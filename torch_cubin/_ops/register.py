"""Completes the ops that _C.so defines with the registrations that torch needs from Python."""

from __future__ import annotations

from functools import cache
from types import ModuleType

import torch

from torch_cubin._ops import (
    addmm_into,
    attention_autograd,
    attention_compose,
    attention_e4m3,
    autocast,
    autograd,
    batch_invariant,
    causal_bias,
    cross_entropy,
    expert_rows,
    fake,
    fused,
    fused_autograd,
    grouped,
    kv_cache,
    layouts,
    linear_cross_entropy,
    moe,
    no_derivatives,
    row_rules,
    rows,
    scaled,
    symmetric,
    vmap,
)
from torch_cubin._pytorch.compiler import skip_frames
from torch_cubin._pytorch.imports import when_imported
from torch_cubin._pytorch.transforms import DERIVATIVES


@cache
def register() -> torch.library.Library:
    """Called once per process, after _C.so is loaded. The result owns the registrations."""
    library = torch.library.Library("cubin", "IMPL")
    fake.register(library)
    if DERIVATIVES.available:
        autograd.register(library)
        fused_autograd.register(library)
        attention_autograd.register(library)
    else:
        no_derivatives.register(library)
    attention_compose.register(library)
    autocast.register(library)
    vmap.register(library)
    symmetric.register(library)
    fused.register(library)
    grouped.register(library)
    scaled.register(library)
    moe.register(library)
    expert_rows.register(library)
    rows.register(library)
    cross_entropy.register(library)
    linear_cross_entropy.register(library)
    addmm_into.register(library)
    kv_cache.register(library)
    attention_e4m3.register(library)
    layouts.register(library)
    causal_bias.register()
    _register_late()
    # Frames below an op are never compiled, even if torch.compile gives up on an outer frame.
    skip_frames(
        [
            *(autograd, batch_invariant, cross_entropy, expert_rows, fused_autograd, grouped),
            *(linear_cross_entropy, row_rules, rows, symmetric),
        ]
    )
    return library


def _register_late() -> None:
    """Rules for modules of PyTorch that most processes never import."""

    def flops(counter: ModuleType) -> None:
        from torch_cubin._ops import flops

        flops.register(counter)

    def sharding(module: ModuleType) -> None:
        from torch_cubin._ops import sharding

        sharding.register()

    when_imported("torch.utils.flop_counter", flops)
    when_imported("torch.distributed.tensor", sharding)
