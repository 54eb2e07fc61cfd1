"""Which warpgroup computes what in the forward for Hopper: last tiles without rows for some of
them, keys that a second tile finds in shared memory, schedules that leave no block idle."""

import numerics
import pytest
import torch
from gpu import attention_cases as ac
from gpu import attention_reference as ar

pytestmark = pytest.mark.skipif(
    torch.cuda.is_available() and torch.cuda.get_device_capability()[0] != 9,
    reason="sm90 kernels run on Hopper alone",
)


def check(what: str, q, k, v, mask=None, **options) -> None:
    ours = torch.ops.cubin.attention_forward(q, k, v, mask, enable_gqa=True, **options)
    want = ar.reference(q, k, v, None, mask, enable_gqa=True, **options)
    ar.check("bfloat16", what, [ours[0]], want)
    ar.check_logsumexp("bfloat16", what, ours[1], want.logsumexp)
    again = torch.ops.cubin.attention_forward(q, k, v, mask, enable_gqa=True, **options)
    for x, y in zip(ours, again, strict=True):
        numerics.check_bits(x, y)


def draw(g, batch: int, heads: int, kv_heads: int, rows: int, keys: int, head_dim: int):
    shapes = ((heads, rows), (kv_heads, keys), (kv_heads, keys))
    return [ac.draw((batch, h, n, head_dim), torch.bfloat16, g) for h, n in shapes]


@pytest.mark.parametrize("head_dim", [64, 96, 128, 192, 256])
def test_last_tiles_with_rows_for_some_warpgroups(head_dim: int, nan_memory) -> None:
    """Every block has several tiles, and a skipped one comes first, between others and last."""
    g = ac.generator(f"last {head_dim}")
    for rows, keys in ((193, 200), (257, 257), (577, 577), (65, 640), (129, 129)):
        for options in ({}, {"is_causal": True, "bottom_right": True}):
            tensors = draw(g, 5, 40, 20, rows, keys, head_dim)
            check(f"{rows} {keys} {head_dim} {options}", *tensors, **options)


@pytest.mark.parametrize("kind", ["bool", "added", "softcap"])
@pytest.mark.parametrize("head_dim", [64, 128])
def test_skipped_tiles_with_options(head_dim: int, kind: str, nan_memory) -> None:
    g = ac.generator(f"{kind} {head_dim}")
    for rows, keys in ((193, 1000), (257, 640)):
        tensors = draw(g, 3, 40, 40, rows, keys, head_dim)
        mask = None
        if kind != "softcap":
            seen = torch.rand(3, 1, rows, keys, generator=g, device=ac.DEVICE) > 0.3
            seen[:, :, 100:, 128:512] = False
            mask = seen
        if kind == "added":
            numbers = torch.randn(mask.shape, generator=g, device=ac.DEVICE).bfloat16()
            mask = numbers.masked_fill(~seen, -torch.inf)
        check(f"{kind} {rows} {keys} {head_dim}", *tensors, mask,
              **({"softcap": 10.0} if kind == "softcap" else {}))  # fmt: skip


def test_skipped_tiles_of_packed_sequences(nan_memory) -> None:
    g = ac.generator("packed")
    lengths = [65, 1, 300, 129, 193, 577, 64, 257] * 6
    at = torch.tensor([0, *torch.tensor(lengths).cumsum(0)], dtype=torch.int32, device=ac.DEVICE)
    q, k, v = (ac.draw((int(at[-1]), 16, 64), torch.bfloat16, g) for _ in range(3))
    named = {"cu_seqlens_q": at, "cu_seqlens_k": at, "max_seqlen_q": 577, "max_seqlen_k": 577}
    for causal in (False, True):
        out, _ = torch.ops.cubin.attention_forward(q, k, v, is_causal=causal, **named)
        for i, length in enumerate(lengths[:8]):
            own = slice(int(at[i]), int(at[i]) + length)
            parts = [x[own].transpose(0, 1)[None] for x in (q, k, v)]
            want = ar.reference(*parts, is_causal=causal)
            ar.check("bfloat16", f"{length} {causal}", [out[own].transpose(0, 1)[None]], want)


@pytest.mark.parametrize(("head_dim", "rows"), [(64, 256), (64, 384), (72, 256), (128, 200)])
def test_a_second_tile_with_the_same_keys(head_dim: int, rows: int, nan_memory) -> None:
    """Two tiles of a head one after the other, whose keys fill the ring; heads that share keys."""
    g = ac.generator(f"same {head_dim} {rows}")
    for kv_heads in (8, 2):
        check(f"{head_dim} {rows} {kv_heads}", *draw(g, 66, 8, kv_heads, rows, rows, head_dim))
    check(f"{head_dim} cross", *draw(g, 40, 8, 8, 4 * rows, rows, head_dim))


@pytest.mark.parametrize(
    "shape", [(8, 9, 3, 1100, 64), (8, 25, 25, 520, 64), (1, 28, 4, 1024, 128)]
)
def test_causal_tiles_that_do_not_fill_rounds_of_pairs(shape: tuple, nan_memory) -> None:
    batch, heads, kv_heads, rows, head_dim = shape
    g = ac.generator(f"{shape}")
    tensors = draw(g, batch, heads, kv_heads, rows, rows, head_dim)
    check(f"{shape}", *tensors, is_causal=True)
