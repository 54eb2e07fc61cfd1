# The table of the torch functions that are served. For each, a handler checks whether the operators
# of torch.ops.cubin support the call, and makes it; if not, it returns the reason, a string. It
# counts nothing and enters no mode (scope.py does).
"""Decides which torch functions are served from cubins, and converts their calls to ours."""

import math
import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F

from torch_cubin._drop_in import einsum, scaled
from torch_cubin._drop_in.why_not import (
    PLAIN,
    SHAPES,
    unlike,
    why_no_mask,
    why_not,
    why_not_with,
)
from torch_cubin._pytorch import modes, products
from torch_cubin._pytorch.compiler import assume_constant_result

_cubin_matmul = torch.ops.cubin.matmul.default
_cubin_linear = torch.ops.cubin.linear.default
_cubin_addmm = torch.ops.cubin.addmm.default
_cubin_linear_cross_entropy = torch.ops.cubin.linear_cross_entropy.default
_cubin_grouped = torch.ops.cubin.grouped_matmul.default
_cubin_attention = torch.ops.cubin.scaled_dot_product_attention.default

Result = torch.Tensor | str
Handler = Callable[..., Result]


def _matmul(
    input: Any = None, other: Any = None, *rest: Any, out: Any = None, **others: Any
) -> Result:
    reason = unlike(rest, out, others) or why_not(input, other)
    if reason:
        return reason
    left, right = input.shape, other.shape
    if not left or not right or left[-1] != right[max(len(right) - 2, 0)]:
        return SHAPES
    return _cubin_matmul(input, other)


def _rmatmul(self: Any = None, other: Any = None, *rest: Any, **others: Any) -> Result:
    return _matmul(other, self, *rest, **others)


# Autocast lowers these functions on no device, or only on CUDA, whereas it lowers matmul
# everywhere.
_AUTOCAST = "autocast, whose rule for it is not matmul's"


def _of_dims(
    input_dims: int, other_dims: int, other_name: str, lowered_on: tuple[str, ...] = ("cpu", "cuda")
) -> Handler:
    """A product of operands with fixed numbers of dims: mm, bmm, mv, dot.

    `lowered_on`: the devices on which autocast treats it like matmul.
    """

    def handler(
        input: Any = None, other: Any = None, *rest: Any, out: Any = None, **others: Any
    ) -> Result:
        if other is None:
            other = others.pop(other_name, None)
        reason = unlike(rest, out, others) or why_not(input, other)
        if reason:
            return reason
        device = input.device.type
        if device not in lowered_on and torch.is_autocast_enabled(device):
            return _AUTOCAST
        if input.dim() != input_dims or other.dim() != other_dims:
            return SHAPES
        if input.shape[-1] != other.shape[max(other_dims - 2, 0)]:
            return SHAPES
        if input_dims == 3 and input.shape[0] != other.shape[0]:
            return SHAPES
        return _cubin_matmul(input, other)

    return handler


def _inner(
    input: Any = None, other: Any = None, *rest: Any, out: Any = None, **others: Any
) -> Result:
    reason = unlike(rest, out, others) or why_not(input, other)
    if reason:
        return reason
    if torch.is_autocast_enabled(input.device.type):
        return _AUTOCAST
    if input.dim() == 0 or other.dim() == 0 or input.shape[-1] != other.shape[-1]:
        return SHAPES
    if other.dim() == 1:
        return _cubin_matmul(input, other)
    # NOTE: not reshape(-1, k), which is ambiguous where k == 0.
    columns = other.reshape(math.prod(other.shape[:-1]), other.shape[-1])
    product = _cubin_matmul(input, columns.t())
    return product.reshape(input.shape[:-1] + other.shape[:-1])


def _linear(
    input: Any = None, weight: Any = None, bias: Any = None, *rest: Any, **others: Any
) -> Result:
    reason = unlike(rest, None, others) or why_not(input, weight)
    if reason:
        return reason
    left, right = input.shape, weight.shape
    if not left or len(right) != 2 or left[-1] != right[1]:
        return SHAPES
    if bias is not None:
        reason = why_not_with(input, bias)
        if reason:
            return reason
        if bias.dim() != 1 or bias.shape[0] != right[0]:
            return SHAPES
    return _cubin_linear(input, weight, bias)


def _linear_cross_entropy(
    input: Any = None,
    linear_weight: Any = None,
    target: Any = None,
    *rest: Any,
    linear_bias: Any = None,
    weight: Any = None,
    reduction: str = "mean",
    ignore_index: int | None = None,
    label_smoothing: float = 0.0,
    options: Any = None,
    **others: Any,
) -> Result:
    """F.linear_cross_entropy of torch 2.13, of classes; the logits are not kept in memory."""
    reason = unlike(rest, None, others) or why_not(input, linear_weight)
    if reason:
        return reason
    if input.dtype == torch.float64 and input.is_cuda:
        return "dtype float64"
    if options is not None:
        return "options of chunks"
    if type(target) not in PLAIN or target.dtype != torch.int64:
        return "targets that are not classes"
    if not input.is_cuda and torch.is_autocast_enabled(input.device.type):
        return _AUTOCAST
    if weight is not None and weight.requires_grad:
        return "weights of classes that require grad"
    for of_class in (linear_bias, weight):
        if of_class is None:
            continue
        reason = why_not_with(input, of_class)
        if reason:
            return reason
        if of_class.shape != linear_weight.shape[:1]:
            return SHAPES
    shapes = input.dim() in (1, 2) and linear_weight.dim() == 2
    if not shapes or input.shape[-1] != linear_weight.shape[-1]:
        return SHAPES
    if target.shape != input.shape[:-1] or target.device != input.device:
        return SHAPES
    if reduction not in ("mean", "sum", "none") or not 0 <= label_smoothing <= 1:
        return "a reduction or label_smoothing that is not one"
    return _cubin_linear_cross_entropy(
        *(input, linear_weight, target),
        linear_bias=linear_bias,
        weight=weight,
        reduction=reduction,
        ignore_index=-100 if ignore_index is None else ignore_index,
        label_smoothing=label_smoothing,
    )


def _grouped(
    input: Any = None,
    mat2: Any = None,
    offs: Any = None,
    bias: Any = None,
    out_dtype: Any = None,
    *rest: Any,
    mat_a: Any = None,
    mat_b: Any = None,
    **others: Any,
) -> Result:
    """torch._grouped_mm, or F.grouped_mm, whose operands are mat_a and mat_b."""
    a, b = (input if mat_a is None else mat_a), (mat2 if mat_b is None else mat_b)
    reason = unlike(rest, None, others) or why_not(a, b)
    if reason:
        return reason
    device = a.device.type
    if torch.is_autocast_enabled(device):
        return _AUTOCAST
    if bias is not None:
        return "a bias"
    if out_dtype is not None and out_dtype != a.dtype:
        return "an out_dtype other than the operands'"
    if min(a.dim(), b.dim()) < 2 or max(a.dim(), b.dim()) > 3 or a.shape[-1] != b.shape[-2]:
        return SHAPES
    if a.dim() == b.dim() == 3:
        return SHAPES if offs is not None or a.shape[0] != b.shape[0] else _cubin_grouped(a, b)
    if type(offs) is not torch.Tensor or offs.dim() != 1 or offs.dtype != torch.int32:
        return "offs that it does not take"
    if offs.device != a.device:
        return "tensors on different devices"
    if a.dim() != b.dim() and offs.shape[0] != (a if a.dim() == 3 else b).shape[0]:
        return SHAPES
    if device == "cuda" and a.itemsize != 2:
        return "groups of a wide dtype"
    return _cubin_grouped(a, b, offs=offs)


def _attention(
    query: Any = None,
    key: Any = None,
    value: Any = None,
    attn_mask: Any = None,
    dropout_p: Any = 0.0,
    is_causal: Any = False,
    *rest: Any,
    scale: Any = None,
    enable_gqa: Any = False,
    **others: Any,
) -> Result:
    reason = unlike(rest, None, others) or why_not(query, key) or why_not_with(query, value)
    if reason:
        return reason
    if not 0 <= dropout_p <= 1:
        return "dropout_p out of range"
    q, k, v = query.shape, key.shape, value.shape
    if min(len(q), len(k), len(v)) < (3 if enable_gqa else 2):
        return SHAPES
    if k[-1] != q[-1] or k[-2] != v[-2]:
        return SHAPES
    if enable_gqa:
        if any((q[-3] if n == 0 else q[-3] % n) != 0 for n in (k[-3], v[-3])):
            return SHAPES
        leading = _broadcast(q[:-3], k[:-3], v[:-3])
        heads = q[-3:-2]
    else:
        leading = _broadcast(q[:-2], k[:-2], v[:-2])
        heads = ()
    if leading is None:
        return SHAPES
    if attn_mask is not None:
        if is_causal:
            return "a mask and is_causal"
        reason = why_no_mask(query, attn_mask)
        if reason:
            return reason
        if not _expands(attn_mask.shape, (*leading, *heads, q[-2], k[-2])):
            return SHAPES
    return _cubin_attention(
        query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
    )


def _broadcast(*shapes: torch.Size) -> list[int] | None:
    """The shape that the shapes broadcast to; None if they do not."""
    out: list[int] = []
    for shape in shapes:
        if len(shape) > len(out):
            out = [*shape[: len(shape) - len(out)], *out]
        for i in range(1, len(shape) + 1):
            # Equality is tested first, because torch.compile cannot decide whether a data-dependent
            # size is 1.
            if shape[-i] != out[-i] and shape[-i] != 1:
                if out[-i] != 1:
                    return None
                out[-i] = shape[-i]
    return out


def _add_to(
    names: tuple[str, str],
    dims: tuple[int, int],
    sum_batches: bool = False,
    lowered_on: tuple[str, ...] = ("cpu", "cuda"),
) -> Handler:
    """beta * input + alpha * (a @ b): addmm, addmv, baddbmm and, with sum_batches, addbmm."""
    gives_matrix = dims == (2, 2) or sum_batches

    def handler(
        input: Any = None,
        a: Any = None,
        b: Any = None,
        *rest: Any,
        beta: Any = 1,
        alpha: Any = 1,
        out: Any = None,
        **others: Any,
    ) -> Result:
        if a is None:
            a = others.pop(names[0], None)
        if b is None:
            b = others.pop(names[1], None)
        reason = (
            unlike(rest, out, others)
            or why_not(a, b)
            or why_not_with(a, input)
            or _factors(beta, alpha)
        )
        if reason:
            return reason
        device = a.device.type
        if device not in lowered_on and torch.is_autocast_enabled(device):
            return _AUTOCAST
        if a.dim() != dims[0] or b.dim() != dims[1]:
            return SHAPES
        if a.shape[-1] != b.shape[max(dims[1] - 2, 0)]:
            return SHAPES
        if dims[0] == 3 and a.shape[0] != b.shape[0]:
            return SHAPES
        fused = (  # the kernel adds the bias
            alpha == 1
            and beta == 1
            and gives_matrix
            and input.dim() == 1
            and input.shape[0] == b.shape[-1]
        )
        if sum_batches:
            a = a.transpose(0, 1).reshape(a.shape[1], a.shape[0] * a.shape[2])
            b = b.reshape(b.shape[0] * b.shape[1], b.shape[2])
        shape = a.shape[:-1] + b.shape[max(b.dim() - 1, 1) :]
        if not _expands(input.shape, shape):
            return SHAPES
        if fused:
            return _cubin_linear(a, b.t(), input)
        return _cubin_addmm(input, a, b, beta=beta, alpha=alpha)

    return handler


def _factors(beta: object, alpha: object) -> str | None:
    if type(beta) not in (int, float) or type(alpha) not in (int, float):
        return "beta or alpha that is no plain number"
    return None


def _expands(shape: Sequence[int], target: Sequence[int]) -> bool:
    if len(shape) > len(target):
        return False
    tail = target[len(target) - len(shape) :]
    return all(size in (wanted, 1) for size, wanted in zip(shape, tail, strict=True))


def _einsum_product(*args: Any, **others: Any) -> Result:
    if others or not args:
        return "arguments that it does not take"
    if isinstance(args[0], torch.Tensor):  # einsum(a, [0, 1], b, [1, 2], [0, 2])
        equation = einsum.equation(args[1::2], args[-1] if len(args) % 2 else None)
        operands = args[0 : len(args) - len(args) % 2 : 2]
    else:
        equation, operands = args[0], args[1:]
        if len(operands) == 1 and isinstance(operands[0], (list, tuple)):
            operands = tuple(operands[0])
    if len(operands) != 2:
        return "not two operands"
    if type(equation) is not str:
        return "arguments that it does not take"
    a, b = operands
    reason = why_not(a, b)
    if reason:
        return reason
    plan, number = _einsum_plan(equation, a.dim(), b.dim())
    if plan is None:
        return einsum.REASONS[number]
    if plan.swapped:
        a, b = b, a
    a = a.permute(plan.left)  # [batch, rows, inner]
    b = b.permute(plan.right)  # [batch, inner, columns]
    batch, rows, inner = _split(a.shape, plan.batch, plan.rows)
    batch_b, inner_b, columns = _split(b.shape, plan.batch, plan.inner)
    if inner != inner_b:  # einsum broadcasts a size of 1 here too
        return "an inner size of 1 that is broadcast"
    # torch.einsum then multiplies elementwise, and autocast does not change the dtype of that.
    if torch.is_autocast_enabled(a.device.type) and all(size == 1 for size in inner):
        return _AUTOCAST
    a = a.reshape((*batch, math.prod(rows), math.prod(inner)))
    b = b.reshape((*batch_b, math.prod(inner), math.prod(columns)))
    product = _cubin_matmul(a, b)
    product = product.reshape((*product.shape[: plan.batch], *rows, *columns))
    return product.permute(plan.output)


def _split(shape: torch.Size, first: int, second: int) -> tuple[torch.Size, ...]:
    return shape[:first], shape[first : first + second], shape[first + second :]


_plans: dict[tuple[str, int, int], tuple[einsum.Plan | None, int]] = {}


# torch.compile folds this call to a constant: the result depends only on these arguments. It is a
# number, because a string that comes out of such a function cannot be tested in a trace.
@assume_constant_result
def _einsum_plan(equation: str, dims_a: int, dims_b: int) -> tuple[einsum.Plan | None, int]:
    key = (equation, dims_a, dims_b)
    found = _plans.get(key)
    if found is None:
        if len(_plans) >= 1000:  # equations that a program makes and uses once
            _plans.clear()
        plan = einsum.plan(equation, (dims_a, dims_b))
        found = (None, einsum.REASONS.index(plan)) if isinstance(plan, str) else (plan, 0)
        _plans[key] = found
    return found


_mm = _of_dims(2, 2, "mat2")
_bmm = _of_dims(3, 3, "mat2")
_mv = _of_dims(2, 1, "vec", ("cuda",))
_dot = _of_dims(1, 1, "tensor", ())
_vdot = _of_dims(1, 1, "other", ())
_addmm = _add_to(("mat1", "mat2"), (2, 2))
_addmv = _add_to(("mat", "vec"), (2, 1), lowered_on=("cuda",))
_baddbmm = _add_to(("batch1", "batch2"), (3, 3))
_addbmm = _add_to(("batch1", "batch2"), (3, 3), sum_batches=True)

_IN_PLACE = "in place"
_NO_KERNEL = "no kernel for it in this version"
_OPERATOR = "called as an operator"
_FUSED = "PyTorch fuses the whole layer"

# Maps the function that a mode receives to its name in report(), and to its handler or the reason
# why it has none. Functions that are not matrix products are not listed and not reported.
SERVED: dict[Callable[..., object], tuple[str, Handler | str]] = {
    **{function: (name, _NO_KERNEL) for function, name in products.functions().items()},
    **{operator: (name, _OPERATOR) for operator, name in products.operators().items()},
    **{
        getattr(owner, function): (f"{name}.{function}", _grouped)
        for name, owner, function in (
            ("torch", torch, "_grouped_mm"),
            ("torch.nn.functional", F, "grouped_mm"),
        )
        if hasattr(owner, function)
    },
    **{
        getattr(torch, function): (f"torch.{function}", handler)
        for function, handler in (
            ("_scaled_mm", scaled.scaled_mm_v1),
            ("_scaled_mm_v2", scaled.scaled_mm_v2),
            ("_scaled_grouped_mm", scaled.scaled_grouped_mm_v1),
            ("_scaled_grouped_mm_v2", scaled.scaled_grouped_mm_v2),
        )
        if hasattr(torch, function)
    },
    F.linear: ("torch.nn.functional.linear", _linear),
    **{
        getattr(F, name): (f"torch.nn.functional.{name}", _linear_cross_entropy)
        for name in ("linear_cross_entropy",)
        if hasattr(F, name)
    },
    torch.matmul: ("torch.matmul", _matmul),
    torch.linalg.matmul: ("torch.linalg.matmul", _matmul),
    torch.Tensor.matmul: ("Tensor.matmul (@)", _matmul),
    torch.Tensor.__matmul__: ("Tensor.matmul (@)", _matmul),
    operator.matmul: ("Tensor.matmul (@)", _matmul),  # torch.export traces @ as this
    operator.imatmul: ("Tensor.matmul (@)", _matmul),
    torch.Tensor.__rmatmul__: ("Tensor.__rmatmul__", _rmatmul),
    torch.functional.einsum: ("torch.einsum", _einsum_product),
    **{function: (name, _FUSED) for name, function in modes.fused_layers.items()},
    F.scaled_dot_product_attention: (
        "torch.nn.functional.scaled_dot_product_attention",
        _attention,
    ),
}
for _name, _handler in {
    "mm": _mm,
    "bmm": _bmm,
    "mv": _mv,
    "dot": _dot,
    "vdot": _vdot,
    "inner": _inner,
    "addmm": _addmm,
    "addmv": _addmv,
    "addbmm": _addbmm,
    "baddbmm": _baddbmm,
}.items():
    SERVED[getattr(torch, _name)] = (f"torch.{_name}", _handler)
    SERVED[getattr(torch.Tensor, _name)] = (f"Tensor.{_name}", _handler)
for _name in ("addmm_", "addmv_", "addbmm_", "baddbmm_"):
    SERVED[getattr(torch.Tensor, _name)] = (f"Tensor.{_name}", _IN_PLACE)
for _name in ("lstm", "gru", "rnn_tanh", "rnn_relu"):
    SERVED[getattr(torch, _name)] = (f"torch.{_name}", _FUSED)

products.register()
