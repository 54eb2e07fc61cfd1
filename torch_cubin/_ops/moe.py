"""cubin::_moe (csrc/ops/experts/experts.h): fake kernel, derivatives, batching rule.

The op is the layer without derivatives. A call that needs one is composed of differentiable ops.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from torch_cubin._ops import checks, experts, fused_autograd, raw_ops
from torch_cubin._ops.autograd import ACTIVATIONS
from torch_cubin._ops.raw_ops import MOE as NAME
from torch_cubin._ops.vmap import one_by_one, register_rule
from torch_cubin._pytorch import operators, transforms

_NAMES = ("x", "topk_ids", "topk_weights", "w13", "w2")


def _check(tensors: tuple[Tensor, ...], activation: str, dims: tuple[int | None, ...]) -> None:
    checks.check_activation(activation)
    named = list(zip(_NAMES, tensors, dims, strict=True))
    for name, tensor, _ in named:
        checks.check_dense(NAME, name, tensor)
    described = {name: checks.described(tensor, dim) for name, tensor, dim in named}
    checks.ask("check_moe", described)


def _fake(*args: Any) -> Tensor:
    *tensors, activation = args
    _check(tuple(tensors), activation, (None,) * 5)
    return tensors[0].new_empty(tensors[0].shape)


def _composed(
    x: Tensor, topk_ids: Tensor, topk_weights: Tensor, w13: Tensor, w2: Tensor, activation: str
) -> Tensor:
    gate = experts.gated(ACTIVATIONS[activation])
    return experts.experts(x, topk_ids, topk_weights, w13.mT, w2.mT, gate)


def _rule(op: Any) -> Callable[..., Any]:
    def rule(info: Any, dims: tuple[int | None, ...], *args: Any) -> tuple[Tensor, int]:
        *tensors, activation = args
        _check(tuple(tensors), activation, dims[:5])

        def one(*own: Tensor) -> Tensor:
            return op(*own, activation)

        return one_by_one(one, info.batch_size, tensors, dims[:5])

    return rule


def register(library: torch.library.Library) -> None:
    for name in raw_ops.raw_names(NAME):
        operators.register_fake(f"cubin::{name}", _fake, library)
        register_rule(library, name, _rule)
    if transforms.DERIVATIVES.available:  # else no_derivatives.py refuses them
        op = raw_ops.overload(f"_{NAME}_autograd")
        library.impl(f"_{NAME}_autograd", fused_autograd.kernel(op, _composed), "Autograd")
