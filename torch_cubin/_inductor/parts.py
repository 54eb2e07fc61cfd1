"""Parts of buffers that declared ops are called with, at addresses that they do not take.

Inductor drops the clone of a part, and passes views of its buffers as they are. So an op may get an
address that is no multiple of 16 bytes where the program made one that is.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

import torch

from torch_cubin._inductor.products import same_number

_REVERSE = torch.ops.prims.rev.default
Node = Any  # torch.fx.Node; its arguments have no useful types


def copy_parts(graph: torch.fx.Graph) -> bool:
    """Copies the operands that may begin at no multiple of what the op's pattern says."""
    declared: Any = sys.modules.get("torch_cubin._declared.op")  # most processes have none
    copied = False
    for node in list(graph.nodes) if declared is not None else ():
        name = getattr(node.target, "name", None) if node.op == "call_function" else None
        op = declared.find(name()) if callable(name) else None
        for operand, align in [] if op is None else list(_operands(op, node)):
            if _is_part(operand, align):
                _copy(graph, node, operand)
                copied = True
    return copied


def _operands(op: Any, node: Node) -> Iterator[tuple[Node, int]]:
    """The operands, and the alignment of their patterns in bytes."""
    for name, value in op._signature.bind(node.args, node.kwargs).items():
        align = op.contract["tensors"].get(name, {}).get("align")
        for each in value if isinstance(value, (list, tuple)) else [value]:
            if align is not None and isinstance(each, torch.fx.Node):
                yield each, align


def _is_part(node: Node, align: int) -> bool:
    value = node.meta.get("val")
    if getattr(value, "fake_mode", None) is None or value.dim() == 0:  # a constant has none
        return False
    begins = value.storage_offset() * value.itemsize
    return value.is_contiguous() and not same_number(begins % align, 0)


def _copy(graph: torch.fx.Graph, node: Node, part: Node) -> None:
    """The elements in reverse, twice: one loop, which Inductor does not take for no work."""
    value = part.meta["val"]
    is_input = part.op == "placeholder"
    with value.fake_mode:
        made = torch.empty_like(value, memory_format=torch.contiguous_format)
    with graph.inserting_before(node) if is_input else graph.inserting_after(part):
        first = graph.call_function(_REVERSE, (part, [0]))
    with graph.inserting_after(first):
        second = graph.call_function(_REVERSE, (first, [0]))
    first.meta["val"] = second.meta["val"] = made
    if is_input:  # others may write to it
        node.replace_input_with(part, second)
    else:  # the backward may be given it, too
        part.replace_all_uses_with(second, delete_user_cb=lambda user: user is not first)
