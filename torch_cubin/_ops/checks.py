"""Python's part of the checks of the built-in ops: errors that pass through an op, descriptions of
tensors for C++, and the shapes of products whose sizes may be symbolic.

C++ checks the arguments (csrc/ops/*/checks.cpp), also for fake tensors and under vmap. Tensors
without strides, e.g. sparse ones, are refused here and never passed to it.
"""

from __future__ import annotations

import json
import traceback
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import torch

from torch_cubin import errors
from torch_cubin._native import library
from torch_cubin._pytorch import compiler, operators

MAX_DIMS = 64  # kMaxDims in csrc/pytorch/tensor.h


def keep(error: BaseException) -> None:
    """Stores the text of an error that passes through a public op, which reads it there.

    Before torch 2.13 the C API between the op and Python loses the text. The type is always lost
    (the public op raises a RuntimeError), so the text of a foreign error includes its type.
    """
    text = str(error)
    if not text or not isinstance(error, RuntimeError):
        text = "".join(traceback.format_exception_only(error)).strip()
    kept = text.replace("\0", "\\0").encode("utf-8", "backslashreplace")  # a C string
    library.load().torch_cubin_keep_error(kept)


def require_tensors(function: str, **arguments: object) -> None:
    """Raises for an argument of a Python function that is no tensor."""
    for name, given in arguments.items():
        if not isinstance(given, torch.Tensor):
            raise errors.wrong_type(
                f"{function} argument '{name}'", "a torch.Tensor", given,
                "Join the tensors by torch.stack." if isinstance(given, (list, tuple)) else "",
            )  # fmt: skip


def fault(object: str, problem: str, expected: str, got: str, advice: str = "") -> errors.Error:
    """An [input] error, stored for the public op."""
    error = errors.fault("input", object, problem, expected=expected, got=got, advice=advice)
    keep(error)
    return error


def fail(object: str, problem: str, expected: str, got: str, advice: str = "") -> NoReturn:
    """Raises :func:`fault`."""
    raise fault(object, problem, expected, got, advice)


def dtype_name(tensor: torch.Tensor) -> str:
    """The dtype without "torch.", e.g. bfloat16."""
    return str(tensor.dtype).removeprefix("torch.")


def require(equal: bool | torch.SymBool, *details: str) -> None:
    """Fails unless sizes agree; a symbolic condition becomes a guard or a run-time check."""
    if isinstance(equal, bool):
        if not equal:
            fail(*details)
    else:
        operators.check(equal, fault(*details))


def shape_of(tensor: torch.Tensor, mapped: int | None) -> list[int]:
    """The shape that a function under vmap sees, without the dim `mapped`."""
    sizes = list(tensor.shape)
    if mapped is not None:
        del sizes[mapped]
    return sizes


def described(tensor: torch.Tensor, mapped: int | None = None) -> dict[str, Any]:
    """A tensor's metadata in the form that csrc/pytorch/described_tensor.h reads."""
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


def equal(a: int | torch.SymInt, b: int | torch.SymInt) -> bool:
    """Whether two sizes are known to be equal now; data-dependent sizes count as different."""
    if isinstance(a, int) and isinstance(b, int):
        return a == b
    from torch.fx.experimental.symbolic_shapes import guard_or_false

    return guard_or_false(a == b)


class _Unknown(Exception):
    """Raised for a call with a data-dependent size."""


def _plain_number(value: Any) -> Any:
    """For json: the hint of a symbol, without a guard on it."""
    hint = compiler.hint_of(value)
    if hint is None:
        raise _Unknown
    return hint


def ask(check: str | Callable[[str], Any], call: dict[str, Any]) -> Any:
    """What C++ answers to a call whose tensors it cannot read, or its error; by the name of its
    check (csrc/c_api_checks.cpp), or a function that is given the call's text.

    Symbols are passed as their hints. If a size has no hint, C++ is not called: the op itself
    checks it at run time, as it does for all other numbers.
    """
    try:
        text = json.dumps(call, default=_plain_number)
    except _Unknown:
        return None
    try:
        return library.check_described(check, text) if isinstance(check, str) else check(text)
    except errors.Error as error:
        keep(error)
        raise


def check_dense(op: str, name: str, tensor: torch.Tensor) -> None:
    """Fails for a tensor that is not strided; C++ never receives one."""
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
        f"Convert it with .{method}{_replacement(op)}.",
    )


def _replacement(op: str) -> str:
    """PyTorch's function that takes such tensors, as advice; none for a declared op."""
    if op.startswith("op '"):
        return ""
    for name in ("matmul", "addmm"):
        if op.startswith(name):
            return f", or use torch.{name}"
    if op in ("syrk", "symm_square"):
        return ", or use torch.matmul"
    functions = {
        "linear_cross_entropy": "linear_cross_entropy",
        "linear": "linear",
        "scaled_grouped": "scaled_grouped_mm",
        "grouped": "grouped_mm",
        "scaled_gated": "scaled_mm",
        "scaled_matmul": "scaled_mm",
        "layer_norm": "layer_norm",
        "norm": "rms_norm",
        "log_softmax": "log_softmax",
        "softmax": "softmax",
        "cross_entropy": "cross_entropy",
        "attention": "scaled_dot_product_attention",
    }
    name = next((function for part, function in functions.items() if part in op), "")
    return f", or use torch.nn.functional.{name}" if name else ""


def check_product(
    op: str, mapped: dict[str, int | None], tensors: dict[str, Any], **options: Any
) -> None:
    """Raises the errors of an op of products; `mapped`: the dim of each that vmap maps."""
    given = {name: tensor for name, tensor in tensors.items() if tensor is not None}
    for name, tensor in given.items():
        check_dense(op, name, tensor)
    described_ = {name: described(tensor, mapped.get(name)) for name, tensor in given.items()}
    ask("product", {"op": op, "tensors": described_, **options})


def check_matmul(
    self: torch.Tensor, other: torch.Tensor, dims: Sequence[int | None] = (None, None)
) -> list[int]:
    """Checks the arguments of matmul and returns its output's shape."""
    mapped = {"self": dims[0], "other": dims[1]}
    check_product("matmul", mapped, {"self": self, "other": other})
    a, b = shape_of(self, dims[0]), shape_of(other, dims[1])
    return product_shape(a, b)


def product_shape(a: list[int], b: list[int]) -> list[int]:
    """The shape of torch.matmul's result for operands of these shapes."""
    unify(a[-1], b[0 if len(b) == 1 else -2])
    batch = torch.broadcast_shapes(tuple(a[:-2]), tuple(b[:-2]))
    return [*batch, *a[-2:-1], *(b[-1:] if len(b) > 1 else ())]


def check_addmm(
    input: torch.Tensor,
    mat1: torch.Tensor,
    mat2: torch.Tensor,
    dims: Sequence[int | None] = (None, None, None),
    out_dtype: torch.dtype | None = None,
) -> list[int]:
    """Checks the arguments of addmm and returns its output's shape."""
    tensors = {"input": input, "mat1": mat1, "mat2": mat2}
    options = {} if out_dtype is None else {"out_dtype": str(out_dtype).removeprefix("torch.")}
    check_product("addmm", dict(zip(tensors, dims, strict=True)), tensors, **options)
    shape = product_shape(shape_of(mat1, dims[1]), shape_of(mat2, dims[2]))
    unify_addend(shape_of(input, dims[0]), shape)
    return shape


def unify_addend(addend: list[int], shape: list[int]) -> None:
    """Informs torch.compile that an addend broadcasts to a product of that shape."""
    for size, wanted in zip(reversed(addend), reversed(shape), strict=False):
        if not equal(size, 1):
            unify(size, wanted)


def check_linear(
    input: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    dims: Sequence[int | None] = (None, None, None),
) -> list[int]:
    """Checks the arguments of linear and returns its output's shape."""
    tensors = {"input": input, "weight": weight, "bias": bias}
    check_product("linear", dict(zip(tensors, dims, strict=True)), tensors)
    a, b = shape_of(input, dims[0]), shape_of(weight, dims[1])
    unify(a[-1], b[-1])
    return [*a[:-1], *b[:-1]]


def check_linear_glu(
    input: torch.Tensor,
    gate: torch.Tensor,
    up: torch.Tensor,
    dims: Sequence[int | None] = (None, None, None),
) -> list[int]:
    """Checks the arguments of _linear_glu and returns its output's shape."""
    tensors = {"input": input, "gate": gate, "up": up}
    check_product("_linear_glu", dict(zip(tensors, dims, strict=False)), tensors)
    x, a, b = (shape_of(x, dim) for x, dim in zip(tensors.values(), dims, strict=False))
    for size, wanted in ((a[0], b[0]), (x[-1], a[1]), (x[-1], b[1])):
        unify(size, wanted)
    return [*x[:-1], a[0]]


def check_linears(
    input: torch.Tensor,
    weights: Sequence[torch.Tensor],
    biases: Sequence[torch.Tensor | None],
    dims: Sequence[Any] = (None, (), ()),
) -> list[list[int]]:
    """Checks the arguments of _linears and returns its outputs' shapes."""
    if not weights or (biases and len(biases) != len(weights)):
        fail(
            "_linears",
            "has wrong numbers of weights and biases",
            "at least one weight, and as many biases or none",
            f"{len(weights)} and {len(biases)}",
        )
    none = [None] * len(weights)
    shapes = []
    for index, (weight, bias, weight_dim, bias_dim) in enumerate(
        zip(weights, biases or none, dims[1] or none, dims[2] or none, strict=True)
    ):
        mapped = {"input": dims[0], "weight": weight_dim, "bias": bias_dim}
        tensors = {"input": input, "weight": weight, "bias": bias}
        check_product("_linears", mapped, tensors, index=index)
        a, b = shape_of(input, dims[0]), shape_of(weight, weight_dim)
        unify(a[-1], b[-1])
        shapes.append([*a[:-1], b[0]])
    return shapes


def check_linear_activation_backward(
    grad: torch.Tensor,
    weight: torch.Tensor,
    aux: torch.Tensor,
    dims: Sequence[int | None] = (None, None, None),
) -> list[int]:
    """Checks the arguments of _linear_activation_backward and returns its output's shape."""
    tensors = {"grad": grad, "weight": weight, "aux": aux}
    op = "_linear_activation_backward"
    check_product(op, dict(zip(tensors, dims, strict=False)), tensors)
    shape = product_shape(shape_of(grad, dims[0]), shape_of(weight, dims[1]))
    for size, wanted in zip(shape_of(aux, dims[2]), shape, strict=True):
        unify(size, wanted)
    return shape


def unify(a: Any, b: Any) -> None:
    """Informs torch.compile that two sizes are equal, as they must be."""
    if is_symbol(a) or is_symbol(b):
        require(a == b, "an operand", "has a size that differs", str(a), str(b))


# The names of csrc/kernels/matmul/activation_params.h.
ACTIVATIONS = ("none", "relu", "gelu", "gelu_tanh", "silu")


def check_activation(name: str) -> None:
    """Fails unless an activation has this name."""
    if name not in ACTIVATIONS:
        fail(
            "linear argument 'activation'",
            "is not known",
            "'none', 'relu', 'gelu', 'gelu_tanh' or 'silu'",
            repr(name)[:200],
        )
