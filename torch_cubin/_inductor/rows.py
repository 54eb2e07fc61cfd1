"""Rows of a graph after AOTAutograd that do not lie together in memory, and whose sums are taken.

A convolution leaves its channels apart: the columns of a row of what models make of it
(`flatten(2).transpose(1, 2)`) are as many elements apart as there are rows. Elementwise operators
keep these strides, so that all layers of the model read and write them. A norm's kernel then loops,
and Inductor may split a row's sum among blocks. So such rows are copied once, before their first
norm, and all results of theirs lie together; reductions.py keeps such rows in registers.
"""

from __future__ import annotations

import functools
from typing import Any

import torch

from torch_cubin._drop_in import aten_kernels, install
from torch_cubin._inductor import parts, reductions
from torch_cubin._inductor.products import same_number
from torch_cubin._ops.batch_invariant import is_batch_invariant
from torch_cubin._pytorch import inductor, operators

aten, prims = torch.ops.aten, torch.ops.prims
Node = Any  # torch.fx.Node; its arguments have no useful types
_SUMS = (aten.var_mean.correction, aten.mean.dim, aten.sum.dim_IntList)  # a norm's
_STRIDED_ANEW = (
    aten.as_strided.default, aten.as_strided_copy.default, aten.as_strided_scatter.default,
)  # fmt: skip
_NAMESPACES = ("aten", "prims", "cubin")  # of ops that take any strides
_BYTES = 1 << 22  # fewer stay in the cache, in whatever order they are read
_STEPS = 6  # at most between rows and their norm's sum: a residual, conversions, a square


@functools.cache
def copy() -> Any:
    """The op that copies rows. Graphs call it between this pass and its lowering alone."""
    library = operators.registry("cubin", "FRAGMENT")
    library.define("_rows_together(Tensor self) -> Tensor")
    library.impl("_rows_together", _rows_together, "CompositeExplicitAutograd")
    _libraries.append(library)
    return torch.ops.cubin._rows_together.default


_libraries: list[torch.library.Library] = []  # which own their registrations


def _rows_together(self: torch.Tensor) -> torch.Tensor:
    return self.clone(memory_format=torch.contiguous_format)


def lay_together(graph: torch.fx.Graph) -> bool:
    # Under batch_invariant() a row's bits may not depend on the size of its batch, as copies do.
    if install.graph_policy() == "off" or is_batch_invariant():
        return False
    if not inductor.keeps_strides_of_results(graph) or _is_backward(graph):
        return False
    together: set[Node] = set()  # the results whose rows will lie together
    copied = False
    for node in list(graph.nodes):
        if not _is_apart(node):
            continue
        sources = node.all_input_nodes
        lie_apart = any(_is_apart(source) and source not in together for source in sources)
        if _is_elementwise(node) and not lie_apart and not together.isdisjoint(sources):
            together.add(node)
        elif _is_copied(node):
            if not copied and _are_strides_read(graph):
                return False
            together.add(_copy(graph, node))
            copied = True
    return copied


def _is_backward(graph: torch.fx.Graph) -> bool:
    given = graph.find_nodes(op="placeholder")
    return any(str(node.target).startswith(parts.OF_BACKWARD) for node in given)


def _is_apart(node: Node) -> bool:
    """Whether the elements of a column are beside each other, and not those of a row."""
    value = node.meta.get("val")
    if not isinstance(value, torch.Tensor) or value.dim() < 2 or value.layout != torch.strided:
        return False
    *others, own = zip(value.shape, value.stride(), strict=True)
    strides = [stride for size, stride in (*others, own) if not same_number(size, 1)]
    if same_number(own[0], 1) or any(same_number(stride, 0) for stride in strides):
        return False
    return not same_number(own[1], 1) and any(same_number(stride, 1) for stride in strides)


def _is_copied(node: Node) -> bool:
    """Whether a norm reads the rows, and nothing elementwise alone does, whose result can be copied
    in its place."""
    value = node.meta["val"]
    if not aten_kernels.serves(value, install.graph_policy(), "norm"):
        return False
    if inductor.size_hint(value.shape[-1]) > reductions.COLUMNS:
        return False
    if inductor.size_hint(value.numel()) * value.itemsize < _BYTES:
        return False
    if len(node.users) == 1 and all(
        _is_elementwise(user) and _is_apart(user) for user in node.users
    ):
        return False
    return _is_summed(node, _STEPS)


def _is_summed(node: Node, steps: int) -> bool:
    """Whether elementwise operators, or none, lead to the sum of the last dim."""
    for user in node.users:
        if user.target in _SUMS and _dims(user) in ([-1], [node.meta["val"].dim() - 1]):
            return True
        # PyTorch's norms clone rows that do not lie together, which Inductor skips.
        leads = _is_elementwise(user) or user.target is aten.clone.default
        if steps and leads and _is_summed(user, steps - 1):
            return True
    return False


def _dims(node: Node) -> Any:
    return node.args[1] if len(node.args) > 1 else node.kwargs.get("dim")


def _is_elementwise(node: Node) -> bool:
    tags = getattr(node.target, "tags", ())
    return torch.Tag.pointwise in tags or node.target is prims.convert_element_type.default


def _are_strides_read(graph: torch.fx.Graph) -> bool:
    """Whether anything in the graph may depend on the strides that it was traced with."""
    return not all(map(_takes_any_strides, graph.nodes))


def _takes_any_strides(node: Node) -> bool:
    if node.op != "call_function":
        return node.op in ("placeholder", "output")
    if node.target in _STRIDED_ANEW:
        return False
    of_numbers = getattr(node.target, "__module__", None) in ("_operator", "math")
    return of_numbers or getattr(node.target, "namespace", None) in _NAMESPACES


def _copy(graph: torch.fx.Graph, node: Node) -> Node:
    value = node.meta["val"]
    before = next(each for each in graph.nodes if each.op != "placeholder")
    is_input = node.op == "placeholder"
    with graph.inserting_before(before) if is_input else graph.inserting_after(node):
        made = graph.call_function(copy(), (node,))
    with value.fake_mode:
        made.meta["val"] = copy()(value)
    node.replace_all_uses_with(made, delete_user_cb=lambda user: _reads(user, made))
    return made


def _reads(user: Node, made: Node) -> bool:
    """Whether it may read the copy: not the copy itself, nor what writes to an input, nor the
    graph's results, which keep their strides."""
    return user is not made and user.op != "output" and user.target is not aten.copy_.default
