"""Dtypes that ops are called with, in packages that AOTInductor makes with torch 2.11.

A package names dtypes by torch.export's numbers, which torch 2.11 takes for its own where it calls
other libraries' operators: bfloat16 becomes quint8, float16 float32, float32 float64. So calls of
our ops omit dtypes that they have by default, those of softmax and of losses become calls of the
public ops, which take none, and others are refused when the package is made.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator
from typing import Any

import torch

from torch_cubin import errors
from torch_cubin._inductor import parts
from torch_cubin._pytorch import operators

ops = torch.ops.cubin
Node = Any  # torch.fx.Node; its arguments have no useful types

_CONVERT = torch.ops.prims.convert_element_type.default
_SOFTMAX = (ops._softmax.default, ops._softmax_autograd.default)
_CROSS_ENTROPY = (ops._cross_entropy.default, ops._cross_entropy_autograd.default)
_LINEAR_CROSS_ENTROPY = (
    ops._linear_cross_entropy.default,
    ops._linear_cross_entropy_autograd.default,
)
# What an op takes for a dtype that is not given; None: the dtype of its first operand.
_DEFAULTS = {
    ("_scaled_matmul", "output_dtype"): torch.bfloat16,
    ("_scaled_grouped_matmul", "output_dtype"): torch.bfloat16,
    ("_scaled_gated_matmul", "dtype"): torch.bfloat16,
    ("_quantize", "dtype"): torch.float8_e4m3fn,
    ("_syrk", "out_dtype"): None,
    ("_symm_square", "out_dtype"): None,
}


def omit_defaults(graph: torch.fx.Graph) -> bool:
    """Omits the dtypes of calls of our ops and declared ops, or raises an error."""
    changed = False
    for node in list(graph.nodes):
        for name, dtype in list(_dtypes(node)):
            changed = True
            if node.target in _SOFTMAX:
                _convert_before(graph, node, dtype)
            elif _is_loss_alone(node, dtype):
                _call_public_loss(graph, node)
            elif dtype == _default(node, name):
                node.kwargs = {key: value for key, value in node.kwargs.items() if key != name}
            else:
                _refuse(node, name, dtype)
    return changed


def _dtypes(node: Node) -> Iterator[tuple[str, torch.dtype]]:
    op = parts.op_of(node)
    if op is None or not (op.name().startswith("cubin::") or parts.declared(op.name())):
        return
    names = [argument.name for argument in operators.schema_of(op).arguments]
    given = {} if op is not node.target else dict(zip(names, node.args, strict=False))
    for name, value in {**given, **node.kwargs}.items():
        if isinstance(value, torch.dtype):
            yield name, value


def _default(node: Node, name: str) -> torch.dtype | None:
    op = node.target.name().removeprefix("cubin::").removesuffix("_autograd")
    if name not in node.kwargs or (op, name) not in _DEFAULTS:
        return None
    return _DEFAULTS[op, name] or node.args[0].meta["val"].dtype


def _convert_before(graph: torch.fx.Graph, node: Node, dtype: torch.dtype) -> None:
    """softmax of the converted rows, which the op converts itself otherwise."""
    rows, log, _ = node.args
    public = ops.log_softmax.default if log else ops.softmax.default
    with graph.inserting_before(node):
        if rows.meta["val"].dtype != dtype:
            converted = graph.call_function(_CONVERT, (rows, dtype))
            with rows.meta["val"].fake_mode:
                converted.meta["val"] = rows.meta["val"].to(dtype)
            rows = converted
        out = graph.call_function(public, (rows, -1))
    out.meta.update(node.meta)
    node.replace_all_uses_with(out)


def _is_loss_alone(node: Node, dtype: torch.dtype) -> bool:
    """Whether nothing but the loss is used of a loss of the operand's dtype."""
    if node.target not in (*_CROSS_ENTROPY, *_LINEAR_CROSS_ENTROPY):
        return False
    used = [user for user in node.users if user.users]
    alone = all(user.target is operator.getitem and user.args[1] == 0 for user in used)
    return alone and node.args[0].meta["val"].dtype == dtype


def _call_public_loss(graph: torch.fx.Graph, node: Node) -> None:
    with graph.inserting_before(node):
        if node.target in _CROSS_ENTROPY:
            rows, target, weight, reduction, ignored, smoothing, _ = node.args
            own = (rows, target, weight, ignored, reduction, smoothing)
            out = graph.call_function(ops.cross_entropy.default, own)
        else:
            rows, head, target, bias, weight, reduction, ignored, smoothing, *_ = node.args
            options = {"linear_bias": bias, "weight": weight, "reduction": reduction}
            options |= {"ignore_index": ignored, "label_smoothing": smoothing}
            out = graph.call_function(
                ops.linear_cross_entropy.default, (rows, head, target), options
            )
    for user in list(node.users):
        if user.users:
            out.meta.update(user.meta)
            user.replace_all_uses_with(out)
        graph.erase_node(user)


def _refuse(node: Node, name: str, dtype: torch.dtype) -> None:
    op = parts.op_of(node).name().replace("cubin::_", "cubin::").removesuffix("_autograd")
    raise errors.fault(
        "input", op, "is called with a dtype that AOTInductor of this version of torch misreads",
        expected=f"the default of '{name}'", got=str(dtype).removeprefix("torch."),
        advice="Make the package with torch 2.12 or later.",
    )  # fmt: skip
