"""The names that torch keeps private and that this package cannot do without, all in one place.

Looked up once, at import, so that a torch which has moved one says so then, in one plain line.
`tests/ops/test_private.py` runs them on every torch that we have.
"""

from __future__ import annotations

import contextlib
import operator
import threading
from collections.abc import Iterator
from typing import Any

import torch
import torch._functorch.autograd_function
import torch._functorch.pyfunctorch
import torch._functorch.utils  # torch has loaded it already: found by name below
import torch.autograd.forward_ad as forward_ad

from torch_cubin import errors


def _find(name: str) -> Any:
    try:
        return operator.attrgetter(name)(torch)
    except AttributeError:
        missing = errors.fault(
            "internal",
            f"torch {torch.__version__}",
            "lacks a name that autograd needs",
            expected=f"torch.{name}",
            got="nothing",
            advice="Use torch 2.11 or newer, and the newest torch_cubin.",
        )
        raise ImportError(str(missing)) from None


# An autograd.Function that may run at one level of torch.func's transforms, which is what a kernel
# on an Autograd key does. The public Function refuses to.
SingleLevelFunction = _find("autograd.function._SingleLevelFunction")
enable_single_level = _find("_functorch.utils.enable_single_level_autograd_function")
vmap_helper = _find("_functorch.autograd_function.custom_function_call_vmap_helper")
current_interpreter = _find("_functorch.pyfunctorch.retrieve_current_functorch_interpreter")
transforms_active = _find("_C._are_functorch_transforms_active")
is_wrapped = _find("_C._functorch.is_functorch_wrapped_tensor")
below_autograd = _find("_C._AutoDispatchBelowAutograd")
set_forward_grad_enabled = _find("autograd.forward_ad._set_fwd_grad_enabled")
_find("autograd.forward_ad._current_level")
StopRecomputation = _find("utils.checkpoint._StopRecomputationError")

exclude_keys = _find("_C._ExcludeDispatchKeyGuard")
DispatchKey = _find("_C.DispatchKey")
DispatchKeySet = _find("_C.DispatchKeySet")


_AUTOCAST = DispatchKeySet(DispatchKey.AutocastCUDA) | DispatchKeySet(DispatchKey.AutocastCPU)


_local = threading.local()


@contextlib.contextmanager
def without_autocast() -> Iterator[None]:
    """A context in which no op casts its arguments.

    NOTE: inside torch.func's transforms each level further out begins with the dispatch keys of the
    op that entered it, so excluded keys come back there; hence the flag, which our kernels read.
    """
    before = autocast_is_off()
    _local.autocast_is_off = True
    try:
        with exclude_keys(_AUTOCAST):
            yield
    finally:
        _local.autocast_is_off = before


def autocast_is_off() -> bool:
    """Whether this thread is inside :func:`without_autocast`."""
    return getattr(_local, "autocast_is_off", False)


def dual_level_is_open() -> bool:
    """Whether tensors may carry forward-mode tangents now."""
    return forward_ad._current_level >= 0


def refresh_packet(packet: Any) -> None:
    """Lets `torch.ops.ns.name` see an overload that was defined after it was first looked up."""
    refresh = getattr(torch._ops, "_refresh_packet", None)
    if refresh is not None:
        refresh(packet)


def forget_dispatch(overload: Any) -> None:
    """After a kernel is registered on an op that has been called.

    NOTE: torch.compile's Python dispatcher remembers the kernel of each key, and
    torch.library.Library.impl does not tell it: a backward given later would be left out.
    """
    overload._dispatch_cache.clear()


def assume_constant_result(function: Any) -> Any:
    """torch.compiler.assume_constant_result, which would import torch._dynamo: 3 seconds."""
    function._dynamo_marked_constant = True
    return function
