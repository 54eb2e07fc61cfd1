"""Experiments: whether rows have the same bits alone and in a batch, operator by operator."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

ROWS = 9
_NAMES = torch._C._dispatch_get_all_op_names()


def _overloads() -> Iterator[Any]:
    for full in sorted(_NAMES):
        namespace, _, name = full.partition("::")
        packet, _, overload = name.partition(".")
        if namespace == "aten" and not packet.endswith("_") and not overload.endswith("out"):
            op = getattr(getattr(torch.ops.aten, packet), overload or "default")
            if torch.Tag.pointwise in op.tags and torch.Tag.nondeterministic_seeded not in op.tags:
                yield op


POINTWISE = list(_overloads())


def rows_of(device: str) -> Iterator[Tensor]:
    """Lengths that are no multiples of a vector, so that a row's elements have other places."""
    draw = torch.Generator().manual_seed(0)
    for dtype in (torch.float32, torch.bfloat16):
        for low, high, columns in ((0.05, 0.95, 37), (-4.0, 4.0, 200), (1.1, 9.0, 13)):
            x = torch.empty(ROWS, columns).uniform_(low, high, generator=draw)
            yield x.to(device, dtype)


def arguments_of(op: Any, device: str) -> Iterator[tuple[Any, ...]]:
    """Arguments that make a call, as the dispatcher passes them; none for schemas with others than
    tensors and numbers."""
    for x in rows_of(device):
        found: list[Any] = []
        for argument in op._schema.arguments:
            kind = str(argument.type)
            if argument.kwarg_only:
                continue
            if kind == "Tensor":
                found.append(x if not found else x.flip(0, 1).contiguous())
            elif argument.has_default_value():
                found.append(argument.default_value)
            elif kind in ("number", "float"):
                found.append(0.5)
            else:
                return
        try:
            op(*found)
        except (RuntimeError, NotImplementedError):
            continue  # another dtype
        yield tuple(found)


def differs(call: Callable[..., Any], args: Sequence[Any]) -> bool:
    """Whether any row of a result depends on the rows beside it."""
    whole = _results(call(*args))
    for first, last in ((0, 1), (4, 5), (ROWS - 1, ROWS), (1, 4)):
        own = [x[first:last].clone() if isinstance(x, Tensor) and x.dim() else x for x in args]
        for part, every in zip(_results(call(*own)), whole, strict=True):
            rows = every[first:last]
            same = (part == rows) | (part.isnan() & rows.isnan())
            if not bool(same.all()):
                return True
    return False


def _results(result: Any) -> list[Tensor]:
    results = result if isinstance(result, (tuple, list)) else [result]
    return [each for each in results if isinstance(each, Tensor) and each.dim()]


def _index(x: Tensor) -> Tensor:
    return torch.arange(x.shape[-1], device=x.device).flip(0)


MOVING: dict[str, Callable[[Tensor], Any]] = {
    "_to_copy": lambda x: x.to(torch.float16),
    "amax": lambda x: x.amax(-1),
    "amin": lambda x: x.amin(-1),
    "argmax": lambda x: x.argmax(-1),
    "argmin": lambda x: x.argmin(-1),
    "bucketize": lambda x: torch.bucketize(x, torch.tensor([0.0, 1.0], dtype=x.dtype).to(x.device)),
    "cat": lambda x: torch.cat([x, x], 1),
    "clone": lambda x: x.t().clone().t(),
    "constant_pad_nd": lambda x: torch.nn.functional.pad(x, (1, 2)),
    "copy_": lambda x: torch.empty_like(x).copy_(x),
    "embedding": lambda x: torch.nn.functional.embedding((x > 1).long(), x.new_ones(2, 3)),
    "flip": lambda x: x.flip(1),
    "gather": lambda x: x.gather(1, _index(x).expand(x.shape)),
    "index": lambda x: x[:, _index(x)],
    "index_select": lambda x: x.index_select(1, _index(x)),
    "masked_fill": lambda x: x.masked_fill(x > 1, 3.0),
    "max": lambda x: x.max(-1),
    "min": lambda x: x.min(-1),
    "mode": lambda x: x.mode(-1).values,
    "roll": lambda x: x.roll(2, 1),
    "scatter": lambda x: x.scatter(1, _index(x)[None, :3].expand(len(x), 3), 2.0),
    "sort": lambda x: x.sort(-1),
    "stack": lambda x: torch.stack([x, x], 1),
    "sum": lambda x: x.mul(9).int().sum(-1),  # of integers
    "topk": lambda x: x.topk(4, -1),
    "where": lambda x: torch.where(x > 1, x, -x),
}
