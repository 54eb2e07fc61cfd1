"""Checkpointed calls that are composed of other ops: their recomputation ends early, in one of
these ops, by an exception that the C API below the public op would turn into a RuntimeError."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

import torch_cubin

GROUPS = ((9, 6), (4, 6, 8))
CASES: dict[str, tuple[dict[str, Any], tuple[tuple[int, ...], ...]]] = {
    "bias": ({}, (*GROUPS, (4, 8))),
    "scale": ({}, (*GROUPS, (9,))),
    "activation": ({"activation": "silu"}, GROUPS),
    "out_rows": ({"out_rows": torch.arange(8, -1, -1, dtype=torch.int32)}, GROUPS),
}


@pytest.mark.parametrize("name", CASES)
def test_gradients_of_a_checkpointed_product_with_options(name: str) -> None:
    options, shapes = CASES[name]
    inputs = [torch.randn(shape, requires_grad=True) for shape in shapes]
    ends = torch.tensor([3, 3, 7, 9], dtype=torch.int32)

    def product(a: Tensor, b: Tensor, *own: Tensor) -> Tensor:
        given = dict.fromkeys((name,), own[0]) if own else options
        return torch.ops.cubin.grouped_matmul(a, b, offs=ends, **given)

    expected = torch.autograd.grad(product(*inputs).sum(), inputs)
    saved = torch_cubin.checkpoint_ops(torch.ops.cubin.grouped_matmul)
    contexts = functools.partial(create_selective_checkpoint_contexts, saved)
    for chosen in ({}, {"context_fn": contexts}):
        out = checkpoint(product, *inputs, use_reentrant=False, **chosen)
        torch.testing.assert_close(torch.autograd.grad(out.sum(), inputs), expected)


IDS = torch.tensor([[0, 3], [1, 2], [3, 0]])
DIFFERENTIATED: dict[str, tuple[Any, tuple[tuple[int, ...], ...]]] = {
    "attention": (torch.ops.cubin.scaled_dot_product_attention, ((2, 2, 5, 4),) * 3),
    "logsumexp": (torch.ops.cubin.attention_forward, ((2, 2, 5, 4),) * 3),
    "experts": (
        lambda x, *rest: torch_cubin.moe(x, IDS, *rest),
        ((3, 8), (3, 2), (4, 12, 8), (4, 8, 6)),
    ),
}


@pytest.mark.parametrize("name", DIFFERENTIATED)
def test_gradients_that_a_checkpointed_region_computes(name: str) -> None:
    """A recomputation ends within the composition that gives them a derivative."""
    function, shapes = DIFFERENTIATED[name]
    inputs = [torch.randn(shape, requires_grad=True) for shape in shapes]

    def region(*inputs: Tensor) -> tuple[Tensor, ...]:
        results = function(*inputs)
        total = sum(x.sin().sum() for x in (results if isinstance(results, tuple) else [results]))
        return torch.autograd.grad(total, inputs, create_graph=True)

    def gradients(first: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        return torch.autograd.grad(sum(x.sin().sum() for x in first), inputs)

    expected = gradients(region(*inputs))
    found = gradients(checkpoint(region, *inputs, use_reentrant=False))
    torch.testing.assert_close(found, expected)
