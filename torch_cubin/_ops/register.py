"""Completes the ops that _C.so defines with what torch takes from Python alone."""

from __future__ import annotations

from functools import cache

import torch

from torch_cubin._ops import attention_autograd as _attention_autograd
from torch_cubin._ops import attention_compose as _compose
from torch_cubin._ops import autocast as _autocast
from torch_cubin._ops import autograd as _autograd
from torch_cubin._ops import fake as _fake
from torch_cubin._ops import flops as _flops
from torch_cubin._ops import layouts as _layouts
from torch_cubin._ops import vmap as _vmap


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
