"""flash_attention of float8_e4m3fn on Hopper: csrc/kernels/attention/sm90/e4m3.cu."""

import math
import random

import numerics
import pytest
import torch
from gpu import attention_cases as ac
from gpu import hopper
from ops import e4m3_cases
from ops.e4m3_cases import E4M3, expected, make, quantised

import torch_cubin  # noqa: F401  (registers the ops)

pytestmark = hopper.for_kernels
DEVICE = ac.DEVICE
flash_attention = torch.ops.cubin.flash_attention
forward = torch.ops.cubin.attention_forward_e4m3
HEAD_DIMS = (64, 128, 256)
# Weights are rounded to 4 bits: 1 / 32 of each at most, 2.6% of a sum in the mean.
LIMIT = 4.5e-2


def compare(args, label):
    wanted, wanted_sums = expected(**args)
    out = flash_attention(**args)
    assert out.shape == wanted.shape
    norm = max(wanted.square().mean().sqrt().item(), 1e-30) if out.numel() else 1
    error = (out.double() - wanted).square().mean().sqrt().item() / norm if out.numel() else 0
    assert not numerics.exceeds(error, LIMIT), (label, error)
    assert not out[wanted == 0].any(), label
    packed = "cu_seqlens_q" in args
    args = {"bottom_right": True} | args
    tensors = [args.pop(name) for name in ("query", "key", "value")]
    _, sums = forward(*(x if packed else x.transpose(1, 2) for x in tensors), **args)
    blind = wanted_sums == -torch.inf
    assert torch.equal(sums == -torch.inf, blind), label
    # Scores are wgmma's sums of e4m3, of some 13 bits.
    off = ((sums.double() - wanted_sums).abs() / wanted_sums.abs().clamp(min=1))[~blind]
    assert not numerics.exceeds(off.max().item() if off.numel() else 0, 5e-3), (label, off.max())


LONG = {
    "full": {"batch": 2, "rows": 3000, "keys": 2900, "heads": 16, "shared": 16},
    "causal": {"batch": 2, "rows": 3000, "keys": 3000, "heads": 12, "shared": 4, "is_causal": True},
    "few rows": {"batch": 3, "rows": 5, "keys": 4000, "heads": 8, "shared": 2, "descale": "qkv"},
    "window": {"rows": 2000, "keys": 2200, "window_left": 300, "window_right": 70, "descale": "kv"},
    "wide window": {"rows": 900, "keys": 2200, "window_left": 1999},
    "many keys": {"batch": 1, "rows": 3000, "keys": 12000, "heads": 8, "shared": 1},
    # Tiles of which one of three consumers, or two, have no rows.
    "partial tiles": {"batch": 3, "rows": 400, "keys": 900, "heads": 24},
    "partial tiles, causal": {
        "batch": 4, "rows": 700, "keys": 700, "heads": 32, "shared": 8, "is_causal": True,
    },
    "more rows": {"rows": 1100, "keys": 700, "is_causal": True, "heads_first": True},
    "short ones": {"batch": 60, "rows": 250, "keys": 333, "heads": 8, "is_causal": True},
    "packed": {
        "lengths": [(700, 700), (1, 1), (0, 5), (129, 640), (64, 0), (1500, 1333), (2, 128)],
        "descale": "qkv", "heads": 6,
    },
    "packed, causal": {
        "lengths": [(37 * i % 400, 37 * i % 400) for i in range(40)], "is_causal": True,
        "descale": "k",
    },
    "large scores": {"rows": 700, "keys": 1111, "factor": 30.0, "is_causal": True},
}  # fmt: skip


@pytest.mark.parametrize("dim", HEAD_DIMS)
@pytest.mark.parametrize("name", LONG)
def test_long(name: str, dim: int, nan_memory) -> None:
    torch.manual_seed(dim)
    compare(make(DEVICE, **{"dim": dim} | LONG[name]), f"{name} {dim}")


@pytest.mark.parametrize("first", range(0, 200, 50))
def test_random_calls(first: int, nan_memory) -> None:
    for seed in range(first, first + 50):
        torch.manual_seed(seed)
        compare(e4m3_cases.random_case(random.Random(seed), DEVICE), f"seed {seed}")


@pytest.mark.parametrize("dim", HEAD_DIMS)
def test_sums_of_many_keys(dim: int) -> None:
    """wgmma's sums of e4m3 keep some 13 bits of the largest addend: left in its accumulators,
    16,384 equal weights of values of one sign would lose a quarter."""
    torch.manual_seed(0)
    query = torch.zeros(1, 64, 1, dim, device=DEVICE).to(E4M3)
    key = quantised((1, 16384, 1, dim), DEVICE)
    value = (torch.rand(1, 16384, 1, dim, device=DEVICE) + 0.5).to(E4M3)
    out = flash_attention(query, key, value).double()
    wanted = value.double().mean(1, keepdim=True)
    assert not numerics.exceeds(((out - wanted) / wanted).mean().abs().item(), 2e-3)
    assert not numerics.exceeds(((out - wanted) / wanted).abs().max().item(), 1e-2)


@pytest.mark.parametrize("bits", [14, 16])
@pytest.mark.parametrize("dim", HEAD_DIMS)
def test_small_weights_count(dim: int, bits: int) -> None:
    """A key whose weight is 2^14 times that of each of 16,384 others has half of the mass, with
    2^16 four fifths."""
    torch.manual_seed(0)
    query = torch.zeros(1, 64, 1, dim, device=DEVICE)
    query[..., 0] = 1
    key = torch.zeros(1, 16385, 1, dim, device=DEVICE)
    value = torch.ones(1, 16385, 1, dim, device=DEVICE)
    for place in (0, 9000, 16384):
        key.zero_()
        key[0, place, 0, 0] = 7.0
        value.fill_(1.0)
        value[0, place] = -3.0
        operands = (x.to(E4M3) for x in (query, key, value))
        out = flash_attention(*operands, scale=bits / 7 * math.log(2)).double()
        share = 2**bits / (2**bits + 16384)
        assert not numerics.exceeds((out - (1 - 4 * share)).abs().max().item(), 5e-2), place


@pytest.mark.parametrize("dim", HEAD_DIMS)
def test_row_maxima_that_jump(dim: int, nan_memory) -> None:
    """Rows whose maximum grows from one block of keys to the next by next to nothing, by what a
    shift of the reference takes up, and by more than an exponential can hold."""
    torch.manual_seed(dim)
    query, key, value = (quantised((1, 256, 1, dim), DEVICE).float() for _ in range(3))
    value = torch.cat([value] * 3, 1).to(E4M3)
    query[..., 0] = 1
    for jump in (1, 3, 8, 11, 60, 88, 104, 448):
        keys = torch.cat([key] * 3, 1)
        keys[:, :256, :, 0] = jump  # the first keys come last
        keys[:, 256:512, :, 0] = jump / 2
        compare({"query": query.to(E4M3), "key": keys.to(E4M3), "value": value, "scale": 1.0}, jump)


@pytest.mark.parametrize("dim", HEAD_DIMS)
def test_nan_stays_in_its_rows(dim: int, nan_memory) -> None:
    q, k, v = (quantised((1, 4, 700, dim), DEVICE) for _ in range(3))
    q.view(torch.uint8)[0, 0, [17, 400], 3] = 0x7F
    k.view(torch.uint8)[0, 1, 300, 5] = 0xFF
    k.view(torch.uint8)[0, 2, 690, 5] = 0x7F
    out, logsumexp = forward(q, k, v, is_causal=True)
    wanted = torch.zeros(1, 4, 700, dtype=torch.bool, device=DEVICE)
    wanted[0, 0, [17, 400]] = True
    wanted[0, 1, 300:] = True
    wanted[0, 2, 690:] = True
    assert torch.equal(out.isnan().any(-1), wanted)
    assert torch.equal(logsumexp.isnan(), wanted)


@pytest.mark.parametrize("dim", HEAD_DIMS)
@pytest.mark.parametrize("value", [0.0, -2.0, 1e4, 1e-4, 1e30, torch.nan])
def test_factors_of_any_size(value: float, dim: int) -> None:
    torch.manual_seed(0)
    for name in ("q_descale", "k_descale"):
        args = make(DEVICE, rows=200, keys=300, dim=dim, descale="qkv", is_causal=True)
        args[name][1, 1] = value
        wanted, _ = expected(**args)
        out = flash_attention(**args)
        assert torch.equal(out.isnan(), wanted.isnan()), name
        wanted, out = wanted.nan_to_num(), out.double().nan_to_num()
        # Of scores so large float32 cannot distinguish those that float64 can.
        if value < 1e20:
            assert not numerics.exceeds((out - wanted).norm().item(), LIMIT * wanted.norm().item())


@pytest.mark.parametrize("dim", HEAD_DIMS)
def test_a_batch_has_the_bits_of_single_calls(dim: int) -> None:
    torch.manual_seed(0)
    args = make(DEVICE, batch=9, rows=1500, keys=1500, heads=8, dim=dim, is_causal=True)
    together = flash_attention(**args)
    for b in range(9):
        own = {name: x[b : b + 1] if torch.is_tensor(x) else x for name, x in args.items()}
        assert torch.equal(flash_attention(**own), together[b : b + 1]), b


@pytest.mark.parametrize("name", ["causal", "packed"])
def test_a_graph(name: str) -> None:
    """Captured without a synchronisation, it follows what the tensors hold."""
    torch.manual_seed(0)
    args = make(DEVICE, dim=128, **LONG[name] | {"descale": "qkv"})
    flash_attention(**args)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = flash_attention(**args)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    for tensor in (args["query"], args["key"], args["value"]):
        tensor.copy_(quantised(tuple(tensor.shape), DEVICE))
    args["k_descale"].mul_(0.5)
    graph.replay()
    assert torch.equal(out, flash_attention(**args))


def test_unsupported_head_dims_are_no_kernel_errors() -> None:
    with pytest.raises(RuntimeError, match=r"\[no_kernel\]: flash_attention .*head_dim 272"):
        flash_attention(**make(DEVICE, dim=272))
