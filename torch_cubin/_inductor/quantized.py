"""Products of 8-bit floats in a graph: quantisations that are the same, and those of a gate.

A layer of torch_cubin.float8 quantises its input itself, so that layers of one input (query, key
and value; gate and up) do so once each.
"""

from __future__ import annotations

import dataclasses
import operator
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
    """silu(gate) * up of products of 8-bit floats, quantised with scales of 1x128."""

    value: torch.Tensor  # of a product
    operands: list[torch.fx.Node]  # mat_a, mat_b, scale_a, scale_b
    options: dict[str, Any]  # mat_up and scale_up, where the ups are a product; power_of_two
    between: set[torch.fx.Node]  # with the products


def quantized_gate_at(node: Node) -> QuantizedGate | None:
    options = dict(node.kwargs)
    powers = {"power_of_two": True} if options.pop("power_of_two", False) else {}
    if node.target not in QUANTIZE or node.args[1:] != (BLOCK_1X128,) or options:
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
        gates, ups = _columns_at(gate), _columns_at(up)
        if gates is None or ups is None:
            continue
        operands = _operands(x.meta["val"], gates, ups)
        if operands is None:
            continue
        inside = gates.between | ups.between | {root, gate, up}
        own, by_name = operands
        return QuantizedGate(gates.value, own, {**by_name, **powers}, seen | between | inside)
    return None


@dataclasses.dataclass
class _Columns:
    """The columns of a product that a node has, as chunk() takes them, or all of them."""

    product: torch.fx.Node
    start: int
    number: Any  # may be symbolic
    between: set[torch.fx.Node]

    @property
    def value(self) -> torch.Tensor:
        return self.product.meta["val"]


def _columns_at(node: Node) -> _Columns | None:
    taken = taken_columns(node) if node.op == "call_function" else None
    source, start, between = taken or (node, 0, set[torch.fx.Node]())
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
    if not same_number(source.meta["val"].shape[-1], width):  # a view that divides rows
        return None
    return _Columns(source, start, node.meta["val"].shape[-1], between | {source})


def _operands(
    x: torch.Tensor, gate: _Columns, up: _Columns
) -> tuple[list[Node], dict[str, Node]] | None:
    """The operands of a gated product whose results have x's shape; None if there is none."""
    whole = gate.value.shape[-1], up.value.shape[-1]
    parts = 2 if gate.product is up.product else 1
    equal = [
        *((x.shape[0], own.value.shape[0]) for own in (gate, up)),
        *((x.shape[1], own.number) for own in (gate, up)),
        *((own, parts * x.shape[1]) for own in whole),
        (gate.start, 0),
        (up.start, (parts - 1) * x.shape[1]),
    ]
    if gate.value.dtype != x.dtype or up.value.dtype != x.dtype:
        return None
    if not all(same_number(*pair) for pair in equal):
        return None
    operands, ups = ([own.product.args[i] for i in (0, 1, 2, 4)] for own in (gate, up))
    if parts == 2:
        return operands, {}
    if not (_is_same(operands[0], ups[0]) and _is_same(operands[2], ups[2])):
        return None
    return operands, {"mat_up": ups[1], "scale_up": ups[3]}


def _is_same(a: Node, b: Node) -> bool:
    """Whether two nodes are one, or the same result of one."""
    return a is b or (a.target is b.target is operator.getitem and a.args == b.args)
