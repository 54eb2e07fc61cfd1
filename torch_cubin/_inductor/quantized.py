"""Products of 8-bit floats in a graph: quantisations that are the same, and those of a gate.

A layer of torch_cubin.float8 quantises its input itself, so that layers of one input (query, key
and value; gate and up) do so once each.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import torch

from torch_cubin._inductor import activations
from torch_cubin._inductor.activations import VIEWS
from torch_cubin._inductor.products import same_number, taken_columns
from torch_cubin._ops.scaled import BLOCK_1X128, BLOCK_128X128

aten = torch.ops.aten
ops = torch.ops.cubin
QUANTIZE = (ops._quantize.default, ops._quantize_autograd.default)
_SCALED = (ops._scaled_matmul.default, ops._scaled_matmul_autograd.default)
Node = Any  # torch.fx.Node; its arguments have no useful types


def merge_quantisations(graph: torch.fx.Graph) -> bool:
    """Nodes that quantise the same values alike become one."""
    first: dict[Any, Node] = {}
    merged = False
    for node in graph.nodes:
        if node.op != "call_function" or node.target not in QUANTIZE:
            continue
        x, *rest = node.args
        shape = tuple(str(size) for size in x.meta["val"].shape)
        key = (node.target, base_of(x), shape, *rest, *sorted(node.kwargs.items()))
        same = first.setdefault(key, node)
        if same is not node:
            node.replace_all_uses_with(same)
            merged = True
    return merged


def base_of(node: Node) -> Node:
    while node.op == "call_function" and node.target in VIEWS:
        node = node.args[0]
    return node


@dataclasses.dataclass
class QuantizedGate:
    """silu(gate) * up of one product's columns, quantised with scales of 1x128."""

    product: torch.fx.Node
    operands: list[torch.fx.Node]  # mat_a, mat_b, scale_a, scale_b
    between: set[torch.fx.Node]

    @property
    def value(self) -> torch.Tensor:
        return self.product.meta["val"]


def quantized_gate_at(node: Node) -> QuantizedGate | None:
    if node.target not in QUANTIZE or node.args[1:] != (BLOCK_1X128,) or node.kwargs:
        return None
    x = node.args[0]
    dtype, seen = x.meta["val"].dtype, set[torch.fx.Node]()
    root = activations.skip(x, dtype, seen)
    if root.op != "call_function" or root.target is not aten.mul.Tensor:
        return None
    if not all(isinstance(factor, torch.fx.Node) for factor in root.args):
        return None
    for gate_value, up_value in (root.args, root.args[::-1]):
        found = activations.activation_of(gate_value, dtype)
        if found is None or found[0] != "silu":
            continue
        _, gate, between = found
        up = activations.skip(up_value, dtype, between)
        halves = [_half_of_product(leaf, number) for number, leaf in enumerate((gate, up))]
        if halves[0] is None or halves[1] is None or halves[0][0] is not halves[1][0]:
            continue
        product, inside = halves[0][0], halves[0][1] | halves[1][1]
        if not _is_whole(x.meta["val"], product.meta["val"]):
            continue
        operands = [product.args[i] for i in (0, 1, 2, 4)]
        return QuantizedGate(product, operands, seen | between | inside | {root, gate, up})
    return None


def _half_of_product(node: Node, number: int) -> tuple[Node, set[Node]] | None:
    """The product of which a node has the first or the second half of the columns, and the nodes
    between both."""
    taken = taken_columns(node) if node.op == "call_function" else None
    if taken is None:
        return None
    source, start, between = taken
    width = source.meta["val"].shape[-1]
    while source.op == "call_function" and source.target in VIEWS:
        between.add(source)
        source = source.args[0]
    if source.op != "call_function" or source.target not in _SCALED:
        return None
    recipes, kwargs = (source.args[3], source.args[5]), dict(source.kwargs)
    kwargs.pop("output_dtype", None)
    if recipes != (BLOCK_1X128, BLOCK_128X128) or any(kwargs.values()) or len(source.args) > 6:
        return None
    columns, own = source.meta["val"].shape[-1], node.meta["val"].shape[-1]
    equal = ((columns, width), (columns, 2 * own), (start, number * own))
    return (source, between) if all(same_number(*pair) for pair in equal) else None


def _is_whole(x: torch.Tensor, product: torch.Tensor) -> bool:
    """Whether x has the product's rows, of half as many columns, in the product's dtype."""
    return (
        x.dtype == product.dtype
        and same_number(x.shape[0], product.shape[0])
        and same_number(2 * x.shape[1], product.shape[1])
    )
