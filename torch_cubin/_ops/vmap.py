"""Batching rules: one call of the same op for the whole batch, without materialising copies.

The rules are registered for the raw op and for its autograd variant, and call the op that they
belong to, so that an outer transform still sees an op that it can differentiate.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from torch_cubin._ops import attention_checks, checks, raw_ops
from torch_cubin._ops.attention_checks import PER_HEAD_OPTIONS, Options
from torch_cubin._ops.autograd import ACTIVATIONS
from torch_cubin._pytorch import transforms

Dims = tuple[int | None, ...]


def front(tensor: Tensor, dim: int | None) -> Tensor:
    """Moves the batch dimension to the front; inserts one of size 1 if there is none."""
    return tensor.unsqueeze(0) if dim is None else tensor.movedim(dim, 0)


def _pad(tensor: Tensor, rank: int) -> Tensor:
    """Inserts sizes of 1 after the batch dimension, up to `rank` dimensions."""
    return tensor[(slice(None),) + (None,) * (rank - tensor.dim())]


def batched_matmul(op: Any, self: Tensor, other: Tensor, dims: Dims) -> tuple[Tensor, int]:
    self_dim, other_dim = dims
    self_shape, other_shape = checks.shape_of(self, self_dim), checks.shape_of(other, other_dim)
    checks.check_matmul(self, other, dims)  # before padding hides errors
    if other_dim is None and len(other_shape) <= 2:
        return op(front(self, self_dim), other), 0  # the batch is more rows
    if self_dim is None and other_dim is not None and len(other_shape) == 1:
        out = op(self, other.movedim(other_dim, -1))  # the batch is columns
        return out, out.dim() - 1
    a, b = front(self, self_dim), front(other, other_dim)
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


def batched_linear(
    op: Any, matmul: Any, input: Tensor, weight: Tensor, bias: Tensor | None, dims: Dims
) -> tuple[Tensor, int | None]:
    input_dim, weight_dim, bias_dim = dims
    checks.check_linear(input, weight, bias, dims)
    if weight_dim is None and bias_dim is None:
        return op(front(input, input_dim), weight, bias), 0
    if weight_dim is None:
        dim = None if input_dim is None else 0
        out = op(input if dim is None else front(input, input_dim), weight)
    else:
        # (n, k) with a batch dimension becomes (k, n) with one: its dimensions in reverse order.
        matrix = weight.permute(*range(weight.dim() - 1, -1, -1))
        matrix_dim = weight.dim() - 1 - weight_dim % weight.dim()
        out, dim = batched_matmul(matmul, input, matrix, (input_dim, matrix_dim))
    if bias is None:
        return out, dim
    # NOTE: no kernel adds a separate bias to each batch, so in 16 bits the product is rounded
    # before the sum, as in torch's rule for F.linear. The bias as an additional column of the
    # matrix would be rounded once, but would copy every operand.
    out = front(out, dim)
    return out + _pad(front(bias, bias_dim), out.dim()), 0


def _batched_addmm(
    op: Any,
    input: Tensor,
    mat1: Tensor,
    mat2: Tensor,
    dims: Dims,
    factors: dict[str, float],
    out_dtype: torch.dtype | None = None,
) -> tuple[Tensor, int]:
    """Runs all products as batched matrices; the batch dims of the sum become outer dims."""
    input_dim, mat1_dim, mat2_dim = dims
    mat1_shape, mat2_shape = checks.shape_of(mat1, mat1_dim), checks.shape_of(mat2, mat2_dim)
    shape = checks.check_addmm(input, mat1, mat2, dims, out_dtype)
    addend, a, b = front(input, input_dim), front(mat1, mat1_dim), front(mat2, mat2_dim)
    if mat1_dim is None and mat2_dim is None:
        a = a.expand(addend.shape[0], *a.shape[1:])
    addend = _pad(addend, len(shape) + 1)
    if len(mat1_shape) == 1:
        a = a.unsqueeze(-2)
        addend = addend.unsqueeze(-2 if len(mat2_shape) > 1 else -1)
    if len(mat2_shape) == 1:
        b, addend = b.unsqueeze(-1), addend.unsqueeze(-1)
    rank = max(a.dim(), b.dim())
    args = () if out_dtype is None else (out_dtype,)
    out = op(_pad(addend, rank), _pad(a, rank), _pad(b, rank), *args, **factors)
    if len(mat2_shape) == 1:
        out = out.squeeze(-1)
    if len(mat1_shape) == 1:
        out = out.squeeze(-1 if len(mat2_shape) == 1 else -2)
    return out, 0


def _addmm_rule(op: Any) -> Any:
    def rule(
        info: Any, in_dims: Dims, input: Tensor, mat1: Tensor, mat2: Tensor, **factors: float
    ) -> tuple[Tensor, int]:
        return _batched_addmm(op, input, mat1, mat2, in_dims[:3], factors)

    return rule


def _addmm_dtype_rule(op: Any) -> Any:
    def rule(
        info: Any,
        in_dims: Dims,
        input: Tensor,
        mat1: Tensor,
        mat2: Tensor,
        out_dtype: torch.dtype,
        **factors: float,
    ) -> tuple[Tensor, int]:
        return _batched_addmm(op, input, mat1, mat2, in_dims[:3], factors, out_dtype)

    return rule


def _activation_rule(op: Any, linear: Any, matmul: Any) -> Any:
    def rule(
        info: Any,
        in_dims: Dims,
        input: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        activation: str,
    ) -> tuple[Tensor, int | None]:
        def fused(*tensors: Tensor | None) -> Tensor:
            return op(*tensors, activation)

        dims = in_dims[:3]
        checks.check_activation(activation)
        if dims[1] is None and dims[2] is None:
            return batched_linear(fused, matmul, input, weight, bias, dims)
        # No kernel has a weight and a bias per batch, so the product is rounded before the sum.
        out, dim = batched_linear(linear, matmul, input, weight, bias, dims)
        return (out if activation == "none" else ACTIVATIONS[activation](out)), dim

    return rule


def _matmul_rule(op: Any) -> Any:
    def rule(info: Any, in_dims: Dims, self: Tensor, other: Tensor) -> tuple[Tensor, int]:
        return batched_matmul(op, self, other, in_dims)

    return rule


def _linear_rule(op: Any, matmul: Any) -> Any:
    def rule(
        info: Any, in_dims: Dims, input: Tensor, weight: Tensor, bias: Tensor | None = None
    ) -> tuple[Tensor, int | None]:
        dims = (*in_dims, None)[:3]  # an omitted bias has no entry
        return batched_linear(op, matmul, input, weight, bias, dims)

    return rule


def _unpad(tensor: Tensor, rank: int) -> Tensor:
    """Removes sizes of 1 after the batch dimension, down to `rank` dimensions."""
    return tensor[(slice(None),) + (0,) * (tensor.dim() - 1 - rank)]


_BACKWARD = ("grad_out", "query", "key", "value", "out", "logsumexp")


def _batched_attention(
    op: Any, size: int, tensors: list[Tensor], dims: Dims, options: Options, rest: Any
) -> tuple[Any, Any]:
    """A batch of `size` calls; `rest`, Options too, holds the batch dimensions of `options`."""
    name = op.name().removeprefix("cubin::_").removesuffix("_autograd")
    backward = name == "attention_backward"
    names = _BACKWARD if backward else _BACKWARD[1:4]
    named, mapped = dict(zip(names, tensors, strict=True)), dict(zip(names, dims, strict=True))
    shape = attention_checks.check_attention(
        name, options=options, dims={**mapped, **rest._asdict()}, **named
    )
    mask = options.attn_mask
    if not _is_one_call(options, rest):

        def one(*args: Any) -> Any:
            own = Options(*args[len(tensors) :])
            return op(*args[: len(tensors)], *own.positional(), **own.named())

        return one_by_one(one, size, (*tensors, *options), (*dims, *rest))

    rank = max(3, len(shape.out))  # with a dim of heads; otherwise the batch would become it
    ranks = [rank] * len(tensors)
    if backward:
        ranks[-1] = rank - 1  # logsumexp
    folded = [
        _pad(tensor.expand(size, *tensor.shape) if dim is None else tensor.movedim(dim, 0), n + 1)
        for tensor, dim, n in zip(tensors, dims, ranks, strict=True)
    ]
    if mask is not None and rest.attn_mask is not None:
        mask = _pad(mask.movedim(rest.attn_mask, 0), rank + 1)
    options = options._replace(attn_mask=mask, dropout_seed=None)
    results = op(*folded, *options.positional(), **options.named())
    if isinstance(results, Tensor):
        return _unpad(results, len(shape.out)), 0
    ranks = [tensor.dim() - (dim is not None) for tensor, dim in zip(tensors, dims, strict=True)]
    ranks = ranks[1:4] if backward else [len(shape.out), len(shape.logsumexp)]
    pairs = zip(results, ranks, strict=True)
    return tuple(_unpad(result, n) for result, n in pairs), (0,) * len(results)


def _is_one_call(options: Options, rest: Options) -> bool:
    """Whether the batch can be one more dimension of the tensors.

    Dropout is a function of the seed and of the position of a weight in the tensors: with a seed
    for all, or one for each, every element needs its own call. So do packed sequences, and options
    with one value per head.
    """
    per_head = [getattr(options, name) for name in PER_HEAD_OPTIONS]
    return (
        options.dropout_p == 0
        and not options.packed
        and all(getattr(rest, name) is None for name in PER_HEAD_OPTIONS)
        and all(tensor is None or tensor.dim() == 1 for tensor in per_head)
    )


def one_by_one(op: Any, size: int, args: Sequence[Any], dims: Sequence[int | None]) -> Any:
    """Calls the op for each element of the batch."""
    results = []
    for i in range(size):
        own = (x if dim is None else x.select(dim, i) for x, dim in zip(args, dims, strict=True))
        results.append(op(*own))
    if isinstance(results[0], Tensor):
        return torch.stack(results), 0
    stacked = tuple(torch.stack(parts) for parts in zip(*results, strict=True))
    return stacked, (0,) * len(stacked)


_NO_DIMS = Options._make([None] * len(Options._fields))


def _under_autocast(name: str, args: Any, kwargs: Any) -> tuple[Any, Any]:
    if not (torch.is_autocast_enabled("cuda") or torch.is_autocast_enabled("cpu")):
        return args, kwargs
    from torch_cubin._ops import autocast

    return autocast.cast_for_vmap(name, args, kwargs)


def _attention_kernel(name: str) -> Any:
    """A kernel for the FuncTorchBatched key: register_vmap takes no keyword-only tensors."""
    count = 6 if "backward" in name else 3

    def call(*operands: Any) -> Any:
        *args, kwargs = operands
        return raw_ops.overload(name)(*args, **kwargs)

    def rule(info: Any, in_dims: tuple[Any, ...], *operands: Any) -> tuple[Any, Any]:
        *args, kwargs = operands
        *dims, named_dims = in_dims
        names = Options._fields[: len(dims) - count]
        rest = _NO_DIMS._replace(**dict(zip(names, dims[count:], strict=True)), **named_dims)
        options = Options(*args[count:], **kwargs)
        tensors, own_dims = list(args[:count]), tuple(dims[:count])
        return _batched_attention(
            raw_ops.overload(name), info.batch_size, tensors, own_dims, options, rest
        )

    def kernel(keyset: Any, *args: Any, **kwargs: Any) -> Any:
        args, kwargs = _under_autocast(name, args, kwargs)
        return transforms.vmap_helper(transforms.current_interpreter(), rule, call, *args, kwargs)

    return kernel


@functools.cache
def _found(name: str, rule_of: Callable[[Any], Any]) -> tuple[Any, Any]:
    op = raw_ops.overload(name)
    return rule_of(op), op


def register_rule(library: torch.library.Library, name: str, rule_of: Callable[[Any], Any]) -> None:
    """torch.library.register_vmap(), but the op is looked up, and its rule made, at the first call:
    for all ops of ours, that takes as long as a tenth of the import."""
    if not transforms.VMAP_OF_ATTENTION.available:
        rule = rule_of(raw_ops.overload(name))
        torch.library.register_vmap(f"cubin::{name}", rule, lib=library)
        return

    def kernel(keyset: Any, *args: Any, **kwargs: Any) -> Any:
        args, kwargs = _under_autocast(name, args, kwargs)
        interpreter = transforms.current_interpreter()
        return transforms.vmap_helper(interpreter, *_found(name, rule_of), *args, **kwargs)

    library.impl(name, kernel, "FuncTorchBatched", with_keyset=True)


def of_every_op(rule: Callable[..., Any]) -> Callable[[Any], Any]:
    """For register_rule(): a rule that calls other ops than its own."""
    return lambda op: rule


def _register_products(library: torch.library.Library, names: Sequence[str]) -> None:
    """Those of raw ops or of autograd variants: a rule calls products of its own kind."""
    matmul, linear, activation, addmm, addmm_dtype = names

    def linear_rule(op: Any) -> Any:
        return _linear_rule(op, raw_ops.overload(matmul))

    def activation_rule(op: Any) -> Any:
        return _activation_rule(op, raw_ops.overload(linear), raw_ops.overload(matmul))

    register_rule(library, matmul, _matmul_rule)
    register_rule(library, linear, linear_rule)
    register_rule(library, activation, activation_rule)
    register_rule(library, addmm, _addmm_rule)
    register_rule(library, addmm_dtype, _addmm_dtype_rule)


def register(library: torch.library.Library) -> None:
    for names in zip(*map(raw_ops.raw_names, raw_ops.PRODUCTS), strict=True):
        _register_products(library, names)
    if not transforms.VMAP_OF_ATTENTION.available:
        return
    for name in [name for op in raw_ops.ATTENTION for name in raw_ops.raw_names(op)]:
        library.impl(name, _attention_kernel(name), "FuncTorchBatched", with_keyset=True)
