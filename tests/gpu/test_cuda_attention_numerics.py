"""Attention on the GPU against float64: out, logsumexp, dq, dk, dv of every dtype and head dim.

Fresh memory holds NaN, every input lies between NaN guards, and the limit is PyTorch's own error
in the same dtype (numerics.py). Lengths share a pool of errors: see attention_reference.Judges.
"""

from __future__ import annotations

import itertools
import math

import numerics
import pytest
import torch
from gpu import attention_cases as ac
from gpu import attention_reference as ar
from gpu import cases

import torch_cubin

pytestmark = pytest.mark.usefixtures("nan_memory")

# Rows of query, rows of key.
LENGTHS = [
    (1, 1), (1, 17), (17, 17), (17, 128), (128, 17), (128, 128), (1, 1000), (129, 1000),
    (1000, 129), (1000, 1000),
]  # fmt: skip
HEAD_DIMS = [
    (8, 8), (40, 40), (64, 64), (80, 80), (96, 96), (128, 128), (192, 192), (256, 256),
    (64, 128), (128, 64), (192, 128), (24, 256), (320, 320),
]  # fmt: skip
ROWS_OUTSIDE = cases.Layout(order=(0, 2, 1, 3))  # (batch, rows, heads, columns) in memory


def _own_logsumexp(q, k, want, is_causal: bool, scale: float) -> torch.Tensor:
    """PyTorch's: that of its fused kernel, or of its composition in float32, whichever is worse."""
    single = torch.double if q.dtype == torch.double else torch.float32
    scores = q.to(single) @ k.to(single).mT * scale
    if is_causal:
        hidden = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).triu(1)
        scores = scores.masked_fill(hidden, -math.inf)
    found = [torch.logsumexp(scores, -1)]
    square = not is_causal or q.shape[-2] == k.shape[-2]
    if q.is_cuda and square and q.shape[-1] <= 256 and q.dtype != torch.double:
        # The logsumexp does not depend on the values: a key is as good.
        q, k = q.contiguous(), k.contiguous()
        efficient = torch.ops.aten._scaled_dot_product_efficient_attention
        flash = torch.ops.aten._scaled_dot_product_flash_attention
        try:
            if q.dtype == torch.float32:
                fused = efficient(q, k, k, None, True, 0.0, is_causal, scale=scale)
            else:
                fused = flash(q, k, k, 0.0, is_causal, False, scale=scale)
            found.append(fused[1][..., : q.shape[-2]])
        except RuntimeError:  # refused: the composition remains
            pass
    return max(found, key=lambda x: float((x.double() - want).square().sum()))


def _logsumexp_of(q, k, v, **options) -> torch.Tensor:
    return torch.ops.cubin.attention_forward(q, k, v, **options)[1]


@pytest.mark.parametrize("head_dims", HEAD_DIMS, ids=str)
@pytest.mark.parametrize("name", ac.DTYPES)
def test_error(name: str, head_dims: tuple[int, int]) -> None:
    """Every length, full and causal; fresh memory filled by torch, and left as it is."""
    dtype = ac.DTYPES[name]
    g = ac.generator(f"{name} {head_dims}")
    head_dim, head_dim_v = head_dims
    judges = ar.Judges(dtype)
    sums = numerics.Judge(torch.double if dtype == torch.double else torch.float32)
    for (rows, columns), is_causal in itertools.product(LENGTHS, (False, True)):
        label = f"{name} {head_dims}, {rows} rows, {columns} columns, causal {is_causal}"
        layout = ROWS_OUTSIDE if is_causal else cases.Layout()
        q = ac.draw((2, 3, rows, head_dim), dtype, g, layout)
        k = ac.draw((2, 3, columns, head_dim), dtype, g, layout)
        v = ac.draw((2, 3, columns, head_dim_v), dtype, g, layout)
        grad = ac.gradient(v.new_empty(2, 3, rows, head_dim_v), g)
        own, want = judges.compare(label, q, k, v, grad, is_causal=is_causal)
        torch.use_deterministic_algorithms(False)
        ac.poison_pools(8)
        again = ar.cubin(q, k, v, grad, is_causal=is_causal)
        torch.use_deterministic_algorithms(True, warn_only=True)
        judges.add(f"{label}, unfilled memory", again, own, want)
        ours = _logsumexp_of(q, k, v, is_causal=is_causal)
        theirs = _own_logsumexp(q, k, want.logsumexp, is_causal, 1 / math.sqrt(head_dim))
        sums.add(label, ours, theirs, want.logsumexp)
    judges.finish()
    sums.finish()


# heads, heads of key, rows
DECODES = [(32, 8, 1), (32, 8, 3), (32, 1, 1), (8, 8, 1), (6, 2, 5)]


@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("name", ac.DTYPES)
def test_decode_error(name: str, head_dim: int) -> None:
    """Few rows, many columns, heads that share keys: packed rows and split columns."""
    dtype = ac.DTYPES[name]
    g = ac.generator(f"{name} {head_dim}")
    judges = ar.Judges(dtype)
    sums = numerics.Judge(torch.double if dtype == torch.double else torch.float32)
    for (heads, kv_heads, rows), columns in itertools.product(DECODES, (1, 17, 129, 1000, 8192)):
        q = ac.draw((2, heads, rows, head_dim), dtype, g)
        k = ac.draw((2, kv_heads, columns, head_dim), dtype, g, ROWS_OUTSIDE)
        v = ac.draw((2, kv_heads, columns, head_dim), dtype, g, ROWS_OUTSIDE)
        label = f"{name} {tuple(q.shape)} {tuple(k.shape)}"
        own, want = judges.compare(label, q, k, v, enable_gqa=True)
        out, logsumexp = torch.ops.cubin.attention_forward(q, k, v, enable_gqa=True)
        judges.add(f"{label} (attention_forward)", [out], own, want)
        wide = k.repeat_interleave(heads // kv_heads, 1)
        theirs = _own_logsumexp(q, wide, want.logsumexp, False, 1 / math.sqrt(head_dim))
        sums.add(label, logsumexp, theirs, want.logsumexp)
    judges.finish()
    sums.finish()


@pytest.mark.parametrize("kv_heads", [4, 2, 1])
@pytest.mark.parametrize("name", ac.DTYPES)
def test_error_of_shared_heads(name: str, kv_heads: int) -> None:
    """Gradients of key and value are sums over the heads that share them."""
    dtype = ac.DTYPES[name]
    g = ac.generator(f"{name} {kv_heads}")
    judges = ar.Judges(dtype)
    for (rows, columns), head_dim in itertools.product(
        [(200, 200), (65, 300), (1, 513)], (64, 128)
    ):
        q = ac.draw((2, 8, rows, head_dim), dtype, g)
        k, v = (ac.draw((2, kv_heads, columns, head_dim), dtype, g) for _ in range(2))
        for is_causal in (False, True):
            options = {"is_causal": is_causal, "enable_gqa": True}
            grad = ac.gradient(q, g)
            judges.compare(f"{tuple(q.shape)} {tuple(k.shape)} {options}", q, k, v, grad, **options)
    judges.finish()


@pytest.mark.parametrize("name", ac.DTYPES)
def test_error_of_a_long_sequence(name: str) -> None:
    dtype = ac.DTYPES[name]
    g = ac.generator(name)
    judges = ar.Judges(dtype)
    for is_causal in (False, True):
        q, k, v = (ac.draw((1, 2, 4096, 128), dtype, g) for _ in range(3))
        grad = ac.gradient(q, g)
        judges.compare(f"{name}, causal {is_causal}", q, k, v, grad, is_causal=is_causal)
    judges.finish()


@pytest.mark.parametrize("kind", ["bool", "own", "float32"])
@pytest.mark.parametrize("name", ac.DTYPES)
def test_error_under_masks(name: str, kind: str) -> None:
    dtype = ac.DTYPES[name]
    g = ac.generator(f"{name} {kind}")
    judges = ar.Judges(dtype)
    shapes = [(2, 3, 200, 300), (1, 3, 200, 300), (2, 1, 1, 300), (200, 300), (1, 300), (200, 1)]
    for head_dim, shape in itertools.product((64, 128, 256), shapes):
        q = ac.draw((2, 3, 200, head_dim), dtype, g)
        k, v = (ac.draw((2, 3, 300, head_dim), dtype, g) for _ in range(2))
        value = torch.randn(shape, generator=g, device=ac.DEVICE).to(dtype)
        mask = value > -0.5 if kind == "bool" else value.float() if kind == "float32" else value
        if kind == "bool":
            mask[..., 0] = True
        mask = cases.place(mask, cases.Layout(pad=3, offset=1))
        grad = ac.gradient(q, g)
        judges.compare(f"{name} {head_dim}, {kind} {shape}", q, k, v, grad, mask)
    judges.finish()


@pytest.mark.parametrize("name", ac.DTYPES)
def test_equal_weights_of_small_integers_are_exact(name: str) -> None:
    """A query of zeros weights all visible keys equally; a power of two of them gives exact
    means."""
    dtype = ac.DTYPES[name]
    g = ac.generator(name)
    for (rows, columns), head_dim in itertools.product(
        [(1, 64), (128, 128), (65, 300), (300, 65)], (8, 64, 128, 200, 256)
    ):
        q = torch.zeros(2, 2, rows, head_dim, dtype=dtype, device=ac.DEVICE)
        k = ac.draw((2, 2, columns, head_dim), dtype, g)
        v = torch.randint(-3, 4, (2, 2, columns, head_dim), generator=g, device=ac.DEVICE).to(dtype)
        order = torch.rand(2, 2, rows, columns, generator=g, device=ac.DEVICE).argsort(-1)
        for count in (1, 2, 4):
            mask = torch.zeros(order.shape, dtype=torch.bool, device=ac.DEVICE)
            mask.scatter_(-1, order[..., :count], True)
            if rows == 1 and name not in ac.HALVES:
                continue  # joining split columns rounds once in float32
            expected = mask.double() @ v.double() / count
            label = f"{name} {rows}x{columns}x{head_dim}, {count} columns a row"
            numerics.check_exact(ar.cubin(q, k, v, None, mask)[0], expected, label)


@pytest.mark.parametrize("name", ac.HALVES)
def test_one_visible_key_gives_its_value(name: str) -> None:
    """Whatever its score: the weight is 1. float32 keeps the last bit of exp(0), and may differ."""
    dtype = ac.DTYPES[name]
    g = ac.generator(name)
    for rows, head_dim in itertools.product((1, 100, 257), (8, 64, 96, 128, 256)):
        q, k, v = (ac.draw((2, 3, rows, head_dim), dtype, g) for _ in range(3))
        diagonal = {"window_left": 0, "window_right": 0}
        eye = torch.eye(rows, dtype=torch.bool, device=ac.DEVICE)
        for options in (diagonal, {"attn_mask": eye}):
            out, logsumexp = torch.ops.cubin.attention_forward(q, k, v, **options)
            numerics.check_exact(out, v, f"{name} {rows}x{head_dim}")
            scores = (q.double() * k.double()).sum(-1) / math.sqrt(head_dim)
            error = (logsumexp.double() - scores).abs().max()
            assert not (error > 4e-6 * max(1.0, float(scores.abs().max()))), f"{name} {head_dim}"
        first = ar.cubin(q, k, v, is_causal=True)[0][:, :, 0]
        numerics.check_exact(first, v[:, :, 0], f"{name} {rows}x{head_dim} causal")


@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("name", ac.HALVES)
def test_scores_of_a_million_that_grow_along_the_keys(name: str, head_dim: int) -> None:
    """Rows whose running maximum passes 2^20 slowly, beside one whose maximum is beyond it at once.

    Each row sees four keys, in a block of keys each, of (in powers of two) these scores; its other
    weights are 0. The last row's are larger and fall: it alone keeps its warp looking for maxima.
    """
    dtype, columns = ac.DTYPES[name], 600
    heads = 160  # enough blocks of queries for any GPU, so that none has a part of the keys
    scores = [list(x) for x in itertools.permutations((1048570, 1048589, 1048594, 1048591))]
    top = 2**20
    for rows, keys in itertools.product((len(scores), 200), (80, 96, 112, 128)):  # of a block
        places = [5 + i * keys for i in range(4)]
        q = torch.zeros(1, heads, rows, head_dim)
        k = torch.zeros(1, heads, columns, head_dim)
        v = torch.zeros(1, heads, columns, head_dim)
        for place, column in enumerate(places):
            k[..., column, 0] = 1024.0
            k[..., column, 2 + place] = 1.0
            k[..., column, 1] = (1500.0, 1000.0, 1000.0, 1000.0)[place]
            v[..., column, place] = 1.0
        for row, mine in enumerate(scores):
            q[..., row, 0] = 1024.0
            q[..., row, 2 : 2 + len(mine)] = torch.tensor([float(x - top) for x in mine])
        q[..., 3::8, :] = 0.0
        q[..., 3::8, 1] = 2048.0
        q, k, v = (x.to(ac.DEVICE, dtype) for x in (q, k, v))
        for options in ({}, {"sinks": torch.zeros(heads, device=ac.DEVICE)}):
            want = ar.reference(q, k, v, scale=math.log(2), **options)
            out, logsumexp = torch.ops.cubin.attention_forward(
                q, k, v, scale=math.log(2), **options
            )
            label = f"{name} {rows}x{head_dim} {keys} {sorted(options)}"
            # The product with the unit rounds scores of this size to a sixteenth.
            assert float((out.double() - want.out).abs().max()) < 0.06, label
            assert float((logsumexp.double() - want.logsumexp).abs().max()) < 0.3, label


@pytest.mark.parametrize("head_dim", [64, 96, 128, 192, 256])
@pytest.mark.parametrize("name", ac.HALVES)
def test_bits_of_huge_scores_do_not_depend_on_their_neighbours(name: str, head_dim: int) -> None:
    """Rows whose running maximum passes 2^20 slowly, beside rows with small scores or huge ones.

    As in the test above, but each row begins below 2^20, in whichever order a kernel walks along
    the keys, so that no row of its own makes its warp look for maxima. And the scores' product with
    the unit is rounded, so that another order of operations gives other bits.
    """
    dtype, columns = ac.DTYPES[name], 600
    base = 1024 * 1016
    scale = math.log(2) * (2**20 - 6) / base
    rising = [[0, *x] for x in itertools.permutations((19, 24, 21))]
    falling = [[*x, 0] for x in itertools.permutations((19, 24, 21))]
    for keys, offsets in itertools.product((80, 96, 112, 128), (rising, falling)):  # of a block
        own = len(offsets)
        q = torch.zeros(1, 2, own + 2, head_dim)  # two neighbours of each row
        k = torch.zeros(1, 2, columns, head_dim)
        v = torch.randn(1, 2, columns, head_dim, generator=torch.Generator().manual_seed(keys))
        for place in range(4):
            k[..., 5 + place * keys, 0] = 1016.0
            k[..., 5 + place * keys, 1] = (1500.0, 1000.0, 1000.0, 1000.0)[place]
            k[..., 5 + place * keys, 2 + place] = 1.0
        q[..., :own, 0] = 1024.0
        q[..., :own, 2:6] = torch.tensor(offsets, dtype=torch.float)
        huge = q.clone()
        huge[..., own:, 1] = 2048.0
        with torch_cubin.batch_invariant():
            small, beside = (
                torch.ops.cubin.attention_forward(
                    *(x.to(ac.DEVICE, dtype) for x in (queries, k, v)), scale=scale
                )
                for queries in (q, huge)
            )
        for one, other in zip(small, beside, strict=True):
            label = f"{name} {head_dim} {keys}"
            numerics.check_exact(one[:, :, :own], other[:, :, :own], label)


@pytest.mark.parametrize("name", ac.DTYPES)
def test_results_stay_inside_their_memory(name: str) -> None:
    """Outputs are fresh tensors whose neighbours, filled before, keep their bytes."""
    dtype = ac.DTYPES[name]
    g = ac.generator(name)
    for shape in [(1, 3, 33, 40), (2, 5, 7, 24), (1, 1, 129, 64), (3, 2, 1, 128)]:
        q, k, v = (ac.draw(shape, dtype, g) for _ in range(3))
        size = -(-q.numel() * dtype.itemsize // 512) * 512
        want = ar.reference(q, k, v)
        filler = [torch.full((size,), 0x5A, dtype=torch.uint8, device=ac.DEVICE) for _ in range(64)]
        del filler[::2]
        kept = [ar.cubin(q, k, v)[0] for _ in range(8)]
        assert all(bool((block == 0x5A).all()) for block in filler), f"{name} {shape}"
        for out in kept:
            numerics.check_close(out, ar.pytorch(q, k, v)[0], want.out, f"{name} {shape}")
