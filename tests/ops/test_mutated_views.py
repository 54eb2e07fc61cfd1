"""Ops that write to a view, compiled: the view that they write to is the one of this call.

Inductor loses a storage offset that is a symbol (https://github.com/pytorch/pytorch/issues/198068).
"""

from __future__ import annotations

import pytest
import torch
from declared import axpy
from torch._dynamo.testing import CompileCounterWithBackend

LAYERS, BATCH, ROWS, HEADS, WIDTH, PAGE = 3, 2, 16, 2, 64, 4
attend = torch.ops.cubin.flash_attention_with_kvcache


def pools(device):
    torch.manual_seed(0)
    sizes = (LAYERS, BATCH, ROWS, HEADS, WIDTH)
    return [torch.randn(sizes, device=device).bfloat16() for _ in range(2)]


def new_rows(device):
    torch.manual_seed(1)
    return [torch.randn(BATCH, 1, HEADS, WIDTH, device=device).bfloat16() for _ in range(3)]


def by_index(k_pool, v_pool, q, k, v, lengths, layer):
    return attend(q, k_pool[layer], v_pool[layer], k, v, cache_seqlens=lengths, causal=True)


def by_narrow(k_pool, v_pool, q, k, v, lengths, layer):
    caches = (x.narrow(0, layer, 1).squeeze(0) for x in (k_pool, v_pool))
    return attend(q, *caches, k, v, cache_seqlens=lengths, causal=True)


def by_as_strided(k_pool, v_pool, q, k, v, lengths, layer):
    caches = (
        x.as_strided(x.shape[1:], x.stride()[1:], layer * x.stride(0)) for x in (k_pool, v_pool)
    )
    return attend(q, *caches, k, v, cache_seqlens=lengths, causal=True)


def by_batch_index(k_pool, v_pool, q, k, v, lengths, layer):
    """One graph for all layers: the pool is one cache of more sequences."""
    sequences = layer * BATCH + torch.arange(BATCH, dtype=torch.int32, device=q.device)
    caches = (x.flatten(0, 1) for x in (k_pool, v_pool))
    named = {"cache_seqlens": lengths, "cache_batch_idx": sequences}
    return attend(q, *caches, k, v, causal=True, **named)


def by_block_table(k_pool, v_pool, q, k, v, lengths, layer):
    """The same with pages: all layers' pages form one cache, in which a sequence has four."""
    pages = BATCH * ROWS // PAGE
    table = torch.arange(pages, dtype=torch.int32, device=q.device).view(BATCH, -1)
    caches = (x.view(LAYERS * pages, PAGE, HEADS, WIDTH) for x in (k_pool, v_pool))
    named = {"cache_seqlens": lengths, "block_table": table + layer * pages}
    return attend(q, *caches, k, v, causal=True, **named)


ONE_GRAPH = [by_batch_index, by_block_table]


STEPS = [by_index, by_narrow, by_as_strided, *ONE_GRAPH]


@pytest.mark.parametrize(
    ("step", "dynamic", "backend"),
    [
        *((step, None, backend) for step in STEPS for backend in ("aot_eager", "inductor")),
        # The lost write was Inductor's.
        *((step, True, "inductor") for step in (by_narrow, by_as_strided, by_block_table)),
        *((step, False, "inductor") for step in (by_index, by_batch_index)),
    ],
)
def test_a_layer_of_a_pool(step, dynamic, backend, device):
    torch.compiler.reset()
    counter = CompileCounterWithBackend(backend)
    compiled = torch.compile(step, backend=counter, dynamic=dynamic, fullgraph=True)
    given = new_rows(device)
    lengths = torch.full((BATCH,), 5, dtype=torch.int32, device=device)
    with torch.no_grad():
        for layer in (0, 1, 2, 1):
            own, other = pools(device), pools(device)
            wanted = by_index(*own, *given, lengths, layer)
            got = compiled(*other, *given, lengths, layer)
            torch.testing.assert_close(got, wanted)
            for one, two in zip(own, other, strict=True):
                assert torch.equal(one, two), layer
    if step in ONE_GRAPH and dynamic is not False:
        assert counter.frame_count <= 2  # PyTorch takes 0 for a constant: layer 0, and all others


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
@pytest.mark.parametrize("step", ONE_GRAPH)
def test_a_layer_index_in_a_tensor_needs_one_graph(step, backend, device):
    torch.compiler.reset()
    counter = CompileCounterWithBackend(backend)
    compiled = torch.compile(step, backend=counter, fullgraph=True)
    given = new_rows(device)
    lengths = torch.full((BATCH,), 5, dtype=torch.int32, device=device)
    with torch.no_grad():
        for layer in range(LAYERS):
            own, other = pools(device), pools(device)
            wanted = by_index(*own, *given, lengths, layer)
            index = torch.tensor(layer, dtype=torch.int32, device=device)
            torch.testing.assert_close(compiled(*other, *given, lengths, index), wanted)
            for one, two in zip(own, other, strict=True):
                assert torch.equal(one, two), layer
    assert counter.frame_count == 1


def test_a_view_at_a_data_dependent_index_is_refused(device):
    def step(pool, index, rows, lengths):
        layer = index.item()
        torch._check(layer >= 0)
        torch._check(layer < LAYERS)
        k_pool, v_pool = pool
        return by_index(k_pool, v_pool, *rows, lengths, layer)

    torch.compiler.reset()
    lengths = torch.full((BATCH,), 5, dtype=torch.int32, device=device)
    with torch._dynamo.config.patch(capture_scalar_outputs=True), torch.no_grad():
        compiled = torch.compile(step, fullgraph=True)
        with pytest.raises(Exception, match=r"torch_cubin \[input\]: .*only run time knows"):
            compiled(pools(device), torch.tensor(1, device=device), new_rows(device), lengths)


def test_a_declared_op():
    op = axpy()

    def step(pool, x, layer):
        op(x, pool[layer], 2.0)
        return pool.sum()

    for dynamic in (None, True):
        torch.compiler.reset()
        compiled = torch.compile(step, dynamic=dynamic, fullgraph=True)
        for layer in (0, 1, 2):
            own, other, x = torch.zeros(LAYERS, 64), torch.zeros(LAYERS, 64), torch.ones(64)
            assert torch.equal(compiled(other, x, layer), step(own, x, layer))
            assert torch.equal(own, other), layer
