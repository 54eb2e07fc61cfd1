# PyTorch's fused inference path of nn.MultiheadAttention and nn.TransformerEncoderLayer, which
# multiplies where no mode can see it: off in a thread that is inside drop_in(), unchanged in every
# other, and left to PyTorch for nested tensors, which these layers take on that path alone.
"""The switch of PyTorch's fused attention layers, for each thread by itself."""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.backends import mha

from torch_cubin._drop_in import report
from torch_cubin._pytorch import modes as pytorch_modes

# The classes of the modes that serve; drop_in.py adds its own. (A tuple: torch.compile reads it.)
_serving: tuple[type, ...] = ()


def serves(kind: type) -> None:
    """Switch the fused path off where a mode of this class is entered, from now on."""
    global _serving
    _serving = (*_serving, kind)


def _get_fastpath_enabled() -> bool:
    """PyTorch's function of this name; False in a thread that is inside drop_in().

    Any mode keeps eager code from the fused path; torch.compile takes it all the same. PyTorch's
    own switch is one for all threads: set for one thread, it would make the nested tensors of
    another fail.
    """
    if not torch.jit.is_scripting():
        modes = pytorch_modes.function_modes()
        return pytorch_modes.fast_path_is_on() and not any(
            isinstance(mode, _serving) for mode in modes
        )
    return True


def _given_nested(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    return any(isinstance(x, torch.Tensor) and x.is_nested for x in (*args, *kwargs.values()))


def _without_serving(modes: list[Any], call: Callable[..., Any]) -> object:
    """What the call gives with those of this thread's modes that do not serve."""
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
    """nn.Module.__call__ of the layer of this name, without drop_in() around it for nested tensors.

    The fused path is the only one of these layers that takes them, and any mode keeps PyTorch from
    it. Other modes stay: under one of those the layer raises, as it does without drop_in().
    """

    def __call__(self: Any, *args: Any, **kwargs: Any) -> Any:
        if not torch.compiler.is_compiling():
            modes = pytorch_modes.function_modes()
            if any(isinstance(mode, _serving) for mode in modes) and _given_nested(args, kwargs):
                report.count_declined(name, "nested tensor")
                return _without_serving(modes, lambda: nn.Module.__call__(self, *args, **kwargs))
        return nn.Module.__call__(self, *args, **kwargs)

    return __call__


# Once and for good, so that no thread sees them change.
if pytorch_modes.FAST_PATHS.available:
    mha.get_fastpath_enabled = _get_fastpath_enabled
    layer: Any
    for layer in (nn.MultiheadAttention, nn.TransformerEncoderLayer):
        layer.__call__ = _call_of(f"torch.nn.{layer.__name__}")
