"""Completes the ops that _C.so defines with what torch takes from Python alone."""

from __future__ import annotations

from functools import cache

import torch

from torch_cubin import _autocast, _autograd, _fake, _flops, _vmap


@cache
def register() -> torch.library.Library:
    """Once a process, after _C.so is loaded. The library lives as long as its registrations."""
    library = torch.library.Library("cubin", "IMPL")
    _fake.register(library)
    _autograd.register(library)
    _autocast.register(library)
    _vmap.register(library)
    _flops.register()
    return library
