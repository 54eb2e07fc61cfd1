"""flash_attention_with_kvcache on the GPU: long caches cut into parts, graphs whose lengths change,
the same bits every time. What it means in small is in tests/ops/test_kv_cache.py.
"""

from __future__ import annotations

import itertools
import random

import numerics
import pytest
import torch
from ops import kv_cache_cases
from ops.kv_cache_cases import expected, make
from ops.test_kv_cache import check_alone, check_caches

import torch_cubin

DEVICE = "cuda"
attend = torch.ops.cubin.flash_attention_with_kvcache

# Sequences of one call: long and short ones together, of any number of parts.
LONG = {
    "one": {"batch": 1, "heads": 32, "shared": 8, "dim": 128, "capacity": 20000},
    "one in pages": {
        "batch": 1, "heads": 32, "shared": 8, "dim": 128, "capacity": 20000, "page_size": 16,
    },
    "long and short": {
        "batch": 4, "heads": 8, "shared": 2, "dim": 64, "capacity": 30000,
        "lengths": [29999, 1, 0, 4097], "page_size": 64, "new": 1,
    },
    "many queries": {
        "batch": 2, "heads": 16, "shared": 2, "dim": 128, "capacity": 5000, "rows": 16,
        "lengths": [4900, 3000], "new": 16, "causal": True, "sinks": True,
    },
    "wide": {"batch": 2, "heads": 4, "shared": 1, "dim": 256, "capacity": 9000, "softcap": 5.0},
    "window": {
        "batch": 2, "heads": 8, "shared": 4, "dim": 96, "capacity": 9000, "window_left": 3000,
        "causal": True, "lengths": [8999, 2000], "page_size": 1,
    },
    "large batch": {
        "batch": 70, "heads": 16, "shared": 4, "dim": 128, "capacity": 700, "page_size": 16,
        "lengths": [10 * i for i in range(70)], "new": 1, "rotary_dim": 128, "causal": True,
    },
    # Pages are looked up for 32 tiles at a time, in parts of up to 140 tiles.
    "long parts in pages": {
        "batch": 18, "heads": 16, "shared": 8, "dim": 128, "capacity": 9024, "page_size": 48,
        "lengths": [8999, 4100, 2047] + [70 * i for i in range(15)], "new": 1,
    },
    "long parts of e4m3 in pages": {
        "batch": 18, "heads": 16, "shared": 8, "dim": 64, "capacity": 9024, "page_size": 16,
        "lengths": [8999, 4100, 2047] + [70 * i for i in range(15)], "e4m3": True,
    },
    "e4m3": {"batch": 1, "heads": 32, "shared": 8, "dim": 128, "capacity": 20000, "e4m3": True},
    "e4m3 in pages": {
        "batch": 4, "heads": 8, "shared": 2, "dim": 64, "capacity": 30000, "e4m3": True,
        "lengths": [29999, 1, 0, 4097], "page_size": 16, "new": 1, "dtype": torch.float16,
        "descale": "kv",
    },
    "wide e4m3": {
        "batch": 2, "heads": 16, "shared": 2, "dim": 256, "capacity": 5000, "rows": 16,
        "lengths": [4900, 3000], "new": 16, "causal": True, "sinks": True, "e4m3": True,
        "descale": "kvs",
    },
}  # fmt: skip


def compare(args, label):
    wanted, k_cache, v_cache = expected(**args)
    out = attend(**args).double()
    scale = max(wanted.square().mean().sqrt().item(), 1e-3)
    error = (out - wanted).square().mean().sqrt().item() / scale
    assert not numerics.exceeds(error, 6e-3), (label, error)
    worst = (out - wanted).abs().max().item()
    assert not numerics.exceeds(worst, 2e-2 * max(1.0, wanted.abs().max().item())), (label, worst)
    check_caches(args, k_cache, v_cache)


@pytest.mark.parametrize("invariant", [False, True])
@pytest.mark.parametrize("name", LONG)
def test_long(name, invariant):
    torch.manual_seed(0)
    with torch_cubin.batch_invariant(invariant):
        compare(make(DEVICE, **LONG[name]), name)


@pytest.mark.parametrize("first", range(0, 200, 50))
def test_random_calls(first):
    for seed in range(first, first + 50):
        torch.manual_seed(seed)
        compare(kv_cache_cases.random_case(random.Random(seed), DEVICE), f"seed {seed}")


@pytest.mark.parametrize("offset", [1, 4, 8])
def test_queries_and_new_rows_at_any_address(offset):
    """Kernels copy 16 bytes at once, which needs addresses that are multiples of 16."""
    torch.manual_seed(offset)
    compare(kv_cache_cases.at_odd_addresses(offset, DEVICE), offset)


@pytest.mark.parametrize("page_size", [0, 16])
def test_a_captured_step_follows_lengths_that_change(page_size):
    """A graph of one step writes, reads and advances the lengths; each replay is the next token."""
    torch.manual_seed(0)
    options = {"batch": 3, "heads": 8, "shared": 2, "dim": 128, "capacity": 2048, "new": 1}
    args = make(DEVICE, **options, lengths=[0, 100, 2040], page_size=page_size, causal=True)
    own = {name: x.clone() if isinstance(x, torch.Tensor) else x for name, x in args.items()}
    attend(**{n: x.clone() if isinstance(x, torch.Tensor) else x for n, x in args.items()})
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = attend(**args)
        args["cache_seqlens"] += 1
    for step in range(12):
        for name in ("q", "k", "v"):
            args[name].copy_(torch.randn_like(args[name]))
            own[name].copy_(args[name])
        graph.replay()
        assert torch.equal(out, attend(**own)), step
        own["cache_seqlens"] += 1
        assert torch.equal(args["k_cache"], own["k_cache"])
    wanted, _, _ = expected(**(own | {"cache_seqlens": own["cache_seqlens"] - 1}))
    torch.testing.assert_close(out.double(), wanted, rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize(
    "options",
    [{"batch": 1}, {"batch": 40, "shared": 1}, {"batch": 3, "page_size": 64},
     {"batch": 2, "e4m3": True}],
)  # fmt: skip
def test_lengths_that_change_after_a_decode_has_started(options):
    """It plans its part before the kernel before it has ended, but takes what that one writes."""
    pytest.importorskip("triton", reason="Triton is not installed")
    if torch.cuda.get_device_capability() < (9, 0):
        pytest.skip("no kernel starts early below compute capability 9.0")
    from gpu.late_writer import write_late

    torch.manual_seed(0)
    lengths = [0] * options["batch"]
    shape = {"heads": 16, "shared": 4, "dim": 128, "capacity": 8000, "lengths": lengths}
    args = make(DEVICE, **shape | options)
    written = args["cache_seqlens"].clone()
    drawn = random.Random(1)
    results = []
    for _ in range(6):
        new = torch.tensor([drawn.randrange(8001) for _ in lengths], device=DEVICE).int()
        results.append(attend(**args | {"cache_seqlens": new}))
        torch.cuda.synchronize()
        write_late(written, new)
        assert torch.equal(attend(**args | {"cache_seqlens": written}), results[-1])
    assert not any(torch.equal(one, other) for one, other in itertools.pairwise(results))


def test_no_call_synchronises():
    args = make(DEVICE, lengths=[3, 40, 90], new=1, page_size=16, rotary_dim=64)
    attend(**args)
    torch.cuda.set_sync_debug_mode("error")
    try:
        attend(**args)
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_batch_invariance_of_long_sequences():
    torch.manual_seed(0)
    lengths = [12000, 300, 1, 4097, 256, 511, 512]
    options = {"batch": len(lengths), "heads": 16, "shared": 4, "dim": 128, "capacity": 12288}
    args = make(DEVICE, **options, lengths=lengths, page_size=16, sinks=True)
    check_alone(lengths, **args)


@pytest.mark.parametrize("dim", [64, 128, 256])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_one_visible_e4m3_value_is_returned(dim, dtype):
    """One key has all the weight, and its value is the output, except for the rounding of a
    weight."""
    torch.manual_seed(0)
    args = make(DEVICE, dim=dim, capacity=513, dtype=dtype, e4m3=True, rows=5, softmax_scale=1.0)
    for name in ("q", "k_cache", "v_cache"):
        numbers = torch.randint(-16, 17, args[name].shape, device=DEVICE)
        args[name] = numbers.to(args[name].dtype)
    wanted, _, _ = expected(**args)
    scores = torch.einsum(
        "bqgd,bkgd->bgqk", args["q"][:, :, ::2].double(), args["k_cache"].double()
    )
    best = scores.topk(2).values.diff(dim=-1).abs().transpose(1, 2)[..., 0] > 40
    assert best.sum() > 10
    out = attend(**args)[:, :, ::2]
    assert (out[best].double() - wanted[:, :, ::2][best].round()).abs().max() < 0.05


@pytest.mark.parametrize("e4m3", [False, True])
def test_memory_of_keys_that_are_not_seen_may_hold_anything(e4m3):
    """What lies behind a sequence's length is NaN: pages in use by others, or fresh memory."""
    torch.manual_seed(0)
    args = make(DEVICE, capacity=4096, lengths=[3, 1000, 4000], page_size=16, e4m3=e4m3)
    wanted = attend(**args)
    for b, length in enumerate([3, 1000, 4000]):
        for column in range(length, 4096):
            if column % 16 == 0 or column == length:
                page = int(args["block_table"][b, column // 16])
                for name in ("k_cache", "v_cache"):
                    unseen = args[name][page, column % 16 :]
                    if e4m3:
                        unseen.view(torch.uint8).fill_(0x7F)
                    else:
                        unseen.fill_(torch.nan)
    assert torch.equal(attend(**args), wanted)
