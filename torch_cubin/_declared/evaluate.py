"""Evaluates the trees of expressions.py in Python, for fake tensors, whose sizes are symbols.

Results and errors are those of csrc/declared/expression_evaluate.cpp; a test compares both on
random trees.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Mapping
from typing import Any, NoReturn

import torch

from torch_cubin import errors
from torch_cubin._declared.expressions import MAX, MIN, Tree

_BINARY: dict[str, Callable[[Any, Any], Any]] = {
    "add": operator.add,
    "sub": operator.sub,
    "mul": operator.mul,
    "floordiv": operator.floordiv,
    "mod": operator.mod,
    "truediv": operator.truediv,
    "min": lambda a, b: torch.sym_min(a, b) if _symbolic(a, b) else (b if b < a else a),
    "max": lambda a, b: torch.sym_max(a, b) if _symbolic(a, b) else (b if b > a else a),
    "lt": operator.lt,
    "le": operator.le,
    "eq": operator.eq,
    "ne": operator.ne,
}
_COMPARISONS = ("lt", "le", "eq", "ne")  # exact between an int and a float, as in Python
_UNARY: dict[str, Callable[[Any], Any]] = {
    "next_power_of_2": lambda a: 1 << (int(a) - 1).bit_length() if a > 0 else 0,
    "neg": operator.neg,
    "abs": abs,
    "float": torch.sym_float,
}


def evaluate(
    tree: Tree,
    tensors: Mapping[str, torch.Tensor | None],
    numbers: Mapping[str, Any],
    label: str = "an expression",
    device: Mapping[str, int] | None = None,
) -> Any:
    """The tree's value: an int, a float, a bool, or a symbol. `device`: its sm, multiprocessors."""

    def no_value(problem: str) -> NoReturn:
        raise errors.fault(
            "input",
            label,
            problem,
            advice="The definition does not allow for these arguments.",
        )

    def leaf(operation: str, operands: list[Any]) -> Any:
        if operation in ("sm", "multiprocessors"):
            if device is None:
                no_value("depends on the device, which a fake tensor does not have")
            return device[operation]
        if operation == "number":
            number = numbers[operands[0]]
            if number is None:
                no_value("reads a number that is None")
            return number
        if operation == "is":
            return str(numbers[operands[0]]).removeprefix("torch.") == operands[1]
        tensor = tensors.get(operands[0])  # "xs[2]" is missing if the list is shorter
        if operation == "defined":
            return tensor is not None
        if tensor is None:
            no_value("reads a tensor that is None")
        if operation in ("size", "stride"):
            i = operands[1]
            if not -tensor.dim() <= i < tensor.dim():
                no_value(f"reads a dim of a tensor of {errors.counted(tensor.dim(), 'dim')}")
            return tensor.shape[i] if operation == "size" else tensor.stride(i)
        if operation == "is_dtype":
            return str(tensor.dtype) == f"torch.{operands[1]}"
        return {
            "numel": tensor.numel,
            "dim": tensor.dim,
            "itemsize": tensor.element_size,
            "contiguous": tensor.is_contiguous,
        }[operation]()

    def run(node: Tree) -> Any:
        if not isinstance(node, list):
            return node
        operation, *operands = node
        if operation == "select":
            chosen = run(operands[1] if run(operands[0]) else operands[2])
            return torch.sym_float(chosen) if _is_float(node, tensors, numbers) else chosen
        if operation in ("and", "or"):
            first = run(operands[0])
            return run(operands[1]) if bool(first) == (operation == "and") else first
        if operation == "not":
            return not run(operands[0])
        if operation == "sqrt":
            value = float(run(operands[0]))
            if value < 0:
                no_value("takes the square root of a negative number")
            return math.sqrt(value)
        if operation in _UNARY:
            return checked(_UNARY[operation](run(operands[0])))
        if operation not in _BINARY:
            return leaf(operation, operands)
        a, b = (run(operand) for operand in operands)
        if operation == "truediv" or (
            operation not in _COMPARISONS and (isinstance(a, float) or isinstance(b, float))
        ):
            a, b = torch.sym_float(a), torch.sym_float(b)
        if operation in ("floordiv", "mod", "truediv") and not _symbolic(b) and b == 0:
            no_value("divides by zero")
        return checked(_BINARY[operation](a, b))

    def checked(value: Any) -> Any:
        if type(value) is int and not MIN <= value <= MAX:
            no_value("overflows a 64-bit integer")
        return value

    return run(tree)


def _symbolic(*values: Any) -> bool:
    return any(isinstance(value, torch.SymInt | torch.SymFloat) for value in values)


def _is_float(tree: Tree, tensors: Mapping[str, Any], numbers: Mapping[str, Any]) -> bool:
    """Whether a node's type is float, for any values."""
    if not isinstance(tree, list):
        return isinstance(tree, float)
    operation, *operands = tree
    if operation in ("truediv", "sqrt", "float"):
        return True
    if operation == "number":
        return isinstance(numbers[operands[0]], float | torch.SymFloat)
    if operation == "select":
        operands = operands[1:]
    elif operation not in ("add", "sub", "mul", "min", "max", "neg", "abs"):
        return False
    return any(_is_float(operand, tensors, numbers) for operand in operands)
