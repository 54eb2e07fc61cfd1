"""Completes the ops that _C.so defines with what torch takes from Python alone."""

from __future__ import annotations

from functools import cache

import torch

from torch_cubin import (
    _attention_autograd,
    _autocast,
    _autograd,
    _compose,
    _fake,
    _flops,
    _layouts,
    _vmap,
)


@cache
def register() -> torch.library.Library:
    """Once a process, after _C.so is loaded. The library lives as long as its registrations."""
    library = torch.library.Library("cubin", "IMPL")
    _fake.register(library)
    _autograd.register(library)
    _attention_autograd.register(library)
    _compose.register(library)
    _autocast.register(library)
    _vmap.register(library)
    _layouts.register(library)
    _flops.register()
    return library
