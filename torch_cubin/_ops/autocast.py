"""Autocast: under torch.autocast the ops cast their arguments to its dtype, like torch.matmul.

The addend of addmm with a float32 output stays float32. With a cache of keys and values, arguments
are cast to the cache's dtype, because the cache is written to. Float8 arguments of attention are
not cast, and mixing them with other dtypes is an error: a cast would drop their scale factors. Nor
are arguments of scaled_matmul and quantize. Other products of float8 are cast, like those of torch.
All ops get kernels on the Autocast keys, because torch.library.register_autocast fixes one dtype at
registration and fails on keyword arguments. float64 is not
cast, as in torch.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch

from torch_cubin._ops import raw_ops
from torch_cubin._ops.attention_checks import TENSOR_OPTIONS
from torch_cubin._pytorch import dispatch_keys, operators

_identity = torch.ops.aten.einsum.default


def _is_cast(value: Any, device_type: str) -> bool:
    return (
        isinstance(value, torch.Tensor)
        and value.device.type == device_type
        and value.is_floating_point()
        and value.dtype != torch.float64
    )


def _cast(value: Any, device_type: str, dtype: torch.dtype) -> Any:
    if not _is_cast(value, device_type):
        return value
    # Not for tensors that have the dtype already: the identity would add a view.
    if value.requires_grad and value.is_leaf and value.dtype != dtype:
        return _cast_once(value, device_type, dtype)
    return value.to(dtype)


def cast(value: torch.Tensor) -> torch.Tensor:
    """An operand as autocast, which is on, gives it to an op."""
    device_type = value.device.type
    return _cast(value, device_type, torch.get_autocast_dtype(device_type))


def _cast_now(value: Any, device_type: str, dtype: torch.dtype) -> Any:
    return value.to(dtype) if _is_cast(value, device_type) else value


def _cast_once(weight: torch.Tensor, device_type: str, dtype: torch.dtype) -> torch.Tensor:
    """Casts through PyTorch's weight cache, which casts a leaf that requires grad once per region.

    NOTE: Python cannot read that cache, but an op that autocast lowers takes its arguments from it,
    and an einsum of one tensor returns its argument. On the CPU, autocast lowers neither einsum nor
    any other op without a computation: a weight is cast at each use there.
    """
    if (
        device_type == "cuda"
        and dtype == torch.get_autocast_dtype(device_type)
        and torch.is_autocast_cache_enabled()
    ):
        cast = _identity("...", [weight])
        # Torch 2.11's cache returns tensors cast under no_grad to calls that need a gradient.
        if cast.dtype == dtype and (cast.requires_grad or not torch.is_grad_enabled()):
            return cast
    return weight.to(dtype)


# Floating-point arguments that are read in their own dtype, independent of the query's.
_KEPT = frozenset(("logsumexp", *TENSOR_OPTIONS)) - {"attn_mask"}
# Mutated arguments: a cast copy would receive the writes.
_KEPT |= {"k_cache", "v_cache", "out"}
# Weights of a sum and scales of rows, not operands of a product.
_KEPT |= {"topk_weights", "scale"}


# Arguments that are added to a product.
_ADDENDS = ("input", "c")


def _dtype_of(arguments: dict[str, Any], device_type: str) -> torch.dtype:
    """Autocast's dtype, or with a 16-bit cache the cache's, which cannot be cast."""
    cache = arguments.get("k_cache")
    if isinstance(cache, torch.Tensor) and cache.dtype in (torch.float16, torch.bfloat16):
        return cache.dtype
    return torch.get_autocast_dtype(device_type)


@functools.cache
def _found(name: str) -> tuple[Any, list[str]]:
    """Of each op at its first call: for all of them, it would take a tenth of the import."""
    op = raw_ops.overload(name)
    return op, operators.argument_names(op)


def _cast_arguments(
    name: str, device_type: str, to: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Those of a call, each by `to`."""
    _, names = _found(name)
    casts = not any(kept in name for kept in raw_ops.FLOAT8)
    attends = "attention" in name
    given = dict(zip(names, args, strict=False)) | kwargs
    dtype = _dtype_of(given, device_type)
    out_dtype = given.get("out_dtype")

    def cast(name: str, value: Any) -> Any:
        if isinstance(value, (list, tuple)):
            return [cast(name, item) for item in value]
        kept = not casts or name in _KEPT or dispatch_keys.autocast_is_off()
        kept |= attends and isinstance(value, torch.Tensor) and value.itemsize == 1
        # An addend of the output's dtype is not rounded first.
        adds = name in _ADDENDS and isinstance(value, torch.Tensor)
        kept |= adds and value.dtype == out_dtype
        return value if kept else to(value, device_type, dtype)

    return tuple(map(cast, names, args)), {name: cast(name, x) for name, x in kwargs.items()}


def _kernel(name: str, key: str, device_type: str) -> Callable[..., Any]:
    """Of an op that casts nothing, too: the ATen ops of its CPU reference need to run without the
    key."""
    without_this_key = dispatch_keys.without_key(key)

    def autocast(*args: Any, **kwargs: Any) -> Any:
        # Before the key is excluded: PyTorch's weight cache needs it.
        args, kwargs = _cast_arguments(name, device_type, _cast, args, kwargs)
        with without_this_key():
            return _found(name)[0](*args, **kwargs)

    return autocast


@functools.cache
def _raw_names() -> frozenset[str]:
    return frozenset(raw for op in raw_ops.ALL for raw in raw_ops.raw_names(op))


def cast_for_vmap(
    name: str, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments of a batching rule, cast if autocast is on.

    NOTE: batched tensors have no Autocast key, so that the kernels above run below the rule, which
    checks the arguments.
    """
    device_type = next(x.device.type for x in args if isinstance(x, torch.Tensor))
    if name not in _raw_names() or not torch.is_autocast_enabled(device_type):
        return args, kwargs
    return _cast_arguments(name, device_type, _cast_now, args, kwargs)


def register(library: torch.library.Library) -> None:
    if not dispatch_keys.AUTOCAST.available:
        return
    for name in [name for op in raw_ops.ALL for name in raw_ops.all_names(op)]:
        for key, device_type in (("AutocastCUDA", "cuda"), ("AutocastCPU", "cpu")):
            library.impl(name, _kernel(name, key, device_type), key)
