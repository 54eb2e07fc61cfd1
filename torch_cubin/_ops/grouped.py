"""grouped_matmul (csrc/ops/grouped/grouped.h): fake kernel, derivatives, batching rule.

Rows and contraction are each other's derivatives, so those of every order are calls of the op. With
options a call that is differentiated is composed of the op without them, and of PyTorch's ops.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from torch_cubin._ops import autograd, checks, fused_autograd, raw_ops
from torch_cubin._ops.batch_invariant import is_batch_invariant
from torch_cubin._ops.raw_ops import GROUPED as NAME
from torch_cubin._ops.vmap import one_by_one, register_rule
from torch_cubin._pytorch import operators, transforms

grouped = torch.ops.cubin._grouped_matmul_autograd.default


class _Options(NamedTuple):
    """The optional arguments, in the op's order."""

    bias: Tensor | None = None
    scale: Tensor | None = None
    rows: Tensor | None = None
    out_rows: Tensor | None = None
    activation: str = "none"


_NO_OPTIONS = _Options()
_TENSORS = 3 + len(_NO_OPTIONS) - 1  # arguments that are tensors


def _check(
    mat_a: Tensor,
    mat_b: Tensor,
    offs: Tensor,
    options: _Options = _NO_OPTIONS,
    dims: Sequence[int | None] = (None,) * _TENSORS,
) -> list[Any]:
    """Checks the arguments and returns the output's shape."""
    *own, activation = options
    named: dict[str, Tensor | None] = {"mat_a": mat_a, "mat_b": mat_b, "offs": offs}
    named |= dict(zip(_Options._fields, own, strict=False))
    mapped = dict(zip(named, dims, strict=True))
    tensors = {name: tensor for name, tensor in named.items() if tensor is not None}
    for name, tensor in tensors.items():
        checks.check_dense(NAME, name, tensor)
    described = {name: checks.described(x, mapped[name]) for name, x in tensors.items()}
    checks.ask("grouped", {"tensors": described, "activation": activation})
    sizes = {name: checks.shape_of(tensor, mapped[name]) for name, tensor in tensors.items()}
    a, b, ends = sizes["mat_a"], sizes["mat_b"], sizes["offs"]
    checks.unify(a[1], b[-2])
    if len(b) == 2:
        return [ends[0], a[0], b[1]]
    checks.unify(ends[0], b[0])
    (rows,) = sizes.get("rows", a[:1])
    for name in ("out_rows", "scale"):
        if name in sizes:
            checks.unify(sizes[name][0], rows)
    return [rows, b[2] if activation == "none" else b[2] // 2]


def _fake(mat_a: Tensor, mat_b: Tensor, offs: Tensor, zero_rest: bool, *options: Any) -> Tensor:
    return mat_a.new_empty(_check(mat_a, mat_b, offs, _Options(*options)))


def _rows_of(x: Tensor, numbers: Tensor) -> Tensor:
    """x[numbers], and zeros for numbers that are no rows of x."""
    count = x.shape[0]
    known = numbers.long().where((numbers >= 0) & (numbers < count), count)
    return F.pad(x, (0, 0, 0, 1))[known]


def _belongs_to_group(offs: Tensor, count: int) -> Tensor:
    """Of each row; true for all rows if an end is wrong, so that their NaN is stored."""
    ends = F.pad(offs, (1, 0))
    wrong = (ends[1:] < ends[:-1]).any()
    return (torch.arange(count, device=offs.device) < ends[-1]) | wrong


def _composed(mat_a: Tensor, mat_b: Tensor, offs: Tensor, options: _Options) -> Tensor:
    """The op with options, of ops that have derivatives (grouped_by_steps() in csrc/ops/grouped).

    Indexing is differentiated in a fixed order, which index_select is not.
    """
    a = mat_a if options.rows is None else _rows_of(mat_a, options.rows)
    out: Tensor = grouped(a, mat_b, offs, True)
    count = out.shape[0]
    if options.bias is not None:
        numbers = torch.arange(count, device=out.device, dtype=offs.dtype)
        out = out + _rows_of(options.bias, torch.searchsorted(offs, numbers, right=True))
    if options.activation != "none":
        gates, ups = out.chunk(2, -1)
        out = autograd.ACTIVATIONS[options.activation](gates) * ups
    if options.scale is not None:
        out = (out * options.scale.unsqueeze(-1)).to(mat_a.dtype)
    if options.out_rows is not None:
        known = (options.out_rows >= 0) & (options.out_rows < count)
        known = known & _belongs_to_group(offs, count)
        places = options.out_rows.long().where(known, count)
        out = out.new_zeros(count + 1, out.shape[1]).index_put((places,), out)[:count]
    return out


class _GroupedMatmul(transforms.SingleLevelFunction):
    @staticmethod
    def forward(
        ctx: Any,
        made: list[Tensor],
        mat_a: Tensor,
        mat_b: Tensor,
        offs: Tensor,
        zero_rest: bool,
    ) -> Tensor:
        _, needs_a, needs_b, *_ = ctx.needs_input_grad
        ctx.set_materialize_grads(False)
        ctx.batch_invariant = is_batch_invariant()
        ctx.contracts, ctx.zero_rest = mat_b.dim() == 2, zero_rest
        ctx.b_is_transposed = not ctx.contracts and mat_b.stride(-2) == 1
        ctx.save_for_backward(mat_a if needs_b else None, mat_b if needs_a else None, offs)
        ctx.save_for_forward(mat_a, mat_b, offs)
        made.append(autograd.call_below_autograd(grouped, mat_a, mat_b, offs, zero_rest))
        return made[0]

    @staticmethod
    @autograd._as_forward
    def backward(ctx: Any, grad: Tensor | None) -> tuple[Tensor | None, ...]:
        mat_a, mat_b, offs = ctx.saved_tensors
        _, needs_a, needs_b, *_ = ctx.needs_input_grad
        grad_a = grad_b = None
        if grad is not None and needs_a:
            # Zero where the operand belongs to no group.
            if ctx.contracts:
                grad_a = grouped(mat_b, grad.mT, offs, True).mT
            else:
                grad_a = grouped(grad, mat_b.mT, offs, True)
        if grad is not None and needs_b:
            if ctx.b_is_transposed:  # as mat_b is, so that autograd copies it to no other layout
                grad_b = grouped(grad.mT, mat_a, offs, True).mT
            else:
                grad_b = grouped(mat_a.mT, grad, offs, True)
        return None, grad_a, grad_b, None, None

    @staticmethod
    def jvp(
        ctx: Any, _: None, a_t: Tensor | None, b_t: Tensor | None, *rest: None
    ) -> Tensor | None:
        with autograd._outer_levels():
            mat_a, mat_b, offs = ctx.saved_tensors
            mat_a, mat_b = autograd._primal(mat_a), autograd._primal(mat_b)
            parts = [
                grouped(a, b, offs, ctx.zero_rest)
                for a, b in ((a_t, mat_b), (mat_a, b_t))
                if a is not None and b is not None
            ]
            return functools.reduce(torch.add, parts) if parts else None


def _autograd(mat_a: Tensor, mat_b: Tensor, offs: Tensor, zero_rest: bool) -> Any:
    def op(*tensors: Tensor) -> Tensor:
        return grouped(*tensors, zero_rest)

    return autograd.apply(_GroupedMatmul, op, mat_a, mat_b, offs, rest=(zero_rest,))


def _with_options(
    mat_a: Tensor, mat_b: Tensor, offs: Tensor, zero_rest: bool, *options: Any
) -> Any:
    own = _Options(*options)
    _check(mat_a, mat_b, offs, own)
    return _composed(mat_a, mat_b, offs, own)


def _rule(op: Any) -> Callable[..., Any]:
    def rule(
        info: Any,
        dims: tuple[int | None, ...],
        mat_a: Tensor,
        mat_b: Tensor,
        offs: Tensor,
        zero_rest: bool,
        *rest: Any,
    ) -> tuple[Tensor, int]:
        *tensors, activation = options = _Options(*rest)
        of_options = dims[4 : 4 + len(tensors)]
        own_dims = *dims[:3], *of_options, *(None,) * (len(tensors) - len(of_options))
        _check(mat_a, mat_b, offs, options, own_dims)

        def one(*own: Tensor) -> Tensor:
            return op(*own[:3], zero_rest, *own[3:], activation)

        return one_by_one(one, info.batch_size, (mat_a, mat_b, offs, *tensors), own_dims)

    return rule


def _kernel() -> Callable[..., Any]:
    composed = fused_autograd.kernel(raw_ops.overload(f"_{NAME}_autograd"), _with_options)

    def kernel(*args: Any) -> Any:
        has_options = tuple(args[4:]) != _NO_OPTIONS[: len(args) - 4]
        return composed(*args) if has_options else _autograd(*args[:4])

    return kernel


def register(library: torch.library.Library) -> None:
    for name in raw_ops.raw_names(NAME):
        operators.register_fake(f"cubin::{name}", _fake, library)
        register_rule(library, name, _rule)
    if transforms.DERIVATIVES.available:  # else no_derivatives.py refuses them
        library.impl(f"_{NAME}_autograd", _kernel(), "Autograd")
