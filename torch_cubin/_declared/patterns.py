"""Patterns: parses a definition's description of a tensor into an entry of the contract.

    "T[m, k] rows align=4"    dtype or variable, a size for each dim, layout, bytes of alignment
    "float32[*s]"             any number of dims
    "float32[m, 2 * k]"       arithmetic of sizes and int arguments: + - * // %, cdiv, min, max
    "float32"                 any shape (arguments only)

docs/declared_ops.md defines the meaning, docs/manifest.md the form of an entry.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from torch_cubin import errors
from torch_cubin._declared.expressions import (
    Traced,
    TracedDtype,
    TracedTensor,
    TracedView,
    Tree,
    tree_of,
)

LAYOUTS = ("contiguous", "rows", "dense", "strided")
ALIGN = 16
_PATTERN = re.compile(r"\s*([A-Za-z_]\w*)\s*(\[[^\]]*\])?\s*([^\[\]]*)")
_WRITE = 'Write "float32[m, k]", "T[*s]", "float16[m, k] rows align=4".'
_BINARY = {
    ast.Add: "add",
    ast.Sub: "sub",
    ast.Mult: "mul",
    ast.FloorDiv: "floordiv",
    ast.Mod: "mod",
}
_CALLS = {"min": "min", "minimum": "min", "max": "max", "maximum": "max"}


class Empty:
    """An output of a shape and dtype: see empty()."""

    def __init__(self, shape: Any, dtype: Any, zeroed: bool = False) -> None:
        self.shape, self.dtype, self.zeroed = shape, dtype, zeroed


class Like:
    """An output with an argument's layout: see like()."""

    def __init__(self, tensor: Any, dtype: Any = None, zeroed: bool = False) -> None:
        self.tensor, self.dtype, self.zeroed = tensor, dtype, zeroed


@errors.named_keywords
def empty(shape: Any, dtype: Any, *, zeroed: bool = False) -> Empty:
    """In define_op: a contiguous output of that shape and dtype, for shapes that no pattern
    expresses.

    Written in a function of the op's arguments: `out=lambda x, n: empty((n, x.shape[0]), x.dtype)`.
    `shape` is an int or a sequence of ints; `dtype` one of torch's, its name, a variable of
    `dtypes`, or an argument's. With `zeroed` it is all zeros when the kernel begins.
    """
    return Empty(shape, dtype, zeroed)


@errors.named_keywords
def like(tensor: Any, dtype: Any = None, *, zeroed: bool = False) -> Like:
    """In define_op: an output with an argument's shape and order of dims, and its dtype by default.

    `tensor` is the argument's name: `out=torch_cubin.like("x")`. Its layout must be contiguous or
    dense. With `zeroed` it is all zeros when the kernel begins.
    """
    return Like(tensor, dtype, zeroed)


def parse(text: str, label: str, *, made: bool = False) -> dict[str, Any]:
    """The entry of a pattern: dtype, shape (None: any), layout, align, may_overlap."""

    def refuse(problem: str, expected: str, got: str) -> errors.Error:
        where = f"{label} pattern {text!r:.200}"
        return errors.fault("input", where, problem, expected=expected, got=got, advice=_WRITE)

    match = _PATTERN.fullmatch(text)
    if match is None and text.lstrip().startswith("torch."):
        raise refuse("is no pattern", "a dtype's name alone", "'torch.' before it")
    if match is None:
        raise refuse("is no pattern", "dtype[sizes] options", text[:100])
    dtype, sizes, options = match.groups()
    entry: dict[str, Any] = {
        "dtype": dtype,
        "shape": None if sizes is None else _shape(sizes[1:-1], refuse),
        "layout": "contiguous",
        "align": ALIGN,
    }
    for option in options.split():
        name, _, value = option.partition("=")
        if name in LAYOUTS and not value:
            entry["layout"] = name
        elif name == "zeroed" and not value and made:
            entry["zeroed"] = True
        elif name == "align" and value.isdecimal():
            entry["align"] = int(value)
        elif option == "may_overlap":
            entry["may_overlap"] = True
        else:
            expected = ", ".join(LAYOUTS) + ", may_overlap or align=N" + ", or zeroed" * made
            raise refuse("has an unknown option", expected, option)
    return entry


def _shape(text: str, refuse: Any) -> list[Tree]:
    try:
        call = ast.parse(f"f({text}\n)", mode="eval").body
    except SyntaxError:
        raise refuse("has sizes that do not parse", "names, ints and arithmetic", text) from None
    assert isinstance(call, ast.Call)
    if call.keywords:
        raise refuse("has sizes that do not parse", "names, ints and arithmetic", text)
    shape: list[Tree] = []
    for node in call.args:
        if isinstance(node, ast.Starred) and isinstance(node.value, ast.Name):
            shape.append(f"*{node.value.id}")
        elif isinstance(node, ast.Name):
            shape.append(node.id)
        else:
            shape.append(_tree(node, refuse))
    return shape


def shifted_name(tree: Tree) -> tuple[str, int] | None:
    """("n", 1) for "n + 1", a size that binds its name on first use."""
    if not isinstance(tree, list) or len(tree) != 3 or tree[0] not in ("add", "sub"):
        return None
    operation, leaf, shift = tree
    if operation == "add" and type(leaf) is int:
        leaf, shift = shift, leaf
    if isinstance(leaf, list) and leaf[:1] == ["number"] and type(shift) is int:
        return leaf[1], -shift if operation == "sub" else shift
    return None


def _tree(node: ast.expr, refuse: Any) -> Tree:
    if isinstance(node, ast.Constant) and type(node.value) is int and node.value < 2**63:
        return node.value
    if isinstance(node, ast.Name):
        return ["number", node.id]
    if isinstance(node, ast.BinOp) and type(node.op) in _BINARY:
        return [_BINARY[type(node.op)], _tree(node.left, refuse), _tree(node.right, refuse)]
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        operand = _tree(node.operand, refuse)
        return -operand if isinstance(operand, int) else ["neg", operand]
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and len(node.args) == 2:
        a, b = (_tree(argument, refuse) for argument in node.args)
        if node.func.id == "cdiv":
            return ["neg", ["floordiv", ["neg", a], b]]
        if node.func.id in _CALLS:
            return [_CALLS[node.func.id], a, b]
    raise refuse(
        "has a size that is no arithmetic of sizes",
        "names, ints, + - * // %, cdiv(a, b), min(a, b), max(a, b)",
        ast.unparse(node)[:100],
    )


def made(value: Empty | Like, tensors: Mapping[str, Any], label: str) -> dict[str, Any]:
    """The entry of an output given by empty() or like(); `tensors` are the arguments' entries."""
    entry: dict[str, Any] = {"layout": "contiguous", "align": ALIGN}
    if type(value.zeroed) is not bool:
        raise errors.fault(
            "input", label, "has a wrong zeroed", expected="True or False",
            got=f"{type(value.zeroed).__name__} {value.zeroed!r:.60}",
        )  # fmt: skip
    if value.zeroed:
        entry["zeroed"] = True
    if isinstance(value, Like):
        tensor = value.tensor
        if isinstance(tensor, TracedView):
            raise errors.fault(
                "input", label, "is like a part of a tensor",
                expected="torch_cubin.like(x), or torch_cubin.empty(shape, dtype)",
            )  # fmt: skip
        name = tensor._name if isinstance(tensor, TracedTensor) else str(tensor)
        dtype = TracedDtype(name) if value.dtype is None else value.dtype
        return {**entry, "dtype": _dtype_text(dtype, tensors, label), "shape": None, "like": name}
    sizes = value.shape
    if isinstance(sizes, (int, Traced)) or not isinstance(sizes, Sequence | torch.Size):
        sizes = (sizes,)
    shape = [tree_of(size) for size in sizes]
    return {**entry, "dtype": _dtype_text(value.dtype, tensors, label), "shape": shape}


def _dtype_text(dtype: Any, tensors: Mapping[str, Any], label: str) -> str:
    if isinstance(dtype, torch.dtype):
        return str(dtype).removeprefix("torch.")
    if isinstance(dtype, TracedDtype):
        entry = tensors.get(dtype.name.partition("[")[0])
        return entry["dtype"] if entry else dtype.name
    if isinstance(dtype, str):
        return dtype
    raise errors.fault(
        "input",
        label,
        "has a wrong dtype",
        expected="a torch.dtype, its name, a variable of dtypes, or an argument's",
        got=type(dtype).__name__,
    )
