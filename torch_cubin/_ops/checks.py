"""What matmul and linear require of their arguments, and the shape of what they return.

The same rules, order and messages as csrc/ops/matmul/checks.cpp, for callers whose sizes may be
symbols: the fake kernels and vmap. A test compares both.
"""

from __future__ import annotations

import json
import traceback
from collections.abc import Sequence
from typing import Any, NoReturn

import torch

from torch_cubin import errors
from torch_cubin._native import library
from torch_cubin._pytorch import compiler, operators

MAX_DIMS = 64  # kMaxDims in csrc/pytorch/tensor.h

_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def keep(error: BaseException) -> None:
    """Leaves the text of an error on its way to a public op where that op looks for it.

    Below torch 2.13 the C API between the op and Python loses the text. The type is lost always,
    so a text that comes from elsewhere names it: the public op raises a RuntimeError.
    """
    text = str(error)
    if not text or not isinstance(error, RuntimeError):
        text = "".join(traceback.format_exception_only(error)).strip()
    kept = text.replace("\0", "\\0").encode("utf-8", "backslashreplace")  # a C string
    library.load().torch_cubin_keep_error(kept)


def fault(object: str, problem: str, expected: str, got: str, advice: str = "") -> errors.Error:
    """An [input] error, kept for the public op."""
    error = errors.fault("input", object, problem, expected=expected, got=got, advice=advice)
    keep(error)
    return error


def fail(object: str, problem: str, expected: str, got: str, advice: str = "") -> NoReturn:
    """Raises :func:`fault`."""
    raise fault(object, problem, expected, got, advice)


def shape_text(shape: Sequence[int]) -> str:
    """(2, 3), without the torch.Size around it."""
    return "(" + ", ".join(map(str, shape)) + (",)" if len(shape) == 1 else ")")


def dtype_name(tensor: torch.Tensor) -> str:
    """bfloat16, without the torch. before it."""
    return str(tensor.dtype).removeprefix("torch.")


def require(equal: bool | torch.SymBool, *details: str) -> None:
    """Fails unless sizes agree; a symbol that decides it becomes a guard or a run-time check."""
    if isinstance(equal, bool):
        if not equal:
            fail(*details)
    else:
        operators.check(equal, fault(*details))


def shape_of(tensor: torch.Tensor, mapped: int | None) -> list[int]:
    """The shape that a function under vmap sees; `mapped`: the dim that it does not see."""
    sizes = list(tensor.shape)
    if mapped is not None:
        del sizes[mapped]
    return sizes


def described(tensor: torch.Tensor, mapped: int | None = None) -> dict[str, Any]:
    """A tensor's metadata as csrc/pytorch/described_tensor.h reads it."""
    strides = list(tensor.stride())
    if mapped is not None:
        del strides[mapped]
    return {
        "dtype": dtype_name(tensor),
        "device": str(tensor.device),
        "sizes": shape_of(tensor, mapped),
        "strides": strides,
    }


def is_symbol(value: Any) -> bool:
    return isinstance(value, (torch.SymInt, torch.SymFloat, torch.SymBool))


class _Unknown(Exception):
    """A call has a size that only run time knows."""


def _plain_number(value: Any) -> Any:
    """For json: the number with which a symbol was made, without a guard on it."""
    hint = compiler.hint_of(value)
    if hint is None:
        raise _Unknown
    return hint


def ask(function: str, call: dict[str, Any]) -> dict[str, Any] | None:
    """What C++ answers or raises for a call whose tensors it cannot read: `torch_cubin_<function>`.

    For symbols it gets the numbers with which they were made. Where some size has none it is not
    asked: then the op itself refuses, at run time, as it does for all other numbers.
    """
    try:
        text = json.dumps(call, default=_plain_number)
    except _Unknown:
        return None
    try:
        return library.check(function, text)
    except errors.Error as error:
        keep(error)
        raise


def check_dims(*tensors: torch.Tensor | None) -> None:
    """Fails for a tensor of more dimensions than the kernels' host code keeps room for."""
    for tensor in tensors:
        if tensor is not None and tensor.dim() > MAX_DIMS:
            fail(
                "a tensor argument",
                "has too many dimensions",
                f"at most {MAX_DIMS}",
                str(tensor.dim()),
                "Reshape it.",
            )


def check_dense(op: str, name: str, tensor: torch.Tensor) -> None:
    """Fails for a tensor that is more than numbers at strides; C++ is never sent one."""
    if tensor.layout is torch.strided and not tensor.is_quantized and not tensor.is_nested:
        return
    got, method = str(tensor.layout), "to_dense()"
    if tensor.is_quantized:
        got, method = "a quantized tensor", "dequantize()"
    elif tensor.is_nested:
        got, method = "a nested tensor", "to_padded_tensor(0)"
    fail(
        f"{op} argument '{name}'",
        "has an unsupported layout",
        "a dense tensor (torch.strided)",
        got,
        f"Convert it with .{method}, or use torch.{_replacement(op)}.",
    )


def _replacement(op: str) -> str:
    if op in ("matmul", "addmm"):
        return op
    return "nn.functional." + ("linear" if op == "linear" else "scaled_dot_product_attention")


def _check_dtype(op: str, name: str, tensor: torch.Tensor) -> None:
    if tensor.dtype not in _DTYPES:
        fail(
            f"{op} argument '{name}'",
            "has an unsupported dtype",
            "float16, bfloat16, float32 or float64",
            dtype_name(tensor),
            f"Convert it with .to(dtype), or use torch.{_replacement(op)}.",
        )


def _check_pair(
    op: str, first_name: str, first: torch.Tensor, name: str, tensor: torch.Tensor
) -> None:
    if tensor.device != first.device:
        fail(
            f"{op} argument '{name}'",
            "is on another device",
            f"{first.device} like '{first_name}'",
            str(tensor.device),
            "Move one of them with .to(device).",
        )
    if tensor.dtype != first.dtype:
        fail(
            f"{op} argument '{name}'",
            "has another dtype",
            f"{dtype_name(first)} like '{first_name}'",
            dtype_name(tensor),
            "Convert one of them with .to(dtype).",
        )


def check_matmul(self: torch.Tensor, other: torch.Tensor) -> list[int]:
    """Checks the arguments of matmul and returns its output's shape."""
    check_dense("matmul", "self", self)
    check_dense("matmul", "other", other)
    check_dims(self, other)
    _check_factors("matmul", "self", self, "other", other)
    return matmul_shape(self.shape, other.shape)


def check_addmm(input: torch.Tensor, mat1: torch.Tensor, mat2: torch.Tensor) -> list[int]:
    """Checks the arguments of addmm and returns its output's shape."""
    for name, tensor in (("input", input), ("mat1", mat1), ("mat2", mat2)):
        check_dense("addmm", name, tensor)
    check_dims(input, mat1, mat2)
    _check_factors("addmm", "mat1", mat1, "mat2", mat2)
    shape = matmul_shape(mat1.shape, mat2.shape, "addmm", "mat1", "mat2")
    _check_pair("addmm", "mat1", mat1, "input", input)
    check_addend(input.shape, shape)
    return shape


def check_addend(addend: Sequence[int], shape: Sequence[int]) -> None:
    """Fails unless a tensor of shape `addend` broadcasts to `shape`."""
    details = (
        "addmm argument 'input'",
        "does not broadcast to the product",
        shape_text(shape),
        shape_text(addend),
    )
    if len(addend) > len(shape):
        fail(*details)
    for size, wanted in zip(reversed(addend), reversed(shape), strict=False):
        if size != 1:
            require(size == wanted, *details)


def _check_factors(
    op: str, first_name: str, first: torch.Tensor, name: str, tensor: torch.Tensor
) -> None:
    _check_dtype(op, first_name, first)
    _check_dtype(op, name, tensor)
    _check_pair(op, first_name, first, name, tensor)


def matmul_shape(
    a: Sequence[int],
    b: Sequence[int],
    op: str = "matmul",
    first_name: str = "self",
    name: str = "other",
) -> list[int]:
    """Shape of torch.matmul for tensors of shapes `a` and `b`."""
    if len(a) == 0 or len(b) == 0:
        fail(
            op,
            "takes no 0-dimensional tensor",
            "at least 1 dimension each",
            f"shapes {shape_text(a)} and {shape_text(b)}",
            "Multiply with * instead.",
        )
    k, other_k = a[-1], b[0 if len(b) == 1 else -2]
    require(
        other_k == k,
        op,
        f"shapes {shape_text(a)} and {shape_text(b)} cannot be multiplied",
        f"{name}.size({0 if len(b) == 1 else -2}) == {k}, the last size of {first_name}",
        str(other_k),
    )
    return _broadcast(a, b, op) + list(a[-2:-1]) + (list(b[-1:]) if len(b) > 1 else [])


def _broadcast(a: Sequence[int], b: Sequence[int], op: str) -> list[int]:
    x, y = list(a[:-2]), list(b[:-2])
    if not all(isinstance(size, int) for size in x + y):
        return list(torch.broadcast_shapes(tuple(x), tuple(y)))  # knows what symbols may guard
    x = [1] * (len(y) - len(x)) + x
    y = [1] * (len(x) - len(y)) + y
    for i, (p, q) in enumerate(zip(x, y, strict=True)):
        if p != q and p != 1 and q != 1:
            fail(
                op,
                f"batch dimensions of shapes {shape_text(a)} and {shape_text(b)} do not broadcast",
                f"equal sizes or 1 at output dimension {i}",
                f"{p} and {q}",
            )
    return [q if p == 1 else p for p, q in zip(x, y, strict=True)]


def check_linear(input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> list[int]:
    """Checks the arguments of linear and returns its output's shape."""
    for name, tensor in (("input", input), ("weight", weight), ("bias", bias)):
        if tensor is not None:
            check_dense("linear", name, tensor)
    check_dims(input, weight, bias)
    _check_dtype("linear", "input", input)
    _check_dtype("linear", "weight", weight)
    _check_pair("linear", "input", input, "weight", weight)
    shape = linear_shape(input.shape, weight.shape)
    if bias is not None:
        _check_pair("linear", "input", input, "bias", bias)
        check_bias(weight.shape, bias.shape)
    return shape


ACTIVATIONS = ("none", "relu", "gelu", "gelu_tanh", "silu")  # as csrc/kernels/matmul/activation.h


def check_activation(name: str) -> None:
    """Fails unless an activation has this name."""
    if name not in ACTIVATIONS:
        fail(
            "linear argument 'activation'",
            "is not known",
            "'none', 'relu', 'gelu', 'gelu_tanh' or 'silu'",
            f"'{name}'",
        )


def linear_shape(input: Sequence[int], weight: Sequence[int]) -> list[int]:
    """Shape of F.linear for tensors of these shapes."""
    if len(input) == 0 or len(weight) not in (1, 2):
        fail(
            "linear",
            "has arguments of a wrong rank",
            "input with at least 1 dimension and weight with 1 or 2",
            f"shapes {shape_text(input)} and {shape_text(weight)}",
        )
    k = input[-1]
    require(
        weight[-1] == k,
        "linear",
        f"shapes {shape_text(input)} and {shape_text(weight)} cannot be multiplied",
        f"weight.size(-1) == {k}, the last size of input",
        str(weight[-1]),
    )
    return list(input[:-1]) + list(weight[:-1])


def check_bias(weight: Sequence[int], bias: Sequence[int]) -> None:
    """Fails unless a bias of this shape goes with a weight of that shape."""
    matrix = len(weight) == 2
    if len(bias) == 0:
        return
    details = (
        "linear argument 'bias'",
        "has a wrong shape",
        f"({weight[0]},), (1,) or ()" if matrix else "()",
        shape_text(bias),
        "Add a bias of another shape after the call.",
    )
    if len(bias) > 1 or not matrix:
        fail(*details)
    if bias[0] != 1:
        require(bias[0] == weight[0], *details)
