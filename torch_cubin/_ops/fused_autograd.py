"""Derivatives of the products for graphs, on their own Autograd keys.

Gated linear layers and activations save the values before the activation, which the `_aux` ops
return with the result; nothing is recomputed. _linears and _linear_activation_backward are composed
of differentiable ops if a derivative is needed.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from torch_cubin._ops import autograd, checks
from torch_cubin._ops.autograd import addmm, linear, matmul
from torch_cubin._ops.batch_invariant import is_batch_invariant
from torch_cubin._ops.fused import activate, activation_backward
from torch_cubin._pytorch import transforms

linear_glu = torch.ops.cubin._linear_glu.default
linear_glu_aux = torch.ops.cubin._linear_glu_aux.default
linears = torch.ops.cubin._linears.default
linear_activation_aux = torch.ops.cubin._linear_activation_aux.default
linear_activation_backward = torch.ops.cubin._linear_activation_backward.default


def _sum(*terms: Tensor | None) -> Tensor | None:
    out: Tensor | None = None
    for term in terms:
        if term is not None:
            out = term if out is None else out + term
    return out


class _LinearGluAux(transforms.SingleLevelFunction):
    @staticmethod
    def forward(
        ctx: Any, made: list[Tensor], input: Tensor, gate: Tensor, up: Tensor, activation: str
    ) -> tuple[Tensor, ...]:
        _, needs_input, needs_gate, needs_up, _ = ctx.needs_input_grad
        ctx.set_materialize_grads(False)
        ctx.batch_invariant = is_batch_invariant()
        ctx.activation = activation
        made += autograd.call_below_autograd(linear_glu_aux, input, gate, up, activation)
        ctx.save_for_backward(
            input if needs_gate or needs_up else None,
            *((gate, up) if needs_input else (None, None)),
            *made[1:],
        )
        ctx.save_for_forward(input, gate, up, *made[1:])
        return tuple(made)

    @staticmethod
    @autograd._as_forward
    def backward(ctx: Any, grad: Tensor | None, *of_aux: Tensor | None) -> tuple[Any, ...]:
        input, gate, up, gate_out, up_out = ctx.saved_tensors
        _, needs_input, needs_gate, needs_up, _ = ctx.needs_input_grad
        of_gate, of_up = of_aux
        if grad is not None:
            of_gate = _sum(activation_backward(grad * up_out, gate_out, ctx.activation), of_gate)
            of_up = _sum(grad * activate(gate_out, ctx.activation), of_up)
        grad_input = grad_gate = grad_up = None
        if of_gate is not None:
            grad_input = matmul(of_gate, gate) if needs_input else None
            grad_gate = autograd._grad_of_weight(of_gate, input) if needs_gate else None
        if of_up is not None:
            if needs_input:
                parts = (of_up, up)
                grad_input = matmul(*parts) if grad_input is None else addmm(grad_input, *parts)
            grad_up = autograd._grad_of_weight(of_up, input) if needs_up else None
        return None, grad_input, grad_gate, grad_up, None

    @staticmethod
    def jvp(
        ctx: Any,
        _: None,
        input_t: Tensor | None,
        gate_t: Tensor | None,
        up_t: Tensor | None,
        *rest: None,
    ) -> tuple[Tensor | None, ...]:
        with autograd._outer_levels():
            *inputs, gate_out, up_out = ctx.saved_tensors
            input, gate, up = map(autograd._primal, inputs)
            of_gate = autograd._linear_tangent(input, gate, input_t, gate_t, None)
            of_up = autograd._linear_tangent(input, up, input_t, up_t, None)
            out = _sum(
                None
                if of_gate is None
                else activation_backward(of_gate, gate_out, ctx.activation) * up_out,
                None if of_up is None else activate(gate_out, ctx.activation) * of_up,
            )
            return tuple(
                torch.zeros_like(gate_out) if tangent is None else tangent
                for tangent in (out, of_gate, of_up)
            )


class _LinearActivationAux(transforms.SingleLevelFunction):
    @staticmethod
    def forward(
        ctx: Any,
        made: list[Tensor],
        input: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        activation: str,
    ) -> tuple[Tensor, ...]:
        _, needs_input, needs_weight, *_ = ctx.needs_input_grad
        ctx.set_materialize_grads(False)
        ctx.batch_invariant = is_batch_invariant()
        ctx.activation = activation
        ctx.shapes = input.shape, weight.shape, None if bias is None else bias.shape
        made += autograd.call_below_autograd(linear_activation_aux, input, weight, bias, activation)
        ctx.save_for_backward(
            input if needs_weight else None, weight if needs_input else None, made[1]
        )
        ctx.save_for_forward(input, weight, made[1])
        return tuple(made)

    @staticmethod
    @autograd._as_forward
    def backward(ctx: Any, grad: Tensor | None, of_aux: Tensor | None) -> tuple[Tensor | None, ...]:
        input, weight, aux = ctx.saved_tensors
        before = None if grad is None else activation_backward(grad, aux, ctx.activation)
        total = _sum(before, of_aux)
        if total is None:
            return (None,) * 5
        needs = ctx.needs_input_grad[1:4]
        return None, *autograd.linear_gradients(total, (input, weight), ctx.shapes, needs), None

    @staticmethod
    def jvp(
        ctx: Any,
        _: None,
        input_t: Tensor | None,
        weight_t: Tensor | None,
        bias_t: Tensor | None,
        *rest: None,
    ) -> tuple[Tensor | None, ...]:
        with autograd._outer_levels():
            *inputs, aux = ctx.saved_tensors
            input, weight = map(autograd._primal, inputs)
            of_aux = autograd._linear_tangent(input, weight, input_t, weight_t, None)
            if bias_t is not None:
                of_aux = bias_t.expand(aux.shape) if of_aux is None else of_aux + bias_t
            if of_aux is None:
                return None, None
            of_aux = of_aux.contiguous()
            return activation_backward(of_aux, aux, ctx.activation).clone(), of_aux


def kernel(op: Any, differentiated: Callable[..., Any]) -> Callable[..., Any]:
    """The kernel on the Autograd key: `differentiated` for calls that need a derivative."""

    def run(*args: Any) -> Any:
        tensors: list[Tensor | None] = []
        for arg in args:
            tensors += arg if isinstance(arg, (list, tuple)) else [arg]
        tensors = [tensor for tensor in tensors if isinstance(tensor, Tensor)]
        try:
            if (
                transforms.transforms_active()
                or transforms.dual_level_is_open()
                # Compiled graphs call the op with parameters, but record nothing.
                or (torch.is_grad_enabled() and autograd._requires_grad(tensors))
            ):
                return differentiated(*args)
            with transforms.below_autograd():
                return op(*args)
        except transforms.StopRecomputation:  # as in autograd.apply(), for an op of a composition
            with torch.no_grad(), transforms.without_modes():
                return run(*args)
        except BaseException as error:
            autograd.keep(error)
            raise

    return run


def _call(op: Any, activation: str, *tensors: Tensor | None) -> Any:
    return op(*tensors, activation)


def _glu(input: Tensor, gate: Tensor, up: Tensor, activation: str) -> Tensor:
    return linear_glu_aux(input, gate, up, activation)[0]


def _glu_aux(input: Tensor, gate: Tensor, up: Tensor, activation: str) -> tuple[Tensor, ...]:
    checks.check_activation(activation)
    op = functools.partial(_call, linear_glu_aux, activation)
    return autograd.apply(_LinearGluAux, op, input, gate, up, rest=(activation,))


def _linears(
    input: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor | None]
) -> list[Tensor]:
    checks.check_linears(input, weights, biases)
    return [
        linear(input, weight, bias)
        for weight, bias in zip(weights, biases or [None] * len(weights), strict=True)
    ]


def _activation_aux(
    input: Tensor, weight: Tensor, bias: Tensor | None, activation: str
) -> tuple[Tensor, ...]:
    checks.check_activation(activation)
    op = functools.partial(_call, linear_activation_aux, activation)
    return autograd.apply(_LinearActivationAux, op, input, weight, bias, rest=(activation,))


def _activation_backward(grad: Tensor, weight: Tensor, aux: Tensor, activation: str) -> Tensor:
    checks.check_linear_activation_backward(grad, weight, aux)
    checks.check_activation(activation)
    return activation_backward(matmul(grad, weight), aux, activation)


def register(library: torch.library.Library) -> None:
    for op, differentiated in (
        (linear_glu, _glu),
        (linear_glu_aux, _glu_aux),
        (linears, _linears),
        (linear_activation_aux, _activation_aux),
        (linear_activation_backward, _activation_backward),
    ):
        name = op.name().removeprefix("cubin::")
        library.impl(name, kernel(op, differentiated), "Autograd")
