# Disables PyTorch's fused inference path of nn.MultiheadAttention and nn.TransformerEncoderLayer in
# threads that are inside drop_in(), because no mode can intercept its products. Other threads are
# not affected. Nested tensors are left to PyTorch, because these layers only accept them on that
# path.
"""A per-thread switch for PyTorch's fused attention layers."""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.backends import mha

from torch_cubin._drop_in import report
from torch_cubin._pytorch import modes as pytorch_modes

# The classes of the modes that serve; scope.py adds its own. (A tuple: torch.compile reads it.)
_serving: tuple[type, ...] = ()


def serves(kind: type) -> None:
    """Disables the fused path, from now on, in threads that have entered a mode of this class."""
    global _serving
    _serving = (*_serving, kind)


def mode_serves() -> bool:
    """Whether a mode that serves is on in this thread."""
    return any(isinstance(mode, _serving) for mode in pytorch_modes.function_modes())


def _get_fastpath_enabled() -> bool:
    """Replaces PyTorch's function of this name; returns False in a thread that is inside drop_in().

    In eager code any mode disables the fused path, but torch.compile takes it regardless. PyTorch's
    own switch is global: setting it for one thread would break nested tensors in another.
    """
    if not torch.jit.is_scripting():
        return pytorch_modes.fast_path_is_on() and not mode_serves()
    return True


def _given_nested(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    return any(isinstance(x, torch.Tensor) and x.is_nested for x in (*args, *kwargs.values()))


def _without_serving(modes: list[Any], call: Callable[..., Any]) -> object:
    """Runs the call without those of this thread's modes that serve."""
    for _ in modes:
        pytorch_modes.pop_mode()
    try:
        others = [mode for mode in modes if not isinstance(mode, _serving)]
        for mode in others:
            pytorch_modes.push_mode(mode)
        try:
            return call()
        finally:
            for _ in others:
                pytorch_modes.pop_mode()
    finally:
        for mode in modes:
            pytorch_modes.push_mode(mode)


def _call_of(name: str) -> Callable[..., Any]:
    """nn.Module.__call__ of the layer of this name, which leaves drop_in() for nested tensors.

    Only the fused path of these layers accepts nested tensors, and any mode keeps PyTorch from it.
    Other modes stay active: under one of those the layer raises an error, as it does without
    drop_in().
    """

    def __call__(self: Any, *args: Any, **kwargs: Any) -> Any:
        if not torch.compiler.is_compiling():
            modes = pytorch_modes.function_modes()
            if any(isinstance(mode, _serving) for mode in modes) and _given_nested(args, kwargs):
                report.count_declined(name, "nested tensor")
                return _without_serving(modes, lambda: nn.Module.__call__(self, *args, **kwargs))
        return nn.Module.__call__(self, *args, **kwargs)

    return __call__


# Patched once and never restored, so that no thread sees a change.
if pytorch_modes.FAST_PATHS.available:
    mha.get_fastpath_enabled = _get_fastpath_enabled
    layer: Any
    for layer in (nn.MultiheadAttention, nn.TransformerEncoderLayer):
        layer.__call__ = _call_of(f"torch.nn.{layer.__name__}")
