"""Fake kernels: the outputs of the raw ops without data, for torch.compile, export, meta tensors.

The public ops need none: they forward to these. A product is contiguous, as on every device;
attention follows the order of its arguments' dims (attention_checks.output_strides).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from torch_cubin._ops import attention_checks, checks, raw_ops
from torch_cubin._ops.attention_checks import Options, output_strides
from torch_cubin._pytorch import operators


def _matmul(self: Tensor, other: Tensor) -> Tensor:
    return self.new_empty(checks.check_matmul(self, other))


def _linear(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    return input.new_empty(checks.check_linear(input, weight, bias))


def _linear_activation(
    input: Tensor, weight: Tensor, bias: Tensor | None, activation: str
) -> Tensor:
    checks.check_activation(activation)
    return _linear(input, weight, bias)


def _addmm(
    input: Tensor, mat1: Tensor, mat2: Tensor, *, beta: float = 1, alpha: float = 1
) -> Tensor:
    return mat1.new_empty(checks.check_addmm(input, mat1, mat2))


def _addmm_dtype(
    input: Tensor,
    mat1: Tensor,
    mat2: Tensor,
    out_dtype: torch.dtype,
    *,
    beta: float = 1,
    alpha: float = 1,
) -> Tensor:
    shape = checks.check_addmm(input, mat1, mat2, out_dtype=out_dtype)
    return mat1.new_empty(shape, dtype=out_dtype)


def _weight_and_bias_gradient(grad: Tensor, input: Tensor) -> tuple[Tensor, Tensor]:
    columns = grad.shape[1]
    return grad.new_empty((columns, input.shape[1])), grad.new_empty((columns,))


def _scaled_dot_product_attention(
    query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any
) -> Tensor:
    op = "scaled_dot_product_attention"
    shape = attention_checks.check_attention(op, query, key, value, Options(*args, **kwargs))
    return query.new_empty_strided(shape.out, output_strides(query, shape.out))


def _attention_forward(op: str) -> Callable[..., Any]:
    def fake(
        query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        options = attention_checks.options_of(op, *args, **kwargs)
        shape = attention_checks.check_attention(op, query, key, value, options)
        out = query.new_empty_strided(
            shape.out, output_strides(query, shape.out), dtype=attention_checks.out_dtype(query)
        )
        return out, query.new_empty(shape.logsumexp, dtype=attention_checks.saved_dtype(query))

    return fake


def _attention_backward(op: str) -> Callable[..., Any]:
    def fake(
        grad_out: Tensor,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        out: Tensor,
        logsumexp: Tensor,
        *args: Any,
        **kwargs: Any,
    ) -> tuple[Tensor, Tensor, Tensor]:
        options = attention_checks.options_of(op, *args, **kwargs)
        attention_checks.check_attention(
            op, query, key, value, options, grad_out=grad_out, out=out, logsumexp=logsumexp
        )
        dq, dk, dv = (
            x.new_empty_strided(
                x.shape, output_strides(x, x.shape), dtype=attention_checks.out_dtype(x)
            )
            for x in (query, key, value)
        )
        return dq, dk, dv

    return fake


def _attention_sinks_gradient(
    grad_out: Tensor, out: Tensor, logsumexp: Tensor, sinks: Tensor
) -> Tensor:
    return sinks.new_empty(sinks.shape)


def register(library: torch.library.Library) -> None:
    fakes: dict[str, Callable[..., Any]] = {
        "matmul": _matmul,
        "linear": _linear,
        "linear_activation": _linear_activation,
        "addmm": _addmm,
        "addmm_dtype": _addmm_dtype,
        "scaled_dot_product_attention": _scaled_dot_product_attention,
        **{op: _attention_forward(op) for op in ("attention_forward", raw_ops.E4M3)},
        **{op: _attention_backward(op) for op in ("attention_backward", raw_ops.E4M3_BACKWARD)},
    }
    for op, fake in fakes.items():
        for name in raw_ops.raw_names(op):
            operators.register_fake(f"cubin::{name}", fake, library)
    operators.register_fake("cubin::_weight_and_bias_gradient", _weight_and_bias_gradient, library)
    operators.register_fake("cubin::_attention_sinks_gradient", _attention_sinks_gradient, library)
