"""Autograd and torch.func: levels, transforms, and calls below autograd."""

from __future__ import annotations

import contextlib
from typing import Any

import torch
import torch.autograd.forward_ad as forward_ad

from torch_cubin._pytorch.internals import Feature

DERIVATIVES = Feature(
    "derivatives of the built-in ops",
    "the ops run, and raise where a derivative is asked for",
)
_SingleLevelFunction: Any = DERIVATIVES.find(
    "autograd.function._SingleLevelFunction", torch.autograd.Function
)


class SingleLevelFunction(_SingleLevelFunction):
    """An autograd.Function that may run at one level of torch.func's transforms, which is what a
    kernel on an Autograd key does. The public Function refuses to."""

    @staticmethod
    def _compiled_autograd_key(ctx: Any) -> tuple[int]:
        """As the public Function's, which compiled autograd asks for."""
        return (ctx._autograd_function_id,)


enable_single_level = DERIVATIVES.find(
    "_functorch.utils.enable_single_level_autograd_function", contextlib.nullcontext
)
set_forward_grad_enabled = DERIVATIVES.find(
    "autograd.forward_ad._set_fwd_grad_enabled", contextlib.nullcontext
)
# Where it cannot be asked, the way that is right inside transforms is taken outside of them too.
transforms_active = DERIVATIVES.find("_C._are_functorch_transforms_active", lambda: True)
_below = DERIVATIVES.find("_C._AutoDispatchBelowAutograd", None)
_found_level = DERIVATIVES.find("autograd.forward_ad._current_level", None) is not None

CHECKPOINTING = Feature(
    "activation checkpointing that stops its recomputation early",
    "backward() through one of the ops in such a region raises RuntimeError",
)


class _NeverRaised(Exception):
    """Stands for an exception that this PyTorch does not have."""


StopRecomputation = CHECKPOINTING.find("utils.checkpoint._StopRecomputationError", _NeverRaised)

VMAP_OF_ATTENTION = Feature(
    "vmap of attention in one call", "vmap runs attention once for each element"
)
vmap_helper = VMAP_OF_ATTENTION.find(
    "_functorch.autograd_function.custom_function_call_vmap_helper", None
)
current_interpreter = VMAP_OF_ATTENTION.find(
    "_functorch.pyfunctorch.retrieve_current_functorch_interpreter", None
)

GRADIENT_COPIES = Feature(
    'copies of incoming gradients for backward="ns::op"',
    "one that begins at no multiple of 16 bytes is refused by the backward op",
)
is_wrapped = GRADIENT_COPIES.find("_C._functorch.is_functorch_wrapped_tensor", lambda tensor: True)

BACKWARD_OF_DECLARED_OPS = Feature(
    "define_op(backward=...) and register_autograd()", "both raise InternalError"
)
BACKWARD_OF_DECLARED_OPS.find("_C._AutoDispatchBelowAutograd", None)


def below_autograd() -> Any:
    """A context in which calls pass by autograd's kernels.

    NOTE: without PyTorch's own it is empty. Nothing that would then call itself is registered: see
    the features above.
    """
    return contextlib.nullcontext() if _below is None else _below()


def dual_level_is_open(*tensors: torch.Tensor) -> bool:
    """Whether tensors may carry forward-mode tangents now; without PyTorch's own counter of
    levels: whether one of these does."""
    if _found_level:
        return forward_ad._current_level >= 0
    return any(forward_ad.unpack_dual(tensor).tangent is not None for tensor in tensors)
