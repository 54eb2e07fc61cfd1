"""What the rules of all ops over rows (csrc/ops/rows/rows.h) share: dtypes, backward ops that are
differentiated themselves, batching, autocast, and the registration."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from torch_cubin._ops import autograd, raw_ops
from torch_cubin._ops.vmap import one_by_one, register_rule
from torch_cubin._pytorch import dispatch_keys, operators, transforms


def real(tensor: Tensor) -> Tensor:
    """In the dtype that is computed in."""
    return tensor if tensor.dtype == torch.float64 else tensor.float()


def statistics_dtype(tensor: Tensor) -> torch.dtype:
    return torch.float64 if tensor.dtype == torch.float64 else torch.float32


def by_formula(op: Any, formula: Callable[..., Any]) -> Callable[..., Any]:
    """The kernel on the Autograd key of a backward op: the formula where it is differentiated."""

    def kernel(*args: Any) -> Any:
        tensors = [x for x in args if isinstance(x, Tensor)]
        recorded = torch.is_grad_enabled() and autograd._requires_grad(tensors)
        if recorded or transforms.dual_level_is_open(*tensors):
            return formula(*args)
        with transforms.below_autograd():
            return op(*args)

    return kernel


def each(op: Any, size: int, args: Sequence[Any], dims: Sequence[Any]) -> tuple[Any, Any]:
    """One call for each sample."""
    plain = [dim if isinstance(dim, int) else None for dim in dims]  # a list's are no number
    return one_by_one(op, size, args, plain)


def each_rule(op: Any) -> Callable[..., Any]:
    """The batching rule of ops that add over rows: one call for each sample."""

    def rule(info: Any, dims: Any, *args: Any) -> tuple[Any, Any]:
        return each(op, info.batch_size, args, dims)

    return rule


_LOWER = (torch.float16, torch.bfloat16)


def _to_float(value: Any) -> Any:
    if not isinstance(value, Tensor) or dispatch_keys.autocast_is_off():
        return value
    return value.float() if value.device.type == "cuda" and value.dtype in _LOWER else value


def autocast_to_float(name: str) -> Callable[..., Any]:
    """The Autocast kernel of an op that torch.autocast runs in float32, on CUDA alone."""
    without_this_key = dispatch_keys.without_key("AutocastCUDA")

    def kernel(*args: Any, **kwargs: Any) -> Any:
        args = tuple(map(_to_float, args))
        kwargs = {name: _to_float(value) for name, value in kwargs.items()}
        with without_this_key():
            return raw_ops.overload(name)(*args, **kwargs)

    return kernel


def rule_in_float(rule_of: Callable[[Any], Callable[..., Any]]) -> Callable[[Any], Any]:
    """The batching rule of such an op: batched tensors have no Autocast key, so that the kernel
    above does not run under vmap."""

    def in_float(op: Any) -> Callable[..., Any]:
        rule = rule_of(op)

        def cast(info: Any, dims: Any, *args: Any) -> Any:
            if torch.is_autocast_enabled("cuda"):
                own = args[0].dtype
                args = tuple(map(_to_float, args))
                args = tuple(args[0].dtype if x is own else x for x in args)  # a loss's, too
            return rule(info, dims, *args)

        return cast

    return in_float


def register(
    library: torch.library.Library,
    name: str,
    fake: Callable[..., Any],
    autograd_kernel: Callable[..., Any],
    rule: Callable[[Any], Callable[..., Any]],
) -> None:
    """Registers the rules of `_name` and `_name_autograd`: fake, of autograd, of vmap."""
    for raw in raw_ops.raw_names(name):
        operators.register_fake(f"cubin::{raw}", fake, library)
        register_rule(library, raw, rule)
    if transforms.DERIVATIVES.available:  # else no_derivatives.py refuses them
        library.impl(f"_{name}_autograd", autograd_kernel, "Autograd")
