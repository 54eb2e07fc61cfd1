"""Parts of buffers that ops are called with: declared ones do not take some addresses, and what ops
write to is cloned wrongly.

Inductor drops the clone of a part, and passes views of its buffers as they are. So an op may get an
address that is no multiple of 16 bytes where the program made one that is. And where an op writes
to a clone of a part, the clone that Inductor makes in its place has other elements of the buffer
(seen with torch 2.13, and any library's op).
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

import torch

from torch_cubin._inductor.products import same_number

_REVERSE = torch.ops.prims.rev.default
_WRITING = "auto_functionalized_v2"  # stands for the call of an op that writes to its arguments
# Begins the names of a backward graph's inputs that somebody gives to backward(). Inductor aligns
# those on GPUs itself.
OF_BACKWARD = "tangents"
Node = Any  # torch.fx.Node; its arguments have no useful types


def copy_parts(graph: torch.fx.Graph) -> bool:
    """Copies the operands that may begin at no multiple of what the op's pattern says, and parts
    that an op of ours writes to."""
    copied = False
    for node in list(graph.nodes):
        if op_of(node) is None:
            continue
        for operand, align in list(_operands(node)):
            if _is_part(operand, align):
                _copy(graph, node, operand)
                copied = True
        for base in list(_bases(node)):
            if _is_behind_others(base):
                _copy(graph, node, base)
                copied = True
    return copied


def op_of(node: Node) -> Any:
    """The op that a node calls, also one that writes to its arguments; None for other nodes."""
    if node.op != "call_function" or not callable(getattr(node.target, "name", None)):
        return None
    return node.args[0] if node.target.name() == _WRITING else node.target


def declared(name: str) -> Any:
    module: Any = sys.modules.get("torch_cubin._declared.op")  # most processes have none
    return None if module is None else module.find(name)


def _operands(node: Node) -> Iterator[tuple[Node, int]]:
    """The operands of a declared op, and the alignment of their patterns in bytes."""
    if node.target.name() == _WRITING:
        op = declared(node.args[0].name())
        values = {} if op is None else node.kwargs
    else:
        op = declared(node.target.name())
        values = {} if op is None else op._signature.bind(node.args, node.kwargs)
    for name, value in values.items():
        align = op.contract["tensors"].get(name, {}).get("align")
        for each in value if isinstance(value, (list, tuple)) else [value]:
            if align is not None and isinstance(each, torch.fx.Node):
                yield each, align


def _bases(node: Node) -> Iterator[Node]:
    """What an op of ours, declared or built in, writes to."""
    if node.target.name() == _WRITING:
        name = node.args[0].name()
        if name.startswith("cubin::") or declared(name) is not None:
            yield from node.kwargs["_all_bases"]


def _is_behind_others(node: Node) -> bool:
    """Whether the tensor may begin after others in its memory."""
    value = node.meta.get("val")
    if getattr(value, "fake_mode", None) is None or node.op == "placeholder":
        return False  # a graph's input is written in place, or cloned rightly
    return _can_copy(value) and not same_number(value.storage_offset(), 0)


def _is_part(node: Node, align: int) -> bool:
    value = node.meta.get("val")
    if getattr(value, "fake_mode", None) is None or value.dim() == 0:  # a constant has none
        return False
    begins = value.storage_offset() * value.itemsize
    is_on_cpu_and_given = value.device.type == "cpu" and str(node.target).startswith(OF_BACKWARD)
    return _can_copy(value) and (is_on_cpu_and_given or not same_number(begins % align, 0))


def _can_copy(value: torch.Tensor) -> bool:
    """With the same strides."""
    made = torch.empty_like(value).stride()
    return value.dim() > 0 and all(map(same_number, made, value.stride()))


def _copy(graph: torch.fx.Graph, node: Node, part: Node) -> None:
    """The elements in reverse, twice: one loop, which Inductor does not take for no work."""
    value = part.meta["val"]
    is_input = part.op == "placeholder"
    with value.fake_mode:
        made = torch.empty_like(value)
    with graph.inserting_before(node) if is_input else graph.inserting_after(part):
        first = graph.call_function(_REVERSE, (part, [0]))
    with graph.inserting_after(first):
        second = graph.call_function(_REVERSE, (first, [0]))
    first.meta["val"] = second.meta["val"] = made
    if is_input:  # others may write to it
        node.replace_input_with(part, second)
    else:  # the backward may be given it, too
        part.replace_all_uses_with(second, delete_user_cb=lambda user: user is not first)
