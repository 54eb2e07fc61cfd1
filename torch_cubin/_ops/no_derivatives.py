"""The built-in ops on a PyTorch without the internals that derivatives need: forward only.

A kernel on the Autograd key of each `cubin::_name_autograd` refuses calls that need a derivative,
and forwards all others to the op without derivatives.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.autograd.forward_ad as forward_ad
from torch import Tensor

from torch_cubin._ops import checks, raw_ops
from torch_cubin._pytorch.transforms import DERIVATIVES


def _kernel(name: str) -> Callable[..., Any]:
    op = raw_ops.overload(f"_{name}")

    def kernel(*args: Any, **kwargs: Any) -> Any:
        for value in (*args, *kwargs.values()):
            if isinstance(value, Tensor) and _is_differentiated(value):
                error = DERIVATIVES.error(f"the derivative of {name}")
                checks.keep(error)  # a public op of an older torch would lose the text
                raise error
        return op(*args, **kwargs)

    return kernel


def _is_differentiated(tensor: Tensor) -> bool:
    return tensor.requires_grad or forward_ad.unpack_dual(tensor).tangent is not None


def register(library: torch.library.Library) -> None:
    for name in raw_ops.DIFFERENTIABLE:
        library.impl(f"_{name}_autograd", _kernel(name), "Autograd")
