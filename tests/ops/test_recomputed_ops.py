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
