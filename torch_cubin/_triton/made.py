"""Facts of the tensors that an op allocates, expressed by the sizes of its arguments.

A kernel is chosen before outputs and scratch are allocated, so requirements on their sizes and
strides are evaluated on their patterns.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Any

import torch

from torch_cubin._declared.expressions import Tree

_FACTS = ("size", "stride", "numel", "dim", "itemsize", "contiguous", "defined", "is_dtype")


def of_arguments(
    tree: Tree,
    entries: Mapping[str, dict[str, Any]],
    made: Collection[str],
    refuse: Callable[[str], Exception],
) -> Tree:
    """The tree with facts of the tensors `made` replaced. Raises `refuse(fact)` for a fact that
    their patterns do not determine."""
    if not isinstance(tree, list):
        return tree
    operation, *operands = tree
    if operation in _FACTS and operands[0] in made:
        return _fact(operation, operands, entries[operands[0]], refuse)
    if operation in _FACTS or operation in ("number", "is"):
        return tree
    return [operation, *(of_arguments(one, entries, made, refuse) for one in operands)]


def _fact(
    operation: str,
    operands: list[Any],
    entry: Mapping[str, Any],
    refuse: Callable[[str], Exception],
) -> Tree:
    other = entry.get("like")
    if operation == "defined":
        return True
    if other is not None and operation not in ("is_dtype", "itemsize"):
        return [operation, other, *operands[1:]]
    if operation == "contiguous":
        return True
    dtype = getattr(torch, entry["dtype"], None)
    if operation in ("is_dtype", "itemsize"):
        if not isinstance(dtype, torch.dtype):
            raise refuse(f"{operation} of '{operands[0]}'")
        return entry["dtype"] == operands[1] if operation == "is_dtype" else dtype.itemsize
    shape: list[Any] = entry["shape"]
    groups = [i for i, size in enumerate(shape) if isinstance(size, str) and size[0] == "*"]
    if operation in ("size", "stride"):
        dim = operands[1]
        at = dim if dim >= 0 else len(shape) + dim
        # Dims after a group are indexed from the back, dims before it from the front.
        inside = 0 <= at < len(shape) and not groups
        inside |= bool(groups) and (0 <= dim < groups[0] or groups[-1] - len(shape) < dim < 0)
        rest = shape[at + 1 :] if operation == "stride" else shape[at : at + 1]
        if not inside or any(isinstance(size, str) and size[0] == "*" for size in rest):
            raise refuse(f"{operation}({dim}) of '{operands[0]}'")
        return _product([_tree(size) for size in rest], at_least_one=operation == "stride")
    if groups:
        raise refuse(f"{operation} of '{operands[0]}'")
    return len(shape) if operation == "dim" else _product([_tree(s) for s in shape])


def _tree(size: Any) -> Tree:
    return ["number", size] if isinstance(size, str) else size


def _product(sizes: list[Tree], *, at_least_one: bool = False) -> Tree:
    """The product of sizes. For strides an empty dim counts as 1, as in PyTorch."""
    product: Tree = 1
    for size in sizes:
        factor = ["max", size, 1] if at_least_one and not isinstance(size, int) else size
        product = factor if product == 1 else ["mul", product, factor]
    return product


__all__ = ["of_arguments"]
