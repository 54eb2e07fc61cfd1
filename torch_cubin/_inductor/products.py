"""Products in a graph after AOTAutograd: PyTorch's, which install() serves, and our own ops."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch

from torch_cubin._drop_in import install

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
