"""A linear layer whose K is divided among ranks, with a sum in one order for every number of ranks.

NCCL chooses the order in which an all-reduce adds, by the number of ranks and the size. Here the
partial products travel in float32 and every rank adds them by the same tree. The parts and the tree
also serve the products of DTensors (torch_cubin/_drop_in/tensor_parallel.py).
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from torch_cubin import errors
from torch_cubin._ops import checks
from torch_cubin._ops.batch_invariant import batch_invariant

_NAME = "row_parallel_linear"


class _Gather(torch.autograd.Function):
    """The parts of all ranks. All then compute the same, so a rank's gradient is its own part's."""

    @staticmethod
    def forward(ctx: Any, parts: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.own = slice(group.rank() * len(parts), (group.rank() + 1) * len(parts))
        gathered = parts.new_empty(group.size() * len(parts), *parts.shape[1:])
        dist.all_gather_into_tensor(gathered, parts.contiguous(), group=group)
        return gathered

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad[ctx.own], None


def row_parallel_linear(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    parts: int,
    group: dist.ProcessGroup | None = None,
) -> Tensor:
    """``input @ weight.t() + bias``, where K is summed in ``parts`` parts that a tree joins.

    Each part is summed from zero in float32, batch-invariantly, and the parts are added as a tree
    by their numbers: (0 + 1) + (2 + 3). So 1, 2 and 4 ranks give the same bits for ``parts=4``, the
    one rank with the whole ``input`` and ``weight``, others with their columns of both. It replaces
    a product and an all-reduce, and gathers a result of float32 from every rank (where a rank's
    number of parts is a power of two; else more).

    ``install(batch_invariant=True, tensor_parallel=4)`` does this for models that
    ``parallelize_module`` divides.

    Under autocast operands are cast to its dtype, which the result has, as F.linear does.

    Args:
        input: (..., K), of this rank's columns.
        weight: (N, K), of this rank's columns, of input's dtype.
        bias: (N,), the same on all ranks; added once, before the result is rounded.
        parts: into which the K of all ranks is cut; a multiple of the number of ranks.
        group: the ranks; None for one process alone.
    """
    checks.require_tensors("torch_cubin.row_parallel_linear", input=input, weight=weight)
    ranks = 1 if group is None else group.size()
    own, rest = divmod(parts, ranks)
    if own < 1 or rest:
        raise _fault(
            "argument 'parts'", "does not fit the group", f"a multiple of {ranks}", str(parts)
        )
    if input.dim() < 1 or weight.dim() != 2 or input.shape[-1] != weight.shape[1]:
        shapes = f"{tuple(input.shape)} and {tuple(weight.shape)}"
        raise _fault("", "has shapes that do not fit", "input (..., K) and weight (N, K)", shapes)
    if weight.shape[1] % own:
        raise _fault(
            "argument 'weight'", "cannot be cut into equal parts", f"K a multiple of {own}",
            str(weight.shape[1]),
        )  # fmt: skip
    if torch.is_autocast_enabled(input.device.type):  # else it would round the sums of each part
        from torch_cubin._ops import autocast  # and the rules of attention, which few calls need

        input, weight = (autocast.cast(each) for each in (input, weight))
    partial = summed_parts(input.reshape(-1, input.shape[-1]), weight.t(), own)
    total = tree(partial if group is None else _Gather.apply(partial, group))
    if bias is not None:
        total = total + bias
    return total.to(input.dtype).reshape(*input.shape[:-1], weight.shape[0])


def summed_parts(a: Tensor, b: Tensor, count: int) -> Tensor:
    """The products of ``count`` equal parts of K, (parts, ..., M, N), each summed from zero.

    float32 for operands of 16 bits. As long as their number is even, neighbours are added as the
    tree of all ranks adds them, so that fewer parts travel: a rank's first part has an even number.
    """
    with batch_invariant():
        cuts = zip(_cut(a, a.dim() - 1, count), _cut(b, b.dim() - 2, count), strict=True)
        partial = torch.stack([_product(*each) for each in cuts])
    while len(partial) % 2 == 0:
        partial = _pairs(partial)
    return partial


def _cut(x: Tensor, dim: int, count: int) -> list[Tensor]:
    """Equal parts along a dim, of the layout that they have where each is a rank's own tensor."""
    if count == 1:
        return [x]
    size = x.shape[dim] // count
    parts = [x.narrow(dim, i * size, size) for i in range(count)]
    steps = [size * x.stride(dim), *(stride for stride in x.stride() if stride != 1)]
    # Kernels are chosen by whether rows begin at multiples of 16 bytes, and then add alike.
    aligned = all(step * x.element_size() % 16 == 0 for step in steps)
    return parts if aligned else [part.clone() for part in parts]


def _product(a: Tensor, b: Tensor) -> Tensor:
    if a.dtype in (torch.float16, torch.bfloat16):
        zero = a.new_zeros((), dtype=torch.float32)
        return torch.ops.cubin.addmm(zero, a, b, out_dtype=torch.float32, beta=0)
    return torch.ops.cubin.matmul(a, b)


def tree(parts: Tensor) -> Tensor:
    """The sum over the first dim: neighbours first, then the sums of neighbours."""
    while len(parts) > 1:
        parts = _pairs(parts)
    return parts[0]


def _pairs(parts: Tensor) -> Tensor:
    """The sums of neighbours; the last one of an odd number remains."""
    pairs = parts[0 : len(parts) // 2 * 2 : 2] + parts[1::2]
    return torch.cat((pairs, parts[-1:])) if len(parts) % 2 else pairs


def _fault(what: str, problem: str, expected: str, got: str) -> errors.Error:
    object = f"torch_cubin.{_NAME} {what}".rstrip()
    return errors.fault("input", object, problem, expected=expected, got=got)


__all__ = ["row_parallel_linear", "summed_parts", "tree"]
