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
    """An autograd.Function that may run at one level of torch.func's transforms, as a kernel on an
    Autograd key must. The public Function refuses that."""

    @staticmethod
    def _compiled_autograd_key(ctx: Any) -> tuple[int]:
        """Compiled autograd calls this; same as the public Function's."""
        return (ctx._autograd_function_id,)


enable_single_level = DERIVATIVES.find(
    "_functorch.utils.enable_single_level_autograd_function", contextlib.nullcontext
)
set_forward_grad_enabled = DERIVATIVES.find(
    "autograd.forward_ad._set_fwd_grad_enabled", contextlib.nullcontext
)
is_forward_grad_enabled = DERIVATIVES.find("_C._is_fwd_grad_enabled", lambda: True)
# If the state is unknown, always use the path that is correct inside transforms.
transforms_active = DERIVATIVES.find("_C._are_functorch_transforms_active", lambda: True)
_below = DERIVATIVES.find("_C._AutoDispatchBelowAutograd", None)
_found_level = DERIVATIVES.find("autograd.forward_ad._current_level", None) is not None

CHECKPOINTING = Feature(
    "activation checkpointing that stops its recomputation early",
    "backward() through one of the ops in such a region raises RuntimeError",
)


class _NeverRaised(Exception):
    """Stand-in for an exception type that this PyTorch lacks."""


StopRecomputation = CHECKPOINTING.find("utils.checkpoint._StopRecomputationError", _NeverRaised)

SELECTIVE_CHECKPOINTING = Feature(
    "selective checkpointing of regions that end with a composed op",
    "backward() through grouped_matmul with options at the end of such a region raises",
)
# Selective checkpointing is a mode, which gives each result once.
without_modes = SELECTIVE_CHECKPOINTING.find(
    "utils._python_dispatch._disable_current_modes", contextlib.nullcontext
)

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
_is_of_transform = GRADIENT_COPIES.find(
    "_C._functorch.is_functorch_wrapped_tensor", lambda tensor: True
)
_is_of_batched_grads = GRADIENT_COPIES.find(
    "_C._functorch.is_legacy_batchedtensor", lambda tensor: True
)

BACKWARD_OF_DECLARED_OPS = Feature(
    "define_op(backward=...) and register_autograd()", "both raise InternalError"
)
BACKWARD_OF_DECLARED_OPS.find("_C._AutoDispatchBelowAutograd", None)


def is_wrapped(tensor: torch.Tensor) -> bool:
    """Whether it is a tensor without memory of its own, of a transform or of
    torch.autograd.grad(is_grads_batched=True), which transforms_active() does not see."""
    return bool(_is_of_transform(tensor) or _is_of_batched_grads(tensor))


def below_autograd() -> Any:
    """A context in which calls skip autograd's kernels.

    NOTE: it does nothing if PyTorch's own is missing. Kernels that would then recurse are not
    registered: see the features above.
    """
    return contextlib.nullcontext() if _below is None else _below()


def dual_level_is_open(*tensors: torch.Tensor) -> bool:
    """Whether a forward-AD level is open; without PyTorch's level counter: whether one of these
    tensors has a tangent."""
    if _found_level:
        return forward_ad._current_level >= 0
    return any(forward_ad.unpack_dual(tensor).tangent is not None for tensor in tensors)
