"""Ops without a derivative and a batching rule: errors for the transforms that would need them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from torch_cubin import errors
from torch_cubin._ops import checks, raw_ops
from torch_cubin._pytorch import transforms


def refuse_transforms(
    library: torch.library.Library, name: str, *, advice: str, reason: str = ""
) -> None:
    """`advice` is for calls that need a derivative, `reason` follows "has no rule for ..."."""

    def refusal(transform: str, what: str) -> errors.Error:
        problem = f"has no rule for {transform}{reason}"
        return checks.fault(name, problem, "a call outside of it", "one inside", what)

    def autograd(*args: Any, **kwargs: Any) -> Any:
        """Refuses calls that need a derivative; all others run as without gradients."""
        tensors = [x for x in (*args, *kwargs.values()) if isinstance(x, Tensor)]
        if any(x.requires_grad for x in tensors) or transforms.dual_level_is_open():
            raise refusal("derivatives", advice)
        with transforms.below_autograd():
            return raw_ops.overload(f"_{name}")(*args, **kwargs)

    def vmap(*args: Any, **kwargs: Any) -> Any:
        raise refusal("torch.vmap", "Give it the whole batch.")

    for raw in raw_ops.raw_names(name):
        library.impl(raw, vmap, "FuncTorchBatched")
    library.impl(f"_{name}_autograd", autograd, "Autograd")
