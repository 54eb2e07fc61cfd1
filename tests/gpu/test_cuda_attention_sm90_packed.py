"""Packed sequences (cu_seqlens) in the kernels for Hopper, forward and backward: mixed lengths,
bands, grouped heads, bounds that are too large or too small, neighbours that must not be seen."""

import itertools
import math
import random

import numerics
import pytest
import torch
from gpu import attention_cases as ac
from gpu import attention_reference as ar
from gpu import cases, hopper
from gpu.profiled import kernels_loaded

import torch_cubin

pytestmark = hopper.for_kernels

MIXED = [700, 1, 0, 64, 300, 1000, 129, 128, 2, 48, 97]
OTHER = [900, 3, 5, 0, 300, 777, 1, 128, 500, 127, 96]
OPTIONS = [
    ({}, MIXED, MIXED),
    ({}, MIXED, OTHER),
    ({"is_causal": True}, MIXED, MIXED),
    ({"is_causal": True}, MIXED, OTHER),
    ({"is_causal": True, "bottom_right": True}, MIXED, OTHER),
    ({"is_causal": True, "bottom_right": True}, OTHER, MIXED),
    ({"window_left": 100, "window_right": 30}, MIXED, MIXED),
    ({"window_left": 200, "bottom_right": True}, MIXED, OTHER),
    ({"window_left": 0, "window_right": 0, "bottom_right": True}, OTHER, MIXED),
    ({"is_causal": True}, [2500], [2500]),
]


def offsets(lengths, before: int = 0) -> torch.Tensor:
    at = list(itertools.accumulate(lengths, initial=before))
    return torch.tensor(at, dtype=torch.int32, device=ac.DEVICE)


def draw(dtype, g, q_rows, k_rows, heads, kv_heads, width, width_v, layout=None):
    """q, k, v and a gradient."""
    sizes = [
        (q_rows, heads, width),
        (k_rows, kv_heads, width),
        (k_rows, kv_heads, width_v),
        (q_rows, heads, width_v),
    ]
    return [ac.draw(size, dtype, g, layout or cases.Layout()) for size in sizes]


@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("name", ac.HALVES)
def test_against_float64(name: str, head_dim: int, nan_memory) -> None:
    dtype, g = ac.DTYPES[name], ac.generator(f"{name} {head_dim}")
    for number, (options, q_lengths, k_lengths) in enumerate(OPTIONS):
        before = number % 3  # rows of no sequence, there and at the end
        q_at, k_at = offsets(q_lengths, before), offsets(k_lengths, before)
        heads, kv_heads = ((4, 4), (6, 3), (8, 1), (3, 3))[number % 4]
        widths = (head_dim, head_dim) if number % 2 else (head_dim - 24, head_dim - 8)
        layout = cases.Layout(order=(1, 0, 2)) if number % 5 == 4 else cases.Layout(pad=8)
        q, k, v, grad = draw(
            dtype, g, int(q_at[-1]) + 5, int(k_at[-1]) + 9, heads, kv_heads, *widths, layout
        )
        named = {"cu_seqlens_q": q_at, "cu_seqlens_k": k_at, "enable_gqa": True}
        if number % 3:  # exact, or larger than any; else unknown
            more = number % 3 - 1
            named["max_seqlen_q"] = max(q_lengths) + 300 * more
            named["max_seqlen_k"] = max(k_lengths) + 200 * more
        ours, logsumexp = ar.both(q, k, v, grad, **options, **named)
        want = ar.packed_reference(q, k, v, grad, q_at.tolist(), k_at.tolist(), options)
        label = f"{name} {widths} {OPTIONS[number]} {named.get('max_seqlen_q')}"
        ar.check(name, label, ours, want, logsumexp)
    loaded = kernels_loaded()
    assert any(
        x.startswith(f"sm90_attention_{ac.SHORT[name]}") and x.endswith(f"x{head_dim}")
        for x in loaded
    )
    assert f"sm90_backward_attention_{ac.SHORT[name]}_{ac.sm90_backward_tile(head_dim)}" in loaded
    assert {"sm90_order_attention_queries", "sm90_order_attention_keys"} <= loaded


@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_random_lengths(head_dim: int, nan_memory) -> None:
    """60 random calls, some of thousands of short sequences."""
    r, g = random.Random(head_dim), ac.generator(head_dim)
    for number in range(60):
        if number % 10 == 9:
            q_lengths = [r.choice((0, 1, 2, 9, 17)) for _ in range(r.choice((300, 1500, 3000)))]
            k_lengths = [r.choice((0, 1, 3, 20)) for _ in q_lengths]
        else:
            q_lengths = [r.randint(0, r.choice((3, 70, 400))) for _ in range(r.randint(1, 40))]
            k_lengths = [r.randint(0, r.choice((3, 200, 900))) for _ in q_lengths]
        same = r.random() < 0.5
        k_lengths = q_lengths if same else k_lengths
        q_at, k_at = offsets(q_lengths), offsets(k_lengths)
        options = r.choice(
            [
                {},
                {"is_causal": True, "bottom_right": r.random() < 0.5},
                {"window_left": r.randint(0, 300), "window_right": r.randint(0, 300)},
                {"window_left": r.randint(0, 50), "bottom_right": True},
                {"window_right": r.randint(0, 50), "bottom_right": True},
            ]
        )
        heads, kv_heads = r.choice(((1, 1), (2, 1), (4, 2), (5, 5), (16, 2)))
        rows = max(1, int(q_at[-1])), max(1, int(k_at[-1]))
        q, k, v, grad = draw(torch.bfloat16, g, *rows, heads, kv_heads, head_dim, head_dim)
        named = {"cu_seqlens_q": q_at, "cu_seqlens_k": k_at, "enable_gqa": True}
        if r.random() < 0.6:
            named["max_seqlen_q"] = max(1, *q_lengths)
            named["max_seqlen_k"] = max(1, *k_lengths)
        ours, logsumexp = ar.both(q, k, v, grad, **options, **named)
        if len(q_lengths) < 100:
            want = ar.packed_reference(q, k, v, grad, q_at.tolist(), k_at.tolist(), options)
            label = f"{number} {options} {q_lengths} {k_lengths}"
            ar.check("bfloat16", label, ours, want, logsumexp)
        else:  # a reference of thousands takes long: sequences are many calls of one batch each
            again, _ = ar.both(q, k, v, grad, **options, **named)
            for x, y in zip(ours, again, strict=True):
                assert bool(x.isfinite().all()), number
                numerics.check_bits(x, y)
            few = r.sample(range(len(q_lengths)), 40)
            for index in few:
                one_q = slice(int(q_at[index]), int(q_at[index + 1]))
                one_k = slice(int(k_at[index]), int(k_at[index + 1]))
                if one_q.start == one_q.stop or one_k.start == one_k.stop:
                    assert bool((ours[0][one_q] == 0).all())
                    continue
                args = [x.transpose(0, 1) for x in (q[one_q], k[one_k], v[one_k], grad[one_q])]
                want = ar.reference(*args, enable_gqa=True, **options)
                mine = [
                    x[s].transpose(0, 1)
                    for x, s in zip(ours, (one_q, one_q, one_k, one_k), strict=True)
                ]
                ar.check("bfloat16", f"{number} sequence {index} {options}", mine, want)


@pytest.mark.parametrize("heads", [(1, 1), (5, 5), (12, 12), (12, 4), (21, 7)], ids=str)
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_one_long_sequence_among_short_ones(head_dim: int, heads: tuple, nan_memory) -> None:
    """The longest tiles of the last heads come before all of their others."""
    g = ac.generator(f"{head_dim} {heads}")
    lengths = [130, *[60] * 20, 3000, *[500] * 3]
    at = offsets(lengths)
    q, k, v, grad = draw(torch.bfloat16, g, int(at[-1]), int(at[-1]), *heads, head_dim, head_dim)
    for options in ({"is_causal": True}, {"is_causal": True, "window_left": 700}):
        named = {"cu_seqlens_q": at, "cu_seqlens_k": at, "enable_gqa": True, **options}
        ours, logsumexp = ar.both(q, k, v, grad, **named)
        want = ar.packed_reference(q, k, v, grad, at.tolist(), at.tolist(), options)
        label = f"{head_dim} {heads} {options}"
        ar.check("bfloat16", label, ours, want, logsumexp)


@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_neighbours_are_not_seen(head_dim: int, nan_memory) -> None:
    """A sequence's bits are the same whatever its neighbours hold, NaN and infinities too."""
    g = ac.generator(head_dim)
    lengths = [300, 500, 217, 640, 31]
    at = offsets(lengths)
    q, k, v, grad = draw(torch.bfloat16, g, int(at[-1]), int(at[-1]), 4, 2, head_dim, head_dim)
    named = {
        "cu_seqlens_q": at,
        "cu_seqlens_k": at,
        "max_seqlen_q": 640,
        "max_seqlen_k": 640,
        "enable_gqa": True,
    }
    for options in ({}, {"is_causal": True}):
        clean, clean_lse = ar.both(q, k, v, grad, **options, **named)
        others = [x.clone() for x in (q, k, v, grad)]
        for x in others:
            x[:300] = math.nan
            x[800:1017] = math.inf
            x[1657:] = math.nan
        ours, lse = ar.both(*others, **options, **named)
        for rows in (slice(300, 800), slice(1017, 1657)):
            numerics.check_bits(lse[:, rows].contiguous(), clean_lse[:, rows].contiguous())
            for x, y in zip(ours, clean, strict=True):
                numerics.check_bits(x[rows], y[rows])


@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_a_max_length_that_is_too_small_truncates_sequences(head_dim: int, nan_memory) -> None:
    """Only that many rows and keys of each sequence count; rows beyond give zeros."""
    g = ac.generator(head_dim)
    lengths = [700, 90, 400, 650]
    at = offsets(lengths).tolist()
    q, k, v, grad = draw(torch.bfloat16, g, at[-1], at[-1], 2, 2, head_dim, head_dim)
    cu = torch.tensor(at, dtype=torch.int32, device=ac.DEVICE)
    (out, dq, dk, dv), lse = ar.both(
        q, k, v, grad, is_causal=True, bottom_right=True,
        cu_seqlens_q=cu, cu_seqlens_k=cu, max_seqlen_q=500, max_seqlen_k=380,
    )  # fmt: skip
    for begin, length in zip(at, lengths, strict=False):
        rows, columns = (
            slice(begin, begin + min(length, 500)),
            slice(begin, begin + min(length, 380)),
        )
        args = [x.transpose(0, 1) for x in (q[rows], k[columns], v[columns], grad[rows])]
        want = ar.reference(*args, is_causal=True, bottom_right=True)
        mine = [
            x[s].transpose(0, 1) for x, s in ((out, rows), (dq, rows), (dk, columns), (dv, columns))
        ]
        ar.check("bfloat16", f"{head_dim} {length}", mine, want, lse[:, rows])
        for x, cut in ((out, 500), (dq, 500), (dk, 380), (dv, 380)):
            assert bool((x[begin + cut : begin + length] == 0).all())
        assert bool((lse[:, begin + 500 : begin + length] == -math.inf).all())


@pytest.mark.parametrize("rows", [(1, 1), (1, 900), (900, 1)], ids=str)
def test_a_tensor_of_one_row(rows: tuple[int, int], nan_memory) -> None:
    """Whose stride from row to row is any."""
    g = ac.generator(str(rows))
    q, k, v, grad = draw(torch.bfloat16, g, *rows, 4, 2, 64, 64)
    named = {"cu_seqlens_q": offsets(rows[:1]), "cu_seqlens_k": offsets(rows[1:])}
    ours, lse = ar.both(q, k, v, grad, enable_gqa=True, **named)
    want = ar.packed_reference(q, k, v, grad, [0, rows[0]], [0, rows[1]], {})
    ar.check("bfloat16", str(rows), ours, want, lse)


def test_no_sequence_at_all(nan_memory) -> None:
    g = ac.generator("none")
    q, k, v, grad = draw(torch.bfloat16, g, 700, 900, 2, 2, 64, 64)
    none = torch.zeros(1, dtype=torch.int32, device=ac.DEVICE)
    ours, lse = ar.both(q, k, v, grad, cu_seqlens_q=none, cu_seqlens_k=none)
    assert all(bool((x == 0).all()) for x in ours)
    assert bool((lse == -math.inf).all())


@pytest.mark.parametrize(
    "is_nan",
    [
        pytest.param(
            is_nan, id="-".join(case), marks=pytest.mark.child("attention_wrong_offsets", *case)
        )
        for is_nan, *case in (
            (True, "bfloat16", "64", "causal"),
            (True, "float16", "128", "softcap"),
            (True, "bfloat16", "256", "full"),
            (True, "float8_e4m3fn", "128", "causal"),
            # Portable kernels bound each offset instead.
            (False, "float32", "128", "causal"),
            (False, "bfloat16", "256", "softcap"),
        )
    ],
)
def test_wrong_offsets(is_nan: bool, child) -> None:
    answer = child.check()
    assert answer["sane"]
    assert answer["changed"] == []
    if is_nan:
        assert answer["not_nan"] == []


@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_gradients_of_a_sequence_among_others(head_dim: int) -> None:
    """Under batch_invariant(): else the parts of a tile of keys follow the number of sequences."""
    g = ac.generator(f"among {head_dim}")
    lengths = [300, 511, 40, 900]
    at = offsets(lengths)
    tensors = draw(torch.bfloat16, g, int(at[-1]), int(at[-1]), 8, 2, head_dim, head_dim)
    options = {"is_causal": True, "enable_gqa": True}
    with torch_cubin.batch_invariant():
        together, _ = ar.both(*tensors, cu_seqlens_q=at, cu_seqlens_k=at, **options)
        for i, length in enumerate(lengths):
            own = slice(int(at[i]), int(at[i + 1]))
            alone_at = offsets([length])
            alone, _ = ar.both(
                *(x[own] for x in tensors), cu_seqlens_q=alone_at, cu_seqlens_k=alone_at, **options
            )
            for mine, all_of_them in zip(alone, together, strict=True):
                assert torch.equal(mine, all_of_them[own]), length


@pytest.mark.parametrize("head_dim", [64, 128])
def test_thousands_of_runs_have_the_same_bits(head_dim: int) -> None:
    """While another stream shifts blocks in time: ordered sums, and dynamically scheduled tiles."""
    g = ac.generator(head_dim)
    lengths = [900, 20, 350, 1400, 128, 600, 7]
    at = offsets(lengths)
    q, k, v, grad = draw(torch.bfloat16, g, int(at[-1]), int(at[-1]), 6, 2, head_dim, head_dim)
    noise, side = (
        torch.randn(2048, 2048, device=ac.DEVICE, dtype=torch.bfloat16),
        torch.cuda.Stream(),
    )
    side.wait_stream(torch.cuda.current_stream())
    options = {
        "is_causal": True, "enable_gqa": True, "cu_seqlens_q": at, "cu_seqlens_k": at,
        "max_seqlen_q": 1400, "max_seqlen_k": 1400,
    }  # fmt: skip
    with torch.no_grad():
        forward, backward = torch.ops.cubin.attention_forward, torch.ops.cubin.attention_backward
        out, lse = forward(q, k, v, **options)
        first = [out, *backward(grad, q, k, v, out, lse, **options)]
        changed = torch.zeros((), dtype=torch.int64, device=ac.DEVICE)
        for repeat in range(1000):
            if repeat % 16 == 0:
                with torch.cuda.stream(side):
                    torch.mm(noise, noise)
            again = forward(q, k, v, **options)
            results = [again[0], *backward(grad, q, k, v, out, lse, **options)]
            for x, y in zip(results, first, strict=True):
                changed += (x.view(torch.int16) != y.view(torch.int16)).any()
    assert int(changed) == 0
