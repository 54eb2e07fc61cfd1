"""cubin::_moe (csrc/ops/experts/experts.h): fake kernels, derivatives, batching rule.

A call that backward() differentiates runs as _moe_forward and _moe_backward. Derivatives of other
orders, forward mode and torch.func's are those of the layer composed of differentiable ops; with
the recipe "block", whose products are of 8-bit floats, they are refused.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from torch_cubin._ops import (
    autograd,
    checks,
    experts,
    fused_autograd,
    kept_weights,
    raw_ops,
    refusals,
)
from torch_cubin._ops.autograd import ACTIVATIONS
from torch_cubin._ops.batch_invariant import is_batch_invariant
from torch_cubin._ops.raw_ops import MOE as NAME
from torch_cubin._ops.raw_ops import MOE_FLOAT8
from torch_cubin._ops.vmap import one_by_one, register_rule
from torch_cubin._pytorch import operators, transforms

_NAMES = ("x", "topk_ids", "topk_weights", "w13", "w2")
_FLOAT8_NAMES = ("x", "topk_ids", "topk_weights", "w13", "w13_scale", "w2", "w2_scale")

_moe = torch.ops.cubin._moe.default
_forward = torch.ops.cubin._moe_forward.default
_backward = torch.ops.cubin._moe_backward.default


def _check(
    tensors: tuple[Tensor, ...],
    dims: tuple[int | None, ...],
    activation: str,
    interleaved: bool,
    recipe: str = "none",
) -> None:
    checks.check_activation(activation)
    named = list(zip(_NAMES, tensors, dims, strict=True))
    for name, tensor, _ in named:
        checks.check_dense(NAME, name, tensor)
    described = {name: checks.described(tensor, dim) for name, tensor, dim in named}
    options = {"activation": activation, "interleaved": interleaved, "recipe": recipe}
    checks.ask("moe", {"tensors": described, **options})


def _fake(*args: Any) -> Tensor:
    tensors, gating = args[:5], args[5:]
    _check(tensors, (None,) * 5, *gating)
    x: Tensor = tensors[0]
    return x.new_empty(x.shape)


def _fake_forward(
    x: Tensor,
    topk_ids: Tensor,
    topk_weights: Tensor,
    w13: Tensor,
    w2: Tensor,
    activation: str,
    interleaved: bool,
    recipe: str = "none",
    copies: Sequence[Tensor] | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    out = _fake(x, topk_ids, topk_weights, w13, w2, activation, interleaved, recipe)
    rows = topk_ids.shape[0] * topk_ids.shape[1]
    order = topk_ids.new_empty((2 * rows + w2.shape[0],), dtype=torch.int32)
    return out, x.new_empty((rows, w13.shape[1])), order


def _fake_backward(
    grad: Tensor,
    x: Tensor,
    topk_weights: Tensor,
    w13: Tensor,
    w2: Tensor,
    before: Tensor,
    order: Tensor,
    activation: str,
    interleaved: bool,
    of_x: bool,
    of_w13: bool,
    of_w2: bool,
    recipe: str = "none",
    copies: Sequence[Tensor] | None = None,
) -> tuple[Tensor, ...]:
    return (
        x.new_empty(x.shape if of_x else (0,)),
        topk_weights.new_empty(topk_weights.shape),
        *(
            _like_weight(weight) if wanted else x.new_empty((0,))
            for weight, wanted in ((w13, of_w13), (w2, of_w2))
        ),
    )


def _fake_copies(weight: Tensor) -> tuple[Tensor, ...]:
    """In the layouts of csrc/ops/experts/float8_steps.cpp."""
    turned = weight.stride(1) == 1 and weight.stride(2) != 1
    own = weight.mT if turned else weight
    count, rows, columns = own.shape
    row_blocks, blocks = -(-rows // 128), -(-columns // 128)
    height = rows if count == 1 else row_blocks * 128
    of_own, of_transpose = (
        (
            weight.new_empty_strided(sizes, strides, dtype=torch.float8_e4m3fn),
            weight.new_empty_strided(scales, scale_strides, dtype=torch.float32),
        )
        for sizes, strides, scales, scale_strides in (
            (
                *((count, rows, columns), (height * columns, columns, 1)),
                *((count, row_blocks, blocks), (row_blocks * blocks, blocks, 1)),
            ),
            (
                *((count, columns, rows), (height, count * height, 1)),
                *((count, blocks, row_blocks), (row_blocks, count * row_blocks, 1)),
            ),
        )
    )
    return (*of_transpose, *of_own) if turned else (*of_own, *of_transpose)


def _fake_float8(x: Tensor, *tensors: Tensor) -> Tensor:
    for name, tensor in zip(_FLOAT8_NAMES, (x, *tensors), strict=True):
        checks.check_dense(NAME, name, tensor)
    described = {
        name: checks.described(tensor)
        for name, tensor in zip(_FLOAT8_NAMES, (x, *tensors), strict=True)
    }
    checks.ask("moe_float8", described)
    return x.new_empty(x.shape)


def _like_weight(weight: Tensor) -> Tensor:
    """Contiguous where the weight is (is_stored_transposed() in csrc/ops/experts/experts.h)."""
    if weight.stride(1) == 1 and weight.stride(2) != 1:
        return weight.new_empty(weight.mT.shape).mT
    return weight.new_empty(weight.shape)


def _composed(tensors: Sequence[Tensor], activation: str, interleaved: bool) -> Tensor:
    x, topk_ids, topk_weights, w13, w2 = tensors
    gate = experts.gated(ACTIVATIONS[activation], interleaved)
    return experts.experts(x, topk_ids, topk_weights, w13.mT, w2.mT, gate)


class _Moe(transforms.SingleLevelFunction):
    @staticmethod
    def forward(ctx: Any, made: list[Tensor], *args: Any) -> Tensor:
        tensors, gating = args[:5], args[5:]
        ctx.set_materialize_grads(False)
        ctx.batch_invariant = is_batch_invariant()
        ctx.gating = gating
        copies = kept_weights.given(tensors[3:], False) if gating[2] == "block" else None
        out, *kept = autograd.call_below_autograd(_forward, *args, copies)
        ctx.save_for_backward(*tensors, *kept)
        made.append(out)
        return out

    @staticmethod
    @autograd._as_forward
    def backward(ctx: Any, grad: Tensor | None) -> tuple[Tensor | None, ...]:
        if grad is None:
            return (None,) * 9
        x, ids, weights, w13, w2, before, order = ctx.saved_tensors
        needs = ctx.needs_input_grad[1:6]
        tensors = (x, ids, weights, w13, w2)
        activation, interleaved, recipe = ctx.gating
        if torch.is_grad_enabled():  # to be differentiated again
            _check_composed(recipe, "second derivatives")
            composed = _composed_gradients(grad, tensors, (activation, interleaved), needs)
            return None, *composed, None, None, None
        of_x, _, of_weights, of_w13, of_w2 = needs
        args = grad, x, weights, w13, w2, before, order, activation, interleaved
        copies = kept_weights.given((w13, w2), True) if recipe == "block" else None
        grads = _backward(*args, of_x, of_w13, of_w2, recipe, copies)
        x_grad, weights_grad, w13_grad, w2_grad = grads
        return (
            *(None, x_grad if of_x else None, None, weights_grad if of_weights else None),
            *(w13_grad if of_w13 else None, w2_grad if of_w2 else None, None, None, None),
        )


def _composed_gradients(
    grad: Tensor, tensors: Sequence[Tensor], gating: tuple[str, bool], needs: Sequence[bool]
) -> list[Tensor | None]:
    """The gradients of the tensors that need one, which can be differentiated again."""
    # Views, because one tensor may be several arguments.
    inputs = [tensor.view_as(tensor) for tensor in tensors]
    wanted = [tensor for tensor, needed in zip(inputs, needs, strict=True) if needed]
    ended = autograd.recomputations.ended
    out = _composed(inputs, *gating)
    if autograd.recomputations.ended != ended:  # out has no graph, and nobody reads these
        return [
            torch.zeros_like(x) if needed else None
            for x, needed in zip(tensors, needs, strict=True)
        ]
    found = iter(torch.autograd.grad(out, wanted, grad, create_graph=True))
    return [next(found) if needed else None for needed in needs]


def _check_composed(recipe: str, what: str) -> None:
    """Refuses what needs a layer composed of ops, which have derivatives of every order."""
    if recipe == "none":
        return
    problem = f"has no rule for {what} with the recipe '{recipe}'"
    advice = "Use the first derivative, by backward(), or omit the recipe."
    raise checks.fault(NAME, problem, "a call without them", "one with them", advice)


def _differentiated(*args: Any) -> Any:
    tensors, gating = args[:5], _gating(*args[5:])
    activation, interleaved, recipe = gating
    if transforms.transforms_active() or transforms.dual_level_is_open():
        _check_composed(recipe, "derivatives of torch.func and forward mode")
        return _composed(tensors, activation, interleaved)

    def op(*tensors: Tensor) -> Tensor:
        out: Tensor = _moe(*tensors, *gating)
        return out

    return autograd.apply(_Moe, op, *tensors, rest=gating)


def _gating(activation: str, interleaved: bool, recipe: str = "none") -> tuple[str, bool, str]:
    return activation, interleaved, recipe


def _rule(op: Any) -> Callable[..., Any]:
    def rule(info: Any, dims: tuple[int | None, ...], *args: Any) -> tuple[Tensor, int]:
        tensors, gating = args[:5], args[5:]
        _check(tensors, dims[:5], *gating)

        def one(*own: Tensor) -> Tensor:
            return op(*own, *gating)

        return one_by_one(one, info.batch_size, tensors, dims[:5])

    return rule


def register(library: torch.library.Library) -> None:
    for name in raw_ops.raw_names(NAME):
        operators.register_fake(f"cubin::{name}", _fake, library)
        register_rule(library, name, _rule)
    for name in raw_ops.raw_names(MOE_FLOAT8):
        operators.register_fake(f"cubin::{name}", _fake_float8, library)
    advice = "Call it under torch.no_grad(): weights of 8-bit floats are for inference."
    refusals.refuse_transforms(library, MOE_FLOAT8, advice=advice)
    operators.register_fake("cubin::_moe_forward", _fake_forward, library)
    operators.register_fake("cubin::_moe_backward", _fake_backward, library)
    operators.register_fake("cubin::_float8_copies", _fake_copies, library)
    if transforms.DERIVATIVES.available:  # else no_derivatives.py refuses them
        kernel = fused_autograd.kernel(raw_ops.overload(f"_{NAME}_autograd"), _differentiated)
        library.impl(f"_{NAME}_autograd", kernel, "Autograd")
