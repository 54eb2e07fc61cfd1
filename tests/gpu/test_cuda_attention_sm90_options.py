"""Options that change scores or weights in the kernels for Hopper: softcap, ALiBi, sinks, any
scale, dropout, boolean masks."""

import math

import numerics
import pytest
import torch
from gpu import attention_cases as ac
from gpu import attention_reference as ar
from gpu import hopper
from gpu.profiled import kernels_loaded, kernels_that_run

pytestmark = hopper.for_kernels

RANDOM = [(name, seed) for name in ac.HALVES for seed in ("11", "12")]


@pytest.mark.parametrize(
    ("name", "seed"),
    [pytest.param(*x, marks=pytest.mark.child("attention_options", *x)) for x in RANDOM],
)
def test_random_options(name: str, seed: str, child) -> None:
    """120 random calls per process, in which these kernels compute everything that they support."""
    answer = child.check()
    assert answer["wrong"] == []
    loaded = {x for x in answer["loaded"] if ac.SHORT[name] in x.split("_")}
    for tile in ("128x128x64", "128x128x128", "128x64x256"):
        assert f"sm90_attention_{ac.SHORT[name]}_general_{tile}" in loaded
    for tile in ("96x128x64", "48x128x128", "64x128x256"):
        assert f"sm90_backward_attention_{ac.SHORT[name]}_general_{tile}" in loaded
    assert any("general_added" in x for x in loaded)
    assert any(x.startswith(f"sm90_backward_attention_{ac.SHORT[name]}_added") for x in loaded)
    assert {"sm90_mask_attention", "sm90_added_mask_attention"} <= set(answer["loaded"])


@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("kind", ac.SCORE_KINDS)
def test_each_option(kind: str, head_dim: int, nan_memory) -> None:
    """Sizes at which the library takes these kernels by itself; causal, shared heads."""
    g = ac.generator(f"{kind} {head_dim}")
    q, grad = (ac.draw((2, 8, 1100, head_dim), torch.bfloat16, g) for _ in range(2))
    k, v = (ac.draw((2, 4, 1100, head_dim), torch.bfloat16, g) for _ in range(2))
    options = {"enable_gqa": True, "is_causal": True, **ac.score_options(kind, 2, 8, g)}
    rest, kept = ar.without_dropout(options, (2, 8, 1100, 1100))
    with kernels_that_run() as names:
        ours, logsumexp = ar.both(q, k, v, grad, **options)
    want = ar.reference(q, k, v, grad, None, kept, **rest)
    ar.check("bfloat16", f"{kind} {head_dim}", ours, want, logsumexp)
    again, _ = ar.both(q, k, v, grad, **options)
    for x, y in zip(ours, again, strict=True):
        numerics.check_bits(x, y)
    tile = {64: "128x128x64", 128: "128x128x128", 256: "128x64x256"}[head_dim]
    tile_backward = ac.sm90_backward_tile(head_dim)
    if kind == "sinks":  # no score depends on them; the backward needs the logsumexp alone
        expected = {"masked_192x128x64" if head_dim == 64 else tile, tile_backward}
    else:
        expected = {f"general_{tile}", f"general_{tile_backward}"}
    found = {x.split("_bf16_")[-1] for x in names if x.startswith("sm90_") and "_bf16_" in x}
    assert expected <= found


# Sizes of the mask's dims that are 1, and the step of its last one.
@pytest.mark.parametrize("broadcast", [(), (1,), (0, 1), (1, 2), (0, 1, 2), (3,)], ids=str)
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_boolean_masks(broadcast: tuple, head_dim: int, nan_memory) -> None:
    """Masks of any broadcast and stride, with fully masked rows and blocks of keys."""
    g = ac.generator(f"{broadcast} {head_dim}")
    for columns, step, begin in ((1000, 1, 0), (1023, 1, 1), (777, 2, 0)):
        q = ac.draw((2, 4, 900, head_dim), torch.float16, g)
        k, v = (ac.draw((2, 2, columns, head_dim), torch.float16, g) for _ in range(2))
        sizes = [2, 4, 900, columns * step + begin]
        for dim in broadcast:
            sizes[dim] = 1
        mask = torch.rand(sizes, generator=g, device=ac.DEVICE) > 0.4
        if sizes[2] > 1:
            mask[:, :, 100:170] = False
        if sizes[3] > 1:
            mask[..., 300:500] = False
            mask = mask[..., begin::step]
        grad = ac.draw(q.shape, torch.float16, g)
        label = f"{broadcast} {head_dim} {columns}"
        ar.check_call("float16", label, q, k, v, grad, mask, enable_gqa=True)
    with kernels_that_run() as names:
        ar.both(q, k, v, grad, mask, enable_gqa=True)
    assert "sm90_mask_attention" in names
    assert "sm90_backward_mask_attention" in names
    assert f"sm90_backward_attention_f16_{ac.sm90_backward_tile(head_dim)}" in names
    tile = {64: "192x128x64", 128: "128x128x128", 256: "128x64x256"}[head_dim]
    assert f"sm90_attention_f16_masked_{tile}" in names


def tile_masks(rows: int, columns: int) -> dict[str, torch.Tensor]:
    """Masks that hide whole tiles, with fully masked and fully visible blocks."""
    i = torch.arange(rows, device=ac.DEVICE)[:, None]
    j = torch.arange(columns, device=ac.DEVICE)
    return {
        "documents": i // 330 == j // 330,
        "causal": i >= j,
        "late keys alone": (j >= columns - 100) & (i % 2 == 0),
        "every other block": (i // 128 + j // 128) % 2 == 0,
        "half of a pair's keys": (i // 64 + j // 64) % 3 == 0,
        "nothing": torch.zeros(rows, columns, dtype=torch.bool, device=ac.DEVICE),
        "everything": torch.ones(rows, columns, dtype=torch.bool, device=ac.DEVICE),
    }


# Rows of 1536 keys begin at multiples of 16 bytes: the kernel that lays masks out reads vectors.
@pytest.mark.parametrize("keys", [1500, 1536])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_masks_that_hide_whole_tiles(head_dim: int, keys: int, nan_memory) -> None:
    """Steps that a mask hides are skipped, and the order in which blocks add to dq closes up; the
    same bits in every run."""
    g = ac.generator(f"tiles {head_dim}")
    q, grad = (ac.draw((2, 4, 1300, head_dim), torch.bfloat16, g) for _ in range(2))
    k, v = (ac.draw((2, 2, keys, head_dim), torch.bfloat16, g) for _ in range(2))
    masks = tile_masks(1300, keys)
    of_heads = torch.stack([masks[x] for x in ("documents", "nothing", "causal", "everything")])
    masks["of heads"] = of_heads
    masks["of batches"] = torch.stack([masks["documents"], masks["late keys alone"]])[:, None]
    for name, mask in masks.items():
        for options in ({}, {"window_left": 500, "window_right": 300}):
            named = {"enable_gqa": True, **options}
            label = f"{name} {head_dim} {options}"
            first = ar.check_call("bfloat16", label, q, k, v, grad, mask, **named)
        for _ in range(20):
            again, _ = ar.both(q, k, v, grad, mask, **named)
            for x, y in zip(again, first, strict=True):
                numerics.check_bits(x, y)


@pytest.mark.parametrize("keys", [64, 511, 512, 513, 1600])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_masks_of_each_head_are_laid_out_in_chunks_of_keys(
    head_dim: int, keys: int, nan_memory
) -> None:
    """sm90/backward_mask.cu has 512 keys a block; a byte of a mask need not be 1 to be true."""
    g = ac.generator(f"chunks {head_dim} {keys}")
    q, grad = (ac.draw((1, 4, 700, head_dim), torch.bfloat16, g) for _ in range(2))
    k, v = (ac.draw((1, 4, keys, head_dim), torch.bfloat16, g) for _ in range(2))
    sizes = (1, 4, 700, (keys + 15) // 16 * 16)
    seen = torch.randint(0, 256, sizes, generator=g, device=ac.DEVICE, dtype=torch.uint8)
    hidden = torch.rand(sizes, generator=g, device=ac.DEVICE) < 0.5
    seen = torch.where(hidden, 0, seen)[..., :keys]
    mask, truth = seen.view(torch.bool), seen != 0
    with kernels_that_run() as names:
        ours, logsumexp = ar.both(q, k, v, grad, mask)
    assert names >= {"sm90_mask_attention", "sm90_backward_mask_attention"}
    want = ar.reference(q, k, v, grad, truth)
    ar.check("bfloat16", f"{head_dim} {keys}", ours, want, logsumexp)


def mask_of_tiles(kind: str, rows: int, columns: int, g: torch.Generator) -> torch.Tensor:
    """(2, 3, rows, columns), many of whose tiles are hidden or visible wholly."""
    i, j = (torch.arange(n, device=ac.DEVICE) for n in (rows, columns))
    if kind == "causal":
        mask = i[:, None] >= j - (columns - rows)
    elif kind == "documents":
        ends = torch.tensor([0, 1, 130, 500, 512, 900, 1290], device=ac.DEVICE)
        mask = torch.bucketize(i, ends)[:, None] == torch.bucketize(j, ends)
    elif kind == "window":
        mask = (i[:, None] - j).abs() < 150
    elif kind == "islands":  # far from each other, with fully masked rows between them
        tiles = torch.rand(2, 3, -(-rows // 128), -(-columns // 80), generator=g, device=ac.DEVICE)
        mask = (tiles > 0.8).repeat_interleave(128, 2).repeat_interleave(80, 3)
        mask = mask[:, :, :rows, :columns]
    elif kind == "ranges":  # of every warpgroup's 64 queries, half of which see nothing
        sizes = (2, 3, -(-rows // 64), 1)
        first, last = (
            torch.randint(0, columns, sizes, generator=g, device=ac.DEVICE).repeat_interleave(64, 2)
            for _ in range(2)
        )
        mask = ((j >= first) & (j < last))[:, :, :rows]
    else:
        lengths = torch.tensor([[1], [columns - 260]], device=ac.DEVICE)
        mask = (j < lengths)[:, None, None, :]
    return mask.expand(2, 3 if kind != "padding" else 1, -1, -1).contiguous()


@pytest.mark.parametrize("kind", ["causal", "documents", "window", "islands", "ranges", "padding"])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_boolean_masks_by_tile(kind: str, head_dim: int, nan_memory) -> None:
    """Of more blocks of keys than a word has classes; alone, with a band, and with ALiBi."""
    g = ac.generator(f"{kind} {head_dim}")
    rows, columns = 1300, 2177
    q = ac.draw((2, 3, rows, head_dim), torch.bfloat16, g)
    k, v = (ac.draw((2, 3, columns, head_dim), torch.bfloat16, g) for _ in range(2))
    mask = mask_of_tiles(kind, rows, columns, g)
    slopes = torch.rand(3, generator=g, device=ac.DEVICE)
    for options in ({}, {"window_left": 700, "window_right": 300}, {"alibi_slopes": slopes}):
        label = f"{kind} {head_dim} {options}"
        answers = [torch.ops.cubin.attention_forward(q, k, v, mask, **options) for _ in range(2)]
        want = ar.reference(q, k, v, None, mask, **options)
        ar.check("bfloat16", label, [answers[0][0]], want, answers[0][1])
        for x, y in zip(*answers, strict=True):
            numerics.check_bits(x, y)
    names = kernels_loaded()
    assert "sm90_mask_attention" in names


@pytest.mark.parametrize("numbers", [False, True])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_many_padded_sequences(head_dim: int, numbers: bool, nan_memory) -> None:
    """More tiles than run at a time: after the first ones, sequences with more keys come first."""
    g = ac.generator(f"padded {head_dim}")
    q, k, v = (ac.draw((24, 4, 1024, head_dim), torch.bfloat16, g) for _ in range(3))
    lengths = torch.randint(1, 1025, (24, 1, 1, 1), generator=g, device=ac.DEVICE)
    mask = torch.arange(1024, device=ac.DEVICE) < lengths
    if numbers:
        hidden = torch.zeros(24, 1, 1, 1024, dtype=torch.bfloat16, device=ac.DEVICE)
        mask = hidden.masked_fill(~mask, -math.inf)
    out, logsumexp = torch.ops.cubin.attention_forward(q, k, v, mask)
    want = ar.reference(q, k, v, None, mask)
    ar.check("bfloat16", f"{head_dim} {numbers}", [out], want, logsumexp)


@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_nonfinite_values_stay_in_their_rows(head_dim: int, nan_memory) -> None:
    g = ac.generator(head_dim)
    q, k, v = (ac.draw((1, 4, 700, head_dim), torch.bfloat16, g) for _ in range(3))
    sinks = torch.zeros(4, device=ac.DEVICE)
    q[0, 0, 17, 3] = math.nan
    k[0, 1, 300, 5] = math.nan
    k[0, 2, 690, 5] = math.inf
    out, logsumexp = torch.ops.cubin.attention_forward(q, k, v, is_causal=True, sinks=sinks)
    want = torch.zeros(1, 4, 700, dtype=torch.bool, device=ac.DEVICE)
    want[0, 0, 17] = True
    want[0, 1, 300:] = True
    want[0, 2, 690:] = q[0, 2, 690:, 5] > 0  # a score of +inf; one of -inf is no weight
    assert torch.equal(out.isnan().any(-1), want)
    assert torch.equal(~logsumexp.isfinite(), want)


@pytest.mark.parametrize("value", [math.nan, math.inf, 500.0])
@pytest.mark.parametrize("rule", ["none", "softcap", "ALiBi"])
@pytest.mark.parametrize("as_mask", [False, True], ids=["window", "mask"])
@pytest.mark.parametrize("head_dim", [64, 128, 192, 256])
def test_rows_beside_those_that_see_a_nan(
    head_dim: int, as_mask: bool, rule: str, value: float, nan_memory
) -> None:
    """A warp computes scores again for all of its rows if those of one are not finite, or large.
    With a softcap several keys of a row share a reciprocal: hidden ones have no effect."""
    g = ac.generator(f"{head_dim} {as_mask} {rule} {value}")
    q, k, v = (ac.draw((2, 4, 700, head_dim), torch.bfloat16, g) for _ in range(3))
    i = torch.arange(700, device=ac.DEVICE)
    behind = i[:, None] - i
    window = 300 if rule != "none" else 100
    seen = (behind >= 0) & (behind <= window)
    options = {"attn_mask": seen} if as_mask else {"is_causal": True, "window_left": window}
    if rule == "softcap":
        options["softcap"] = 20.0
    elif rule == "ALiBi":
        options["alibi_slopes"] = torch.tensor([0.5, 0.1, 0.02, 0.0], device=ac.DEVICE)
    clean, _ = torch.ops.cubin.attention_forward(q, k, v, **options)
    for key in (5, 130, 333):
        spoilt = k.clone()
        spoilt[:, :, key, 3] = value
        out, _ = torch.ops.cubin.attention_forward(q, spoilt, v, **options)
        numerics.check_bits(out[:, :, ~seen[:, key]], clean[:, :, ~seen[:, key]])
        if math.isnan(value):
            assert out[:, :, seen[:, key]].isnan().all()
