"""The products for graphs (csrc/ops/matmul/fused.h): fake kernels and batching rules.

They have no autograd variants: fused_autograd.py registers their derivatives on their own Autograd
keys.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from torch_cubin._ops import checks, raw_ops
from torch_cubin._ops.vmap import batched_linear, batched_matmul, front, of_every_op, register_rule
from torch_cubin._pytorch import operators, transforms

Dims = Sequence[int | None]
OptionalTensors = Sequence[Tensor | None]


# ---- fake kernels


def _linear_glu(input: Tensor, gate: Tensor, up: Tensor, activation: str) -> Tensor:
    checks.check_activation(activation)
    return input.new_empty(checks.check_linear_glu(input, gate, up))


def _linear_glu_aux(
    input: Tensor, gate: Tensor, up: Tensor, activation: str
) -> tuple[Tensor, Tensor, Tensor]:
    out = _linear_glu(input, gate, up, activation)
    return out, torch.empty_like(out), torch.empty_like(out)


def _linears(input: Tensor, weights: Sequence[Tensor], biases: OptionalTensors) -> list[Tensor]:
    return [input.new_empty(shape) for shape in checks.check_linears(input, weights, biases)]


def _linear_activation_aux(
    input: Tensor, weight: Tensor, bias: Tensor | None, activation: str
) -> tuple[Tensor, Tensor]:
    checks.check_activation(activation)
    out = input.new_empty(checks.check_linear(input, weight, bias))
    return out, torch.empty_like(out)


def _linear_activation_backward(
    grad: Tensor, weight: Tensor, aux: Tensor, activation: str
) -> Tensor:
    checks.check_activation(activation)
    return grad.new_empty(checks.check_linear_activation_backward(grad, weight, aux))


# ---- batching rules
#
# A batch of inputs is one call with more rows. If weights are mapped, the op is composed of batched
# products, which also round the intermediate results.


def _linear_op(
    input: Tensor, weight: Tensor, bias: Tensor | None, dims: Dims
) -> tuple[Tensor, int | None]:
    linear = torch.ops.cubin._linear_autograd.default
    if all(dim is None for dim in dims):
        return linear(input, weight, bias), None
    return batched_linear(
        linear, torch.ops.cubin._matmul_autograd.default, input, weight, bias, tuple(dims)
    )


def _whole(tensor: Tensor, dim: int | None, size: int) -> Tensor:
    """The tensor with the batch dim of that size in front."""
    return tensor.expand(size, *tensor.shape) if dim is None else tensor.movedim(dim, 0)


def _glu_rule(
    info: Any, dims: Dims, input: Tensor, gate: Tensor, up: Tensor, activation: str
) -> Any:
    if dims[1] is None and dims[2] is None:
        checks.check_linear_glu(input, gate, up, dims)
        op = torch.ops.cubin._linear_glu.default
        return op(front(input, dims[0]), gate, up, activation), 0
    (out, *_), _ = _glu_aux_rule(info, dims, input, gate, up, activation)
    return out, 0


def _glu_aux_rule(
    info: Any,
    dims: Dims,
    input: Tensor,
    gate: Tensor,
    up: Tensor,
    activation: str,
) -> Any:
    checks.check_linear_glu(input, gate, up, dims)
    if dims[1] is None and dims[2] is None:
        op = torch.ops.cubin._linear_glu_aux.default
        return op(front(input, dims[0]), gate, up, activation), (0, 0, 0)
    of_gate, of_up = (
        _whole(*_linear_op(input, weight, None, (dims[0], dim, None)), info.batch_size)
        for weight, dim in ((gate, dims[1]), (up, dims[2]))
    )
    out = activate(of_gate, activation) * of_up
    return (out, of_gate.contiguous(), of_up.contiguous()), (0, 0, 0)


def _linears_rule(
    info: Any,
    dims: tuple[Any, ...],
    input: Tensor,
    weights: Sequence[Tensor],
    biases: OptionalTensors,
) -> Any:
    input_dim, weight_dims, bias_dims = dims
    checks.check_linears(input, weights, biases, dims)
    if all(dim is None for dim in (*weight_dims, *bias_dims)):
        op = torch.ops.cubin._linears.default
        return op(front(input, input_dim), weights, biases), [0] * len(weights)
    none = [None] * len(weights)
    outs = []
    for weight, bias, *own in zip(
        weights, biases or none, weight_dims, bias_dims or none, strict=True
    ):
        out, dim = _linear_op(input, weight, bias, (input_dim, *own))
        outs.append(_whole(out, dim, info.batch_size).contiguous())
    return outs, [0] * len(weights)


def _aux_rule(
    info: Any,
    dims: Dims,
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    activation: str,
) -> Any:
    checks.check_linear(input, weight, bias, tuple(dims[:3]))
    if dims[1] is None and dims[2] is None:
        op = torch.ops.cubin._linear_activation_aux.default
        return op(front(input, dims[0]), weight, bias, activation), (0, 0)
    aux, dim = _linear_op(input, weight, bias, dims[:3])
    return (activate(aux, activation, copy=True), aux), (dim, dim)


def _backward_rule(
    info: Any, dims: Dims, grad: Tensor, weight: Tensor, aux: Tensor, activation: str
) -> Any:
    checks.check_linear_activation_backward(grad, weight, aux, dims)
    size = info.batch_size
    kept = _whole(aux, dims[2], size)
    if dims[1] is None:
        op = torch.ops.cubin._linear_activation_backward.default
        return op(_whole(grad, dims[0], size), weight, kept, activation), 0
    matmul = torch.ops.cubin._matmul_autograd.default
    product, dim = batched_matmul(matmul, grad, weight, (dims[0], dims[1]))
    return activation_backward(product.movedim(dim, 0), kept, activation), 0


def activate(x: Tensor, activation: str, *, copy: bool = False) -> Tensor:
    """PyTorch's activation; for "none", x or a copy of it."""
    from torch_cubin._ops.autograd import ACTIVATIONS

    if activation == "none":
        return x.clone() if copy else x
    return ACTIVATIONS[activation](x)


def activation_backward(grad: Tensor, x: Tensor, activation: str) -> Tensor:
    """grad * activation'(x), with derivatives of every order if they may be needed."""
    aten = torch.ops.aten
    if activation == "relu":
        return aten.threshold_backward(grad, x, 0)
    if activation in ("gelu", "gelu_tanh"):
        approximate = "none" if activation == "gelu" else "tanh"
        return aten.gelu_backward(grad, x, approximate=approximate)
    if activation != "silu":
        return grad
    if not _may_be_differentiated():
        return aten.silu_backward(grad, x)
    sigmoid = torch.sigmoid(x)  # PyTorch's op has no derivative
    return grad * sigmoid * (1 + x * (1 - sigmoid))


def _may_be_differentiated() -> bool:
    return (
        torch.is_grad_enabled() or transforms.transforms_active() or transforms.dual_level_is_open()
    )


def register(library: torch.library.Library) -> None:
    for name, fake, rule in (
        ("linear_glu", _linear_glu, _glu_rule),
        ("linear_glu_aux", _linear_glu_aux, _glu_aux_rule),
        ("linears", _linears, _linears_rule),
        ("linear_activation_aux", _linear_activation_aux, _aux_rule),
        ("linear_activation_backward", _linear_activation_backward, _backward_rule),
    ):
        (raw,) = raw_ops.raw_names(name)
        operators.register_fake(f"cubin::{raw}", fake, library)
        register_rule(library, raw, of_every_op(rule))
        if name in raw_ops.BELOW_AUTOGRAD:
            operators.register_fake(f"cubin::{raw}.below_autograd", fake, library)
