"""Batching rules: one call of the same op for the whole batch, without materialising anything.

The rules are on the raw op and on the one with derivatives, and call the op that they are of, so
that a transform further out still sees what it can differentiate.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from torch_cubin import _checks

Dims = tuple[int | None, ...]


def _logical_shape(tensor: Tensor, dim: int | None) -> list[int]:
    """The shape that the function under vmap sees."""
    shape = list(tensor.shape)
    if dim is not None:
        del shape[dim]
    return shape


def _front(tensor: Tensor, dim: int | None) -> Tensor:
    """The batch dimension first; a dimension of size 1 where there is none."""
    return tensor.unsqueeze(0) if dim is None else tensor.movedim(dim, 0)


def _pad(tensor: Tensor, rank: int) -> Tensor:
    """Sizes of 1 after the batch dimension, up to `rank` dimensions."""
    return tensor[(slice(None),) + (None,) * (rank - tensor.dim())]


def _batched_matmul(op: Any, self: Tensor, other: Tensor, dims: Dims) -> tuple[Tensor, int]:
    self_dim, other_dim = dims
    self_shape, other_shape = _logical_shape(self, self_dim), _logical_shape(other, other_dim)
    _checks.matmul_shape(self_shape, other_shape)  # before padding could hide a mistake
    if other_dim is None and len(other_shape) <= 2:
        return op(_front(self, self_dim), other), 0  # the batch is more rows
    if self_dim is None and len(other_shape) == 1:
        out = op(self, other.movedim(other_dim, -1))  # the batch is columns
        return out, out.dim() - 1
    a, b = _front(self, self_dim), _front(other, other_dim)
    if len(self_shape) == 1:
        a = a.unsqueeze(-2)
    if len(other_shape) == 1:
        b = b.unsqueeze(-1)
    rank = max(a.dim(), b.dim())
    out = op(_pad(a, rank), _pad(b, rank))
    if len(other_shape) == 1:
        out = out.squeeze(-1)
    if len(self_shape) == 1:
        out = out.squeeze(-1 if len(other_shape) == 1 else -2)
    return out, 0


def _batched_linear(
    op: Any, matmul: Any, input: Tensor, weight: Tensor, bias: Tensor | None, dims: Dims
) -> tuple[Tensor, int | None]:
    input_dim, weight_dim, bias_dim = dims
    weight_shape = _logical_shape(weight, weight_dim)
    _checks.linear_shape(_logical_shape(input, input_dim), weight_shape)
    if bias is not None:
        _checks.check_bias(weight_shape, _logical_shape(bias, bias_dim))
    if weight_dim is None and bias_dim is None:
        return op(_front(input, input_dim), weight, bias), 0
    if weight_dim is None:
        dim = None if input_dim is None else 0
        out = op(input if dim is None else _front(input, input_dim), weight)
    else:
        # (n, k) with a batch dimension becomes (k, n) with one: its dimensions in reverse order.
        matrix = weight.permute(*range(weight.dim() - 1, -1, -1))
        matrix_dim = weight.dim() - 1 - weight_dim % weight.dim()
        out, dim = _batched_matmul(matmul, input, matrix, (input_dim, matrix_dim))
    if bias is None:
        return out, dim
    # NOTE: no kernel adds a bias of its own to each batch, so in 16 bits the product is rounded
    # before the sum, as by torch's rule for F.linear. The bias as one more column of the matrix
    # would be rounded once, but would copy every operand.
    out = _front(out, dim)
    return out + _pad(_front(bias, bias_dim), out.dim()), 0


def _matmul_rule(op: Any) -> Any:
    def rule(info: Any, in_dims: Dims, self: Tensor, other: Tensor) -> tuple[Tensor, int]:
        return _batched_matmul(op, self, other, in_dims)

    return rule


def _linear_rule(op: Any, matmul: Any) -> Any:
    def rule(
        info: Any, in_dims: Dims, input: Tensor, weight: Tensor, bias: Tensor | None = None
    ) -> tuple[Tensor, int | None]:
        dims = (*in_dims, None)[:3]  # a bias left out has no entry
        return _batched_linear(op, matmul, input, weight, bias, dims)

    return rule


def register(library: torch.library.Library) -> None:
    for suffix in ("", "_autograd"):
        matmul = getattr(torch.ops.cubin, f"_matmul{suffix}").default
        linear = getattr(torch.ops.cubin, f"_linear{suffix}").default
        torch.library.register_vmap(f"cubin::_matmul{suffix}", _matmul_rule(matmul), lib=library)
        torch.library.register_vmap(
            f"cubin::_linear{suffix}", _linear_rule(linear, matmul), lib=library
        )
