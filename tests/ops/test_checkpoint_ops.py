"""torch_cubin.checkpoint_ops(): selective checkpointing saves what public ops give."""

from __future__ import annotations

import functools

import pytest
import torch
import torch.nn.functional as F
from drop_in_cases import Ops
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

import torch_cubin

cubin = torch.ops.cubin
_X, _W = torch.randn(4, 8), torch.randn(8, 8)
_Q = torch.randn(1, 2, 4, 8)
_CACHE = torch.zeros(1, 16, 2, 8, dtype=torch.float16)
_LENGTHS = torch.ones(1, dtype=torch.int32)
# Calls, with tensors that may require grad.
CALLS = {
    "matmul": lambda x, q: cubin.matmul(x, _W),
    "linear": lambda x, q: cubin.linear(x, _W),
    "linear with an activation": lambda x, q: cubin.linear(x, _W, activation="gelu"),
    "addmm": lambda x, q: cubin.addmm(x, x, _W),
    "addmm with a dtype": lambda x, q: cubin.addmm(x, x, _W, torch.float32),
    "addmm_into": lambda x, q: cubin.addmm_into(x.detach().clone(), x.detach(), _W),
    "grouped_matmul": lambda x, q: cubin.grouped_matmul(x, _W[None], offs=_LENGTHS),
    "grouped_matmul of batches": lambda x, q: cubin.grouped_matmul(x[None], _W[None]),
    "layer_norm": lambda x, q: cubin.layer_norm(x, (8,)),
    "log_softmax": lambda x, q: cubin.log_softmax(x, 1),
    "scaled_dot_product_attention": lambda x, q: cubin.scaled_dot_product_attention(q, q, q),
    "scaled_dot_product_attention with dropout": lambda x, q: cubin.scaled_dot_product_attention(
        q, q, q, dropout_p=0.5
    ),
    "attention_forward": lambda x, q: cubin.attention_forward(q, q, q)[0],
    "flash_attention": lambda x, q: cubin.flash_attention(q, q, q),
    "flash_attention_with_kvcache": lambda x, q: cubin.flash_attention_with_kvcache(
        q.detach().transpose(1, 2).half(), _CACHE, _CACHE, cache_seqlens=_LENGTHS
    ),
}


@pytest.mark.parametrize("grad", [True, False])
@pytest.mark.parametrize("name", CALLS)
def test_lists_what_a_mode_sees(name, grad) -> None:
    listed = torch_cubin.checkpoint_ops(getattr(cubin, name.split()[0]))
    x, q = (tensor.clone().requires_grad_(grad) for tensor in (_X, _Q))
    with torch.set_grad_enabled(grad), Ops() as seen:
        CALLS[name](x, q)
    ours = [op for op, _ in seen.calls if op.namespace == "cubin"]
    assert ours
    assert set(ours) <= set(listed)
    assert set(listed) <= set(torch_cubin.checkpoint_ops())


def _block(x, w, q):
    h = cubin.linear(x, w).relu()
    return cubin.matmul(h, w).sin().sum() + cubin.flash_attention(q, q, q).sin().sum()


def _contexts(how: str, *ops):
    listed = torch_cubin.checkpoint_ops(*ops)
    if how == "list":
        return functools.partial(create_selective_checkpoint_contexts, listed)

    def policy(context, op, *args, **kwargs):
        saved = op in set(listed)
        return CheckpointPolicy.MUST_SAVE if saved else CheckpointPolicy.PREFER_RECOMPUTE

    return functools.partial(create_selective_checkpoint_contexts, policy)


@pytest.mark.parametrize("how", ["list", "policy"])
@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize(
    ("ops", "again"),
    [
        ((cubin.linear, cubin.matmul, cubin.flash_attention), 0),
        ((cubin.linear.default, cubin.flash_attention.default, torch.ops.aten.mm.default), 1),
        ((), 0),
        ((torch.ops.aten.mm.default,), 3),
    ],
)
def test_saved_results_are_not_computed_again(ops, again, compiled, how) -> None:
    torch._dynamo.reset()
    computed = []

    def inspected(graph, inputs):
        computed.append(sum(str(n.target).startswith("cubin._") for n in graph.graph.nodes))
        return graph.forward

    contexts = _contexts(how, *ops)

    def step(x, w, q):
        return checkpoint(_block, x, w, q, use_reentrant=False, context_fn=contexts)

    if compiled:
        from functorch.compile import min_cut_rematerialization_partition as partition
        from torch._dynamo.backends.common import aot_autograd

        backend = aot_autograd(fw_compiler=inspected, bw_compiler=inspected, partition_fn=partition)
        step = torch.compile(step, backend=backend, fullgraph=True)
    leaves = [tensor.clone().requires_grad_() for tensor in (_X, _W, _Q)]
    expected = torch.autograd.grad(_block(*leaves), leaves)
    loss = step(*leaves)
    with Ops() as ops_run:
        grads = torch.autograd.grad(loss, leaves)
    for got, wanted in zip(grads, expected, strict=True):
        torch.testing.assert_close(got, wanted)
    # The backward's own: two products for each of two, and attention's backward.
    assert (computed[1] if compiled else ops_run.cubin()) == 5 + again


def test_under_drop_in() -> None:
    x, w = _X.clone().requires_grad_(), _W.clone().requires_grad_()
    contexts = _contexts("list", cubin.linear)
    with torch_cubin.drop_in():
        out = checkpoint(
            lambda x: F.linear(x, w).sin(), x, use_reentrant=False, context_fn=contexts
        )
        with Ops() as ops:
            out.sum().backward()
    assert ops.cubin() == 2


def test_checkpoint_ops_refuses_functions() -> None:
    with pytest.raises(torch_cubin.Error, match=r"\[input\].*got function"):
        torch_cubin.checkpoint_ops(lambda: 0)
