"""Activations in graphs: trees of pointwise ops, as Inductor decomposes them.

Casts and views are skipped in the comparison, so that one tree matches every dtype and rank.
"""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Callable
from typing import Any

import torch

from torch_cubin._ops.autograd import ACTIVATIONS
from torch_cubin._pytorch import inductor

aten = torch.ops.aten
VIEWS = (aten.reshape.default, aten.view.default)
CASTS = (torch.ops.prims.convert_element_type.default, aten._to_copy.default)

# A leaf, a number, or an op and the trees of its arguments.
Tree = Any
LEAF = "x"
_ROOT = math.sqrt(2.0 / math.pi)

# What models write for an activation instead of calling PyTorch's function: GPT-2 and its kin, then
# two of transformers' (activations.py there has all three).
_WRITTEN_OUT: tuple[tuple[str, Callable[[Any], Any]], ...] = (
    (
        "gelu_tanh",
        lambda x: 0.5 * x * (1.0 + torch.tanh(_ROOT * (x + 0.044715 * torch.pow(x, 3.0)))),
    ),
    (
        "gelu_tanh",
        lambda x: 0.5 * x * (1.0 + torch.tanh(x * 0.7978845608 * (1.0 + 0.044715 * x * x))),
    ),
    ("gelu", lambda x: x * 0.5 * (1.0 + torch.erf(x / math.sqrt(2.0)))),
)


@functools.cache
def trees() -> dict[str, list[Tree]]:
    """For each activation, its trees for 16 bits and for float32, which may differ."""
    found: dict[str, list[Tree]] = {}
    for name, function in (*ACTIVATIONS.items(), *_WRITTEN_OUT):
        for dtype in (torch.bfloat16, torch.float32):
            graph = inductor.traced(function, torch.ones(2, 2, dtype=dtype))
            (result,) = (node for node in graph.nodes if node.op == "output")
            root = result.args[0]
            tree = _tree(root[0] if isinstance(root, (list, tuple)) else root)
            if tree not in found.setdefault(name, []):
                found[name].append(tree)
    return found


def _tree(value: Any) -> Tree:
    if not isinstance(value, torch.fx.Node):
        return value
    if value.op == "placeholder":
        return LEAF
    if value.target in CASTS:
        return _tree(value.args[0])
    return (value.target, *map(_tree, value.args))


def skip(value: Any, dtype: torch.dtype, skipped: set[torch.fx.Node]) -> Any:
    """The input of a chain of views and casts.

    Casts to dtypes other than the result's and wider ones are not skipped, because they round.
    """
    while isinstance(value, torch.fx.Node) and value.op == "call_function":
        if value.target not in VIEWS:
            if value.target not in CASTS:
                break
            to = value.meta["val"].dtype
            if to != dtype and not (to.is_floating_point and to.itemsize > dtype.itemsize):
                break
        skipped.add(value)
        value = value.args[0]
    return value


def match(tree: Tree, value: Any, dtype: torch.dtype, seen: set[torch.fx.Node]) -> Any:
    """The node at the tree's leaf, or None; adds the nodes in between to `seen`."""
    if tree == LEAF:
        return skip(value, dtype, seen)
    if not isinstance(tree, tuple):
        same = not isinstance(value, torch.fx.Node) and _is_number(tree, value)
        return operator if same else None  # any constant is fine: the tree has no leaf here
    value = skip(value, dtype, seen)
    if not isinstance(value, torch.fx.Node) or value.target != tree[0] or value.kwargs:
        return None
    if len(value.args) != len(tree) - 1:
        return None
    seen.add(value)
    leaves = {match(part, arg, dtype, seen) for part, arg in zip(tree[1:], value.args, strict=True)}
    leaves.discard(operator)
    return leaves.pop() if len(leaves) == 1 else None


def _is_number(wanted: Any, value: Any) -> bool:
    if isinstance(wanted, (int, float)) and isinstance(value, (int, float)):
        return abs(wanted - value) <= 1e-9 * abs(wanted)
    return bool(wanted == value)


def activation_of(
    value: Any, dtype: torch.dtype
) -> tuple[str, torch.fx.Node, set[torch.fx.Node]] | None:
    """The activation that a node computes, its input, and the nodes in between."""
    for name, alternatives in trees().items():
        for tree in alternatives:
            seen: set[torch.fx.Node] = set()
            leaf = match(tree, value, dtype, seen)
            if isinstance(leaf, torch.fx.Node):
                return name, leaf, seen
    return None
