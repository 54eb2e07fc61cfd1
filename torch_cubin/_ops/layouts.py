"""Errors of built-in and declared ops for tensors that are not dense (sparse, nested and others),
or on other devices.

Such a tensor has its own dispatch key, for which the ops have no kernel. Without these errors,
PyTorch would raise its own, whose text the C API before torch 2.13 loses.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from torch_cubin._ops import checks, raw_ops
from torch_cubin._pytorch import operators

# The first stands for the key of every device and layout without a kernel of its own, but not for
# those of nested tensors, for which the second stands.
_KEYS = ("CompositeExplicitAutograd", "CompositeImplicitAutogradNestedTensor")


def _refusal(label: str, overload: Callable[[], Any]) -> Callable[..., torch.Tensor]:
    def refuse(*args: object, **kwargs: object) -> torch.Tensor:
        names = operators.argument_names(overload())
        given = {**dict(zip(names, args, strict=False)), **kwargs}
        device = "no device"
        for name, value in given.items():
            for tensor in value if isinstance(value, (list, tuple)) else [value]:
                if isinstance(tensor, torch.Tensor):
                    checks.check_dense(label, name, tensor)
                    device = tensor.device.type
        checks.fail(label, "has no kernel for these tensors", "tensors on cuda or cpu", device)

    return refuse


def refuse_in(
    library: torch.library.Library, name: str, label: str, overload: Callable[[], Any]
) -> None:
    """Registers the errors for one op of a library, which they call `label`."""
    refuse = _refusal(label, overload)
    for key in _KEYS:
        library.impl(name, refuse, key)


def register(library: torch.library.Library) -> None:
    for op in (*raw_ops.ALL, *raw_ops.ROWS):
        for name in raw_ops.raw_names(op):
            label = op.removesuffix("_activation")
            refuse_in(library, name, label, functools.partial(raw_ops.overload, name))
