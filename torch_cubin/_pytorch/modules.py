# A call of a module may run more than the forward that its class was written with. Who computes a
# layer by another function asks here first.
"""Whether a call of an nn.Module is a call of its class's own forward."""

from __future__ import annotations

import sys
from typing import Any

import torch.nn.functional as F
from torch import nn

from torch_cubin._pytorch.compiler import assume_constant_result
from torch_cubin._pytorch.internals import Feature

HOOKS = Feature(
    "layers that models write out", "gated layers of transformers and of the hub are two products"
)
_global_hooks = HOOKS.find("nn.modules.module._has_any_global_hook", lambda: True)
_LINEAR = HOOKS.find("_C._nn.linear", None)


def is_plain(module: nn.Module) -> bool:
    """No hook, of the module or of all, and no other forward, by which adapters, quantisation,
    offloading and tools for measuring change a layer."""
    hooks = module._forward_pre_hooks or module._forward_hooks
    hooks = hooks or module._backward_pre_hooks or module._backward_hooks or _global_hooks()
    return not hooks and "forward" not in vars(module) and _has_first_forward(type(module))


@assume_constant_result
def _has_first_forward(kind: type) -> bool:
    """Whether nobody has replaced the class's forward."""
    forward: Any = getattr(kind, "forward", None)
    namespace = getattr(sys.modules.get(kind.__module__), "__dict__", None)
    return namespace is not None and getattr(forward, "__globals__", None) is namespace


def is_product(layer: object) -> bool:
    """Whether a call of the layer only multiplies by its weight."""
    if type(layer) is not nn.Linear or layer.bias is not None:
        return False
    return F.linear is _LINEAR and is_plain(layer)


__all__ = ["is_plain", "is_product"]
