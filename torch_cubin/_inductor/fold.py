"""The pass that folds products with the ops that follow them, on graphs after AOTAutograd.

A product with an activation becomes `_linear_activation`, SwiGLU and similar `_linear_glu` (also
where gate and up are columns of one product), products of one input `_linears`. If the backward
saves the intermediate values, the variant of the op that also returns them is used. Attention reads
what its queries, keys and values are copies of, fewer heads or other strides, and scales its
queries. An input of several products of 8-bit floats is quantised once, and their SwiGLU becomes
`_scaled_gated_matmul` where it is quantised. Rows whose columns are apart are copied before their
norm (rows.py). Operands of declared ops that begin at addresses which the ops refuse are copied
(parts.py). Dtypes are omitted where PyTorch would misread them (dtypes.py). Other graphs are not
changed.

Not folded (benchmarks/NOTES.md): the gradient of an activation into the product before it, a
residual into the product that it is added to, a bias's gradient into its weight's. Inductor fuses
these with a norm or another neighbour, which was as quick where it was measured, and rounds less.
"""

from __future__ import annotations

import collections
import operator
from collections.abc import Callable, Iterable
from typing import Any

import torch

from torch_cubin._inductor import activations, attentions, dtypes, parts, quantized, rows
from torch_cubin._inductor.products import Product, columns_at, product_at, same_number
from torch_cubin._ops.batch_invariant import is_batch_invariant
from torch_cubin._pytorch import inductor

aten = torch.ops.aten
ops = torch.ops.cubin
Node = Any  # torch.fx.Node; its arguments have no useful types


def fold(graph: torch.fx.Graph) -> None:
    for run in (
        quantized.merge_quantisations, _fold_epilogues, _fold_one_input, _fold_copies,
        rows.lay_together, parts.copy_parts,
        *([dtypes.omit_defaults] if inductor.misreads_dtypes() else []),
    ):  # fmt: skip
        if run(graph):
            inductor.sort(graph)
            # Before the next run, which would fold replaced products once more.
            graph.eliminate_dead_code()
            graph.lint()


def _fold_epilogues(graph: torch.fx.Graph) -> bool:
    folded = False
    # So that a gated product is matched before the activation in it.
    for node in reversed(list(graph.nodes)):
        if node.op != "call_function":
            continue
        if not node.users and not node.is_impure():  # replaced by a folded op
            graph.erase_node(node)
        elif _is_float(node):
            folded |= any(run(graph, node) for run in _EPILOGUES)
        elif node.target in quantized.QUANTIZE:
            folded |= _fold_quantized_gate(graph, node)
    return folded


def _is_float(node: Node) -> bool:
    value = node.meta.get("val")
    return isinstance(value, torch.Tensor) and value.is_floating_point()


def _fold_activation(graph: torch.fx.Graph, root: Node) -> bool:
    dtype = root.meta["val"].dtype
    found = activations.activation_of(root, dtype)
    if found is None:
        return False
    name, leaf, seen = found
    product = product_at(leaf)
    if product is None or not _result_of(root, product, seen):
        return False
    call = _Call(graph, root, product.value)
    weight = call.weight(product)
    if _are_private(seen | {leaf}, root):
        out = call.insert(ops._linear_activation.default, product.input, weight, product.bias, name)
        return call.replace(root, out, seen)
    both = call.insert(
        ops._linear_activation_aux.default, product.input, weight, product.bias, name
    )
    return call.replace_all(both, [root, leaf], seen)


def _fold_gated(graph: torch.fx.Graph, root: Node) -> bool:
    if root.target is not aten.mul.Tensor:
        return False
    if not all(isinstance(factor, torch.fx.Node) for factor in root.args):
        return False
    dtype = root.meta["val"].dtype
    for gate_value, up_value in (root.args, root.args[::-1]):
        found = activations.activation_of(gate_value, dtype)
        if found is None:
            continue
        name, gate_leaf, seen = found
        up_leaf = activations.skip(up_value, dtype, seen)
        gate, up = columns_at(gate_leaf), columns_at(up_leaf)
        if gate is None or up is None or gate_leaf is up_leaf:
            continue
        if gate.bias is not None or up.bias is not None or not _same_input(gate, up):
            continue
        seen |= gate.between | up.between
        if not (_result_of(root, gate, seen) and _result_of(root, up, seen)):
            continue
        if _depend([gate, up]):
            continue
        private = _are_private(seen | {gate_leaf, up_leaf}, root)
        # The backward, or others, may need the whole product, and it is left then. Results with
        # and without gradients have the same bits under batch_invariant(): it is always left.
        if (gate.columns or up.columns) and (not private or is_batch_invariant()):
            continue
        call = _Call(graph, root, gate.value)
        weights = [call.weight(product) for product in (gate, up)]
        if private:
            out = call.insert(ops._linear_glu.default, gate.input, *weights, name)
            return call.replace(root, out, seen)
        three = call.insert(ops._linear_glu_aux.default, gate.input, *weights, name)
        return call.replace_all(three, [root, gate_leaf, up_leaf], seen)
    return False


_EPILOGUES = (_fold_gated, _fold_activation)


def _fold_quantized_gate(graph: torch.fx.Graph, root: Node) -> bool:
    found = quantized.quantized_gate_at(root)
    if found is None or not _are_private(found.between, root):
        return False
    call = _Call(graph, root, found.value)
    out = call.insert(
        ops._scaled_gated_matmul.default, *found.operands, dtype=found.value.dtype, **found.options
    )
    root.replace_all_uses_with(out)
    return True


def _fold_one_input(graph: torch.fx.Graph) -> bool:
    groups: dict[Any, list[Node]] = collections.defaultdict(list)
    for node in graph.nodes:
        product = product_at(node)
        if product is not None and product.weight is not None:
            shape = tuple(str(size) for size in product.input.meta["val"].shape)
            groups[quantized.base_of(product.input), shape].append(node)
    folded = False
    for nodes in groups.values():
        # Only now: results of other groups, which are replaced by then, may be their operands.
        products = [product for product in map(product_at, nodes) if product is not None]
        if len(products) < 2 or _depend(products):
            continue
        call = _Call(graph, products[-1].node, products[0].value)
        weights = [product.weight for product in products]
        # One for each weight: AOTInductor passes None for an empty list.
        biases = [product.bias for product in products]
        outs = call.insert(ops._linears.default, products[0].input, weights, biases)
        folded |= call.replace_all(outs, nodes, ())
    return folded


def _fold_copies(graph: torch.fx.Graph) -> bool:
    folded = False
    # The layers of a model share a mask: what empty rows see is computed once.
    completed: dict[Node, Node] = {}
    for node in list(graph.nodes):
        found = attentions.with_copies(node)
        if found is None:
            continue
        call, query = _Call(graph, node, found.query.meta["val"]), found.query
        for view in found.views:
            query = call.insert(view.target, query, *view.args[1:])
        mask = found.mask
        if found.empty_rows_see_all:
            if mask not in completed:
                completed[mask] = attentions.seen_by_empty_rows(call.insert, mask)
            mask = completed[mask]
        out = call.insert(
            attentions.OURS, *(query, found.key, found.value, mask, 0.0),
            found.is_causal, None, scale=found.scale, enable_gqa=True,
        )  # fmt: skip
        for result in found.results:
            result.replace_all_uses_with(out)
        # PyTorch's op is not dead code: it may draw random numbers.
        for each in {*found.results, node} - {node}:
            graph.erase_node(each)
        graph.erase_node(node)
        for copy, original in attentions.copies_after(out):
            copy.replace_all_uses_with(original)
        folded = True
    return folded


def _same_input(a: Product, b: Product) -> bool:
    return (
        quantized.base_of(a.input) is quantized.base_of(b.input)
        and _same_shape(a.input.meta["val"], b.input.meta["val"])
        and _same_shape(a.value, b.value)
    )


def _result_of(root: Node, product: Product, seen: Iterable[Node]) -> bool:
    """Whether the root has exactly the product's elements, without broadcasting."""
    value = root.meta["val"]
    if value.dtype != product.value.dtype or value.device != product.value.device:
        return False
    if not same_number(value.numel(), product.value.numel()):
        return False
    return _same_shape(value, product.value) or _sizes_of(root, seen) is not None


def _same_shape(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.dim() == b.dim() and all(map(same_number, a.shape, b.shape))


def _sizes_of(root: Node, seen: Iterable[Node]) -> list[Any] | None:
    """The root's sizes, as a view gives them: symbolic ones are nodes of the graph."""
    shape = root.meta["val"].shape
    for node in seen:
        if node.target not in activations.VIEWS:
            continue
        sizes, own = node.args[1], node.meta["val"].shape
        if _same_shape(node.meta["val"], root.meta["val"]):
            return list(sizes)
        # A view of a product of which the root has some columns.
        leading = len(own) == len(shape) and all(map(same_number, own[:-1], shape[:-1]))
        if leading and isinstance(shape[-1], int):
            return [*sizes[:-1], shape[-1]]
    return None


def _are_private(nodes: Iterable[Node], root: Node) -> bool:
    """Whether the rest of the graph reads only the root."""
    inside = {*nodes, root}
    return all(user in inside for node in inside if node is not root for user in node.users)


def _depend(products: list[Product]) -> bool:
    """Whether an operand of one product is computed from another product."""
    results = {product.node for product in products}
    seen: set[Node] = set()
    stack = [source for product in products for source in product.sources()]
    while stack:
        node = stack.pop()
        if node in results:
            return True
        if node not in seen:
            seen.add(node)
            stack.extend(node.all_input_nodes)
    return False


_KEPT_META = ("stack_trace", "nn_module_stack", "source_fn_stack", "original_aten")


class _Call:
    """Inserts calls that replace nodes of a graph, all before one node."""

    def __init__(self, graph: torch.fx.Graph, before: Node, like: torch.Tensor) -> None:
        self._graph, self._before, self._like = graph, before, like

    def insert(self, target: Callable[..., Any], *args: Any, **numbers: Any) -> Node:
        with self._graph.inserting_before(self._before):
            node = self._graph.call_function(target, args, numbers)
        for key in _KEPT_META:
            if key in self._before.meta:
                node.meta[key] = self._before.meta[key]
        values, options = torch.fx.map_arg((args, numbers), lambda argument: argument.meta["val"])
        with self._like.fake_mode:  # type: ignore[attr-defined]
            node.meta["val"] = target(*values, **options)
        return node

    def weight(self, product: Product) -> Node:
        if product.columns is not None:
            return self.insert(aten.slice.Tensor, product.weight, 0, *product.columns)
        if product.weight is not None:
            return product.weight
        return self.insert(aten.permute.default, product.matrix, [1, 0])

    def replace(self, node: Node, by: Node, seen: Iterable[Node]) -> bool:
        if not _same_shape(node.meta["val"], by.meta["val"]):
            sizes = _sizes_of(node, seen)
            assert sizes is not None  # guaranteed by _result_of()
            by = self.insert(aten.reshape.default, by, sizes)
        node.replace_all_uses_with(by)
        return True

    def replace_all(self, results: Node, nodes: list[Node], seen: Iterable[Node]) -> bool:
        # All items are inserted first, because the nodes are arguments of one another.
        items = [self.insert(operator.getitem, results, i) for i in range(len(nodes))]
        for node, item in zip(nodes, items, strict=True):
            self.replace(node, item, seen)
        return True
