"""Products in a graph after AOTAutograd: PyTorch's, which install() serves, and our own ops."""

from __future__ import annotations

import dataclasses
import operator
from typing import Any

import torch

from torch_cubin._drop_in import install
from torch_cubin._inductor.activations import VIEWS

aten = torch.ops.aten
_LINEAR = (torch.ops.cubin._linear.default, torch.ops.cubin._linear_autograd.default)
_MATMUL = (torch.ops.cubin._matmul.default, torch.ops.cubin._matmul_autograd.default)
_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


@dataclasses.dataclass
class Product:
    """``input @ matrix + bias``, where `input` may have more than two dims.

    Either `weight` is known, the transposed matrix, or only `matrix`.
    """

    node: torch.fx.Node
    input: torch.fx.Node
    weight: torch.fx.Node | None
    matrix: torch.fx.Node | None
    bias: torch.fx.Node | None
    # Of columns_at(): `node` has these columns of the product, which these other nodes pass on.
    columns: tuple[int, int] | None = None
    between: frozenset[torch.fx.Node] = frozenset()

    @property
    def value(self) -> torch.Tensor:
        return self.node.meta["val"]

    def sources(self) -> list[torch.fx.Node]:
        known = (self.input, self.weight, self.matrix, self.bias)
        return [node for node in known if node is not None]


def product_at(node: Any) -> Product | None:
    """The product of a node that may be folded; None for all other nodes."""
    if not isinstance(node, torch.fx.Node) or node.op != "call_function":
        return None
    if node.target in (aten.mm.default, aten.addmm.default):
        return _atens(node) if install.serves_graph(node.meta["val"]) else None
    if node.target in _LINEAR:
        input, weight, bias = _arguments(node, "input", "weight", "bias")
        is_matrix = weight.meta["val"].dim() == 2 and _is_row(bias, node)
        return Product(node, input, weight, None, bias) if is_matrix else None
    if node.target in _MATMUL:
        input, matrix = _arguments(node, "self", "other")
        is_matrix = matrix.meta["val"].dim() == 2 and input.meta["val"].dim() > 1
        return _with_matrix(node, input, matrix, None) if is_matrix else None
    return None


def columns_at(node: Any) -> Product | None:
    """product_at(), also of a node that has some columns of a product, as chunk() takes them."""
    product = product_at(node)
    if product is not None or not isinstance(node, torch.fx.Node) or node.op != "call_function":
        return product
    taken = taken_columns(node)
    if taken is None:
        return None
    source, start, between = taken
    width = source.meta["val"].shape[-1]
    while source.op == "call_function" and source.target in VIEWS:
        between.add(source)
        source = source.args[0]
    whole = product_at(source)
    if whole is None or whole.weight is None or whole.bias is not None:
        return None
    if not same_number(whole.value.shape[-1], width):  # a view that divides rows
        return None
    columns = (start, start + node.meta["val"].shape[-1])
    return dataclasses.replace(
        whole, node=node, columns=columns, between=frozenset(between | {source})
    )


def taken_columns(node: torch.fx.Node) -> tuple[Any, int, set[torch.fx.Node]] | None:
    """The node of which this one takes columns, the first column, and the nodes in between."""
    if node.target is operator.getitem:
        parts: Any = node.args[0]
        if parts.target not in (aten.split.Tensor, aten.split_with_sizes.default):
            return None
        (source, _, *dim), index = parts.args, node.args[1]
        start = sum(part.shape[-1] for part in parts.meta["val"][:index])
        between = {parts}
    elif node.target is aten.slice.Tensor:
        source, *dim = node.args[:2]
        start = node.args[2] if len(node.args) > 2 else 0
        if len(node.args) > 4 and node.args[4] != 1:
            return None
        between = set()
    else:
        return None
    value = source.meta["val"]
    last = (dim[0] if dim else 0) in (-1, value.dim() - 1)
    known = isinstance(start, int) and isinstance(node.meta["val"].shape[-1], int) and start >= 0
    return (source, start, between) if last and known and not node.kwargs else None


def _arguments(node: torch.fx.Node, *names: str) -> list[Any]:
    given = dict(zip(names, node.args, strict=False))
    return [given.get(name, node.kwargs.get(name)) for name in names]


def _is_row(bias: torch.fx.Node | None, node: torch.fx.Node) -> bool:
    if bias is None:
        return True
    value, columns = bias.meta["val"], node.meta["val"].shape[-1]
    return value.dim() == 1 and same_number(value.shape[0], columns)


def _atens(node: Any) -> Product | None:
    if node.target is aten.mm.default:
        input, matrix = node.args
        return _with_matrix(node, input, matrix, None)
    bias, input, matrix = node.args
    factors = {node.kwargs.get(name, 1) for name in ("alpha", "beta")}
    if factors != {1} or not _is_row(bias, node):
        return None
    return _with_matrix(node, input, matrix, bias)


def _with_matrix(node: torch.fx.Node, input: Any, matrix: Any, bias: Any) -> Product | None:
    values = [each.meta["val"] for each in (node, input, matrix)]
    if not all(value.dtype in _DTYPES and value.layout == torch.strided for value in values):
        return None
    weight = _transposed(matrix)
    return Product(node, input, weight, matrix if weight is None else None, bias)


def _transposed(node: torch.fx.Node) -> torch.fx.Node | None:
    """The matrix of which a node is the transposed view."""
    if node.op != "call_function" or node.target not in (aten.permute.default, aten.t.default):
        return None
    if node.target is aten.permute.default and list(node.args[1]) != [1, 0]:  # type: ignore[arg-type]
        return None
    return node.args[0]  # type: ignore[return-value]


def same_number(a: Any, b: Any) -> bool:
    """Whether two sizes are equal for all values of the symbols."""
    if isinstance(a, int) and isinstance(b, int):
        return a == b
    from torch.fx.experimental.symbolic_shapes import statically_known_true

    return bool(statically_known_true(a == b))
