"""Edge cases of attention on the GPU: lengths of 0, fully masked rows, NaN, layouts.

And what F.scaled_dot_product_attention lacks: windows, softcap, ALiBi, sinks, packed sequences,
forward and backward against the definition in float64 (attention_reference.py).
"""

from __future__ import annotations

import math

import numerics
import pytest
import torch
import torch.nn.functional as F
from gpu import attention_cases as ac
from gpu import attention_reference as ar
from gpu import cases
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel


def _draws(name: str, shapes, g: torch.Generator, layout=None) -> list[Tensor]:
    return [ac.draw(shape, ac.DTYPES[name], g, layout) for shape in shapes]


EXTRAS = {
    "window left": {"window_left": 20},
    "window right": {"window_right": 5},
    "window": {"window_left": 33, "window_right": 7},
    "window causal": {"window_left": 40, "is_causal": True},
    "diagonal": {"window_left": 0, "window_right": 0},
    "bottom right": {"bottom_right": True, "is_causal": True},
    "bottom right window": {"bottom_right": True, "window_left": 12, "window_right": 3},
    "softcap": {"softcap": 1.5},
    "softcap causal": {"softcap": 20.0, "is_causal": True},
    "alibi": {"alibi_slopes": (4,)},
    "alibi of each batch": {"alibi_slopes": (2, 4), "is_causal": True, "bottom_right": True},
    "sinks": {"sinks": (4,)},
    "sinks window": {"sinks": (4,), "window_left": 16, "window_right": 0},
    "all": {
        "sinks": (4,), "softcap": 5.0, "alibi_slopes": (4,), "window_left": 50, "is_causal": True,
        "bottom_right": True, "scale": 0.2,
    },
}  # fmt: skip
EXTRA_SHAPES = [  # rows, columns, head_dim, head_dim_v
    (100, 100, 64, 64), (257, 130, 128, 128), (70, 300, 40, 72), (1, 200, 128, 128),
    (3, 65, 256, 64),
]  # fmt: skip


def _extra(name: str, g: torch.Generator) -> dict:
    return {
        option: torch.rand(value, generator=g, device=ac.DEVICE)
        if isinstance(value, tuple)
        else value
        for option, value in EXTRAS[name].items()
    }


@pytest.mark.parametrize("extra", EXTRAS)
@pytest.mark.parametrize("name", ac.DTYPES)
def test_extras(name: str, extra: str, nan_memory) -> None:
    g = ac.generator(f"{name} {extra}")
    for rows, columns, head_dim, head_dim_v in EXTRA_SHAPES:
        q, k, v = _draws(
            name,
            [(2, 4, rows, head_dim), (2, 2, columns, head_dim), (2, 2, columns, head_dim_v)],
            g,
        )
        grad = ac.gradient(q.new_empty(2, 4, rows, head_dim_v), g)
        options = {**_extra(extra, g), "enable_gqa": True}
        label = f"{name} {extra} {(rows, columns, head_dim, head_dim_v)}"
        ar.check_call(name, label, q, k, v, grad, **options)


@pytest.mark.parametrize("name", ac.HALVES)
def test_extras_through_autograd(name: str, nan_memory) -> None:
    g = ac.generator(name)
    q, k, v = _draws(name, [(2, 4, 90, 64)] * 3, g, cases.Layout(order=(0, 2, 1, 3)))
    grad = ac.gradient(q, g)
    for extra in EXTRAS:
        options = _extra(extra, g)
        leaves = [x.detach().requires_grad_() for x in (q, k, v)]
        out, logsumexp = torch.ops.cubin.attention_forward(*leaves, **options)
        grads = torch.autograd.grad(out, leaves, grad)
        want = ar.reference(q, k, v, grad, **options)
        ar.check(name, f"{name} {extra}", [out.detach(), *grads], want, logsumexp.detach())


# Lengths of the packed sequences.
PACKED = {
    "even": ([64, 64, 64], [64, 64, 64]),
    "ragged": ([1, 129, 33, 200, 7], [5, 129, 300, 64, 1]),
    "empty queries": ([0, 50, 0, 70], [10, 50, 20, 0]),
    "one": ([77], [300]),
    "decode": ([1, 1, 1, 1], [400, 17, 1, 128]),
    "many": ([3] * 300, [5] * 300),
    "none": ([0, 0], [0, 0]),
}
PACKED_OPTIONS = [
    {}, {"is_causal": True}, {"is_causal": True, "bottom_right": True}, {"window_left": 9},
    {"softcap": 2.0, "alibi_slopes": (4,), "sinks": (4,)},
]  # fmt: skip


def _offsets(lengths: list[int]) -> Tensor:
    return torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()], dtype=torch.int32)


@pytest.mark.parametrize("lengths", PACKED)
@pytest.mark.parametrize("name", ac.FUSED)
def test_packed_sequences(name: str, lengths: str, nan_memory) -> None:
    """cu_seqlens, with rows before, between and after the sequences' own left untouched."""
    g = ac.generator(f"{name} {lengths}")
    q_lengths, k_lengths = PACKED[lengths]
    q_at, k_at = _offsets(q_lengths), _offsets(k_lengths)
    spare = 3  # rows that belong to no sequence
    for number, raw in enumerate(PACKED_OPTIONS):
        head_dim = (64, 128, 40, 256, 64)[number]
        rows, columns = int(q_at[-1]) + spare, int(k_at[-1]) + spare
        shapes = [(rows, 4, head_dim), (columns, 2, head_dim), (columns, 2, head_dim)]
        q, k, v = _draws(name, shapes, g)
        grad = ac.gradient(q, g)
        options = {
            key: torch.rand(value, generator=g, device=ac.DEVICE)
            if isinstance(value, tuple)
            else value
            for key, value in raw.items()
        }
        named = {
            "cu_seqlens_q": q_at.to(ac.DEVICE),
            "cu_seqlens_k": k_at.to(ac.DEVICE),
            "enable_gqa": True,
        }
        if number % 2:
            named |= {"max_seqlen_q": max(q_lengths), "max_seqlen_k": max(k_lengths)}
        ours, logsumexp = ar.both(q, k, v, grad, **options, **named)
        want = ar.packed_reference(q, k, v, grad, q_at.tolist(), k_at.tolist(), options)
        label = f"{name} {lengths} {raw}"
        ar.check(name, label, ours, want, logsumexp)


@pytest.mark.parametrize("name", ac.FUSED)
def test_packed_sequences_of_sinks_alone(name: str, nan_memory) -> None:
    """No key at all: zeros, and the sink as the only weight."""
    q = torch.randn(5, 2, 64, device=ac.DEVICE).to(ac.DTYPES[name])
    k = q[:0]
    sinks = torch.tensor([0.5, -2.0], device=ac.DEVICE)
    at = torch.tensor([0, 3, 5], dtype=torch.int32, device=ac.DEVICE)
    out, logsumexp = torch.ops.cubin.attention_forward(
        q, k, k, sinks=sinks, cu_seqlens_q=at, cu_seqlens_k=torch.zeros_like(at)
    )
    assert bool((out == 0).all())
    assert torch.allclose(logsumexp, sinks[:, None].expand(2, 5), atol=1e-6)


@pytest.mark.parametrize("name", ac.DTYPES)
def test_sizes_of_zero(name: str, nan_memory) -> None:
    dtype = ac.DTYPES[name]
    sizes = [
        ((2, 3, 0, 8), (2, 3, 5, 8), (2, 3, 5, 8)),
        ((2, 3, 5, 8), (2, 3, 0, 8), (2, 3, 0, 8)),
        ((2, 3, 0, 8), (2, 3, 0, 8), (2, 3, 0, 8)),
        ((0, 3, 5, 8), (0, 3, 5, 8), (0, 3, 5, 8)),
        ((2, 0, 5, 8), (2, 0, 5, 8), (2, 0, 5, 8)),
        ((2, 3, 5, 0), (2, 3, 7, 0), (2, 3, 7, 8)),
        ((2, 3, 5, 8), (2, 3, 7, 8), (2, 3, 7, 0)),
        ((0, 8), (5, 8), (5, 8)),
        ((5, 8), (0, 8), (0, 16)),
    ]
    for shapes in sizes:
        tensors = [torch.ones(shape, dtype=dtype, device=ac.DEVICE) for shape in shapes]
        grad = torch.ones(*shapes[0][:-1], shapes[2][-1], dtype=dtype, device=ac.DEVICE)
        cases.poison(256, dtype, ac.DEVICE)
        ours, logsumexp = ar.both(*tensors, grad)
        want = ar.reference(*tensors, grad)
        ar.check(name, f"{name} {shapes}", ours, want, logsumexp)
        leaves = [x.requires_grad_() for x in tensors]
        out = torch.ops.cubin.scaled_dot_product_attention(*leaves)
        ar.check(
            name, f"{name} {shapes}", [out.detach(), *torch.autograd.grad(out.sum(), leaves)], want
        )


@pytest.mark.parametrize("kind", ["bool", "own", "float32"])
@pytest.mark.parametrize("name", ac.DTYPES)
def test_fully_masked_rows(name: str, kind: str, nan_memory) -> None:
    """Zeros, -inf, and gradients as if the rows were not there."""
    dtype = ac.DTYPES[name]
    g = ac.generator(f"{name} {kind}")
    for rows, columns, head_dim in [(130, 200, 64), (70, 65, 128), (1, 300, 64), (40, 40, 256)]:
        q, k, v = _draws(
            name, [(2, 3, rows, head_dim), (2, 3, columns, head_dim), (2, 3, columns, head_dim)], g
        )
        visible = torch.rand(2, 3, rows, columns, generator=g, device=ac.DEVICE) > 0.4
        visible[:, :, ::3] = False
        visible[:, 1] = False  # a whole head
        mask = visible
        if kind != "bool":
            mask = torch.zeros(visible.shape, device=ac.DEVICE).masked_fill(~visible, -math.inf)
            mask = mask.to(dtype) if kind == "own" else mask
        grad = ac.gradient(q, g)
        ours, logsumexp = ar.both(q, k, v, grad, mask)
        want = ar.reference(q, k, v, grad, visible)
        label = f"{name} {kind} {(rows, columns, head_dim)}"
        ar.check(name, label, ours, want, logsumexp)
        assert bool((ours[0][:, :, ::3] == 0).all()), label
        assert bool((ours[1][:, :, ::3] == 0).all()), label
        assert bool((ours[0][:, 1] == 0).all()), label
        for result in ours[1:]:
            assert bool((result[:, 1] == 0).all()), label
        with sdpa_kernel(SDPBackend.MATH):
            own = F.scaled_dot_product_attention(q.double(), k.double(), v.double(), visible)
        assert bool((own[:, :, ::3] == 0).all()), "PyTorch gives something else"


def _set(place: str, q: Tensor, k: Tensor, v: Tensor, number: float) -> None:
    {"query": q, "key": k, "value": v}[place][0, 1, 2, 3] = number
    if place == "query" and math.isinf(number):
        k[..., 3] = (k[..., 3].abs() + 1) * math.copysign(1, number)  # scores of +inf alone


@pytest.mark.parametrize("what", [math.nan, math.inf, -math.inf], ids=str)
@pytest.mark.parametrize("place", ["query", "key", "value"])
@pytest.mark.parametrize("name", ac.DTYPES)
def test_nonfinite_values_propagate_as_in_pytorch(name: str, place: str, what: float) -> None:
    """Compared with PyTorch's composition in float64: its fused kernels differ among themselves."""
    g = ac.generator(f"{name} {place}")
    for rows, columns, head_dim in [(70, 130, 64), (5, 7, 8), (130, 40, 128), (33, 65, 256)]:
        q, k, v = _draws(
            name, [(2, 3, rows, head_dim), (2, 3, columns, head_dim), (2, 3, columns, head_dim)], g
        )
        _set(place, q, k, v, what)
        with sdpa_kernel(SDPBackend.MATH):
            own = F.scaled_dot_product_attention(q.double(), k.double(), v.double())
        out = ar.cubin(q, k, v)[0]
        numerics.check_same_class(
            out, own, f"{name} {what} in {place}, {(rows, columns, head_dim)}"
        )


@pytest.mark.parametrize("name", ac.DTYPES)
def test_an_infinite_gradient_propagates_as_in_pytorch(name: str) -> None:
    """A column of dv is infinite; its row of dq, and all that it meets in dk, are NaN."""
    g = ac.generator(name)
    for rows, columns, head_dim in [(70, 130, 64), (130, 40, 128), (33, 65, 256)]:
        q, k, v = _draws(
            name, [(1, 2, rows, head_dim), (1, 2, columns, head_dim), (1, 2, columns, head_dim)], g
        )
        grad = ac.gradient(q, g)
        grad[0, 1, 3, 5] = math.inf
        leaves = [x.double().requires_grad_() for x in (q, k, v)]
        with sdpa_kernel(SDPBackend.MATH):
            own = F.scaled_dot_product_attention(*leaves)
        wanted = torch.autograd.grad(own, leaves, grad.double())
        for which, result, want in zip("qkv", ar.cubin(q, k, v, grad)[1:], wanted, strict=True):
            label = f"d{which} of {name}, {(rows, columns, head_dim)}"
            if which == "v":
                numerics.check_same_class(result, want, label)
            else:  # infinite or NaN, by the order of the sums
                assert torch.equal(result.isfinite(), want.isfinite()), label


@pytest.mark.parametrize("name", ac.DTYPES)
def test_masks_that_are_not_finite(name: str) -> None:
    """NaN and +inf in an additive mask make their rows NaN; -inf hides; others are untouched."""
    dtype = ac.DTYPES[name]
    g = ac.generator(name)
    for mask_dtype in {dtype, torch.float32}:
        if name == "float64" and mask_dtype == torch.float32:
            continue
        q, k, v = _draws(name, [(2, 3, 70, 64), (2, 3, 100, 64), (2, 3, 100, 64)], g)
        mask = torch.randn(70, 100, generator=g, device=ac.DEVICE).to(mask_dtype)
        mask[3, 5], mask[10, 99], mask[20] = math.nan, math.inf, -math.inf
        mask[33, 1:] = -math.inf
        with sdpa_kernel(SDPBackend.MATH):
            own = F.scaled_dot_product_attention(q.double(), k.double(), v.double(), mask.double())
        out = ar.cubin(q, k, v, None, mask)[0]
        numerics.check_same_class(out, own, f"{name}, mask {mask_dtype}")
        clean = torch.ones(70, dtype=torch.bool, device=ac.DEVICE)
        clean[[3, 10]] = False
        want = ar.reference(q[:, :, clean], k, v, None, mask[clean])
        ar.check(name, f"{name}, mask {mask_dtype}", [out[:, :, clean]], want)


@pytest.mark.parametrize("name", ac.FUSED)
def test_rows_hidden_by_finite_masks_disturb_no_other(name: str, nan_memory) -> None:
    """Padding as models write it: the rows' own results mean nothing, their gradients are zero."""
    dtype = ac.DTYPES[name]
    g = ac.generator(name)
    for value in (-1e4, -1e9, -1e20, torch.finfo(torch.bfloat16).min, torch.finfo(dtype).min):
        for mask_dtype in {dtype, torch.float32}:
            if (
                not -math.inf < float(torch.tensor(value, dtype=mask_dtype))
                or dtype == torch.double
            ):
                continue
            q, k, v, grad = _draws(name, [(2, 3, 70, 64)] * 4, g)
            mask = torch.zeros(70, 70, dtype=mask_dtype, device=ac.DEVICE)
            mask[5], mask[40:, :9] = value, value
            grad[:, :, 5] = 0
            seen = torch.arange(70, device=ac.DEVICE) != 5
            want = ar.reference(q[:, :, seen], k, v, grad[:, :, seen], mask[seen])
            (out, dq, dk, dv), _ = ar.both(q, k, v, grad, mask)
            assert all(bool(x.isfinite().all()) for x in (out, dq, dk, dv)), f"{value} {mask_dtype}"
            label = f"{name}, {value} in {mask_dtype}"
            ar.check(name, label, [out[:, :, seen], dq[:, :, seen], dk, dv], want)


@pytest.mark.parametrize("name", ac.DTYPES)
@pytest.mark.parametrize("softcap", [2.0, 50.0, 128.0, 1e3, 1e6])
def test_softcap_is_exact_where_it_caps_little(name: str, softcap: float) -> None:
    g = ac.generator(name)
    for rows in (70, 520):  # the second is of the kernels for Hopper, up to their largest softcap
        q, k, v, grad = _draws(name, [(2, 3, rows, 64)] * 4, g)
        label = f"{name}, {rows} rows, softcap {softcap}"
        ar.check_call(name, label, q, k, v, grad, softcap=softcap)


@pytest.mark.parametrize("is_causal", [False, True], ids=["all", "causal"])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("rows", [1, 200])
def test_scores_beyond_2_to_32(rows: int, head_dim: int, is_causal: bool) -> None:
    """One key has all the weight. What rounding leaves of a score is more than exponents hold."""
    g = ac.generator("float32")
    shapes = [(1, 2, rows, head_dim)] + [(1, 2, 600, head_dim)] * 2
    query, key, value = (ac.draw(shape, torch.float32, g) for shape in shapes)
    query, key = query * 1e5, key * 1e5
    attention = torch.ops.cubin.scaled_dot_product_attention
    out = attention(query, key, value, is_causal=is_causal)
    want = attention(query.double(), key.double(), value.double(), is_causal=is_causal)
    torch.testing.assert_close(out.double(), want, rtol=0, atol=1e-5)


@pytest.mark.parametrize("name", ac.DTYPES)
def test_output_follows_the_layout_of_query(name: str) -> None:
    dtype = ac.DTYPES[name]
    g = ac.generator(name)
    packed = torch.randn(2, 40, 3, 4, 64, generator=g, device=ac.DEVICE).to(dtype)
    q, k, v = (x.transpose(1, 2) for x in packed.unbind(2))
    assert ar.cubin(q, k, v)[0].transpose(1, 2).is_contiguous(), "parts of a packed tensor"
    rows_outside = ac.draw((2, 40, 4, 64), dtype, g).transpose(1, 2)
    out = ar.cubin(rows_outside, k, v)[0]
    assert out.transpose(1, 2).is_contiguous()
    want = ar.reference(rows_outside, k, v)
    ar.check(name, name, [out], want)
    one = packed[:, :, 0].transpose(1, 2)
    ar.check(name, f"{name}, one tensor", ar.cubin(one, one, one), ar.reference(one, one, one))


@pytest.mark.parametrize("name", ac.FUSED)
def test_more_blocks_than_a_grid_has_in_y(name: str, nan_memory) -> None:
    """Batches times heads past 65,535."""
    g = ac.generator(name)
    for rows, columns, heads, kv_heads in [(3, 5, 2, 2), (1, 9, 4, 1), (20, 17, 1, 1)]:
        q = ac.draw((70_000, heads, rows, 16), ac.DTYPES[name], g)
        k, v = (ac.draw((70_000, kv_heads, columns, 16), ac.DTYPES[name], g) for _ in range(2))
        grad = ac.gradient(q, g)
        ar.check_call(name, f"{name} {tuple(q.shape)}", q, k, v, grad, enable_gqa=True)


@pytest.mark.parametrize("name", ac.DTYPES)
def test_batch_dims_that_do_not_merge(name: str, nan_memory) -> None:
    g = ac.generator(name)
    dtype = ac.DTYPES[name]
    layouts = [
        cases.Layout(order=(1, 0, 2, 3, 4)),
        cases.Layout(expand=(1,)),
        cases.Layout(order=(1, 2, 0, 3, 4), pad=8),
        cases.Layout(expand=(0,)),
    ]
    for index, layout in enumerate(layouts):
        q = ac.draw((2, 3, 4, 65, 64), dtype, g, layout)
        k = ac.draw((2, 3, 2, 70, 64), dtype, g, layouts[index - 1])
        v = ac.draw((2, 3, 2, 70, 64), dtype, g)
        slopes = torch.rand(6, 4, generator=g, device=ac.DEVICE)
        mask = ac.draw((2, 3, 4, 65, 70), dtype, g, cases.Layout(order=(1, 0, 2, 4, 3)))
        grad = ac.gradient(q, g)
        for options in ({}, {"alibi_slopes": slopes}, {"attn_mask": mask}):
            named = {**options, "enable_gqa": True}
            ours, logsumexp = ar.both(q, k, v, grad, **named)
            flat = dict(named)
            if "alibi_slopes" in flat:
                flat["alibi_slopes"] = slopes.view(2, 3, 4)
            want = ar.reference(q, k, v, grad, **flat)
            ar.check(name, f"{name} {layout} {list(options)}", ours, want, logsumexp)


# Offsets past 2^31 elements.


SPREADS = {  # strides of batch, head, row of (2, 2, 130, 64)
    "rows": (64, 128, 17_000_000),
    "rows unaligned": (64, 128, 17_000_001),
    "heads": (64 * 130, 2_150_000_000, 64),
    "batch": (2_150_000_000, 64 * 130, 64),
}


@pytest.mark.parametrize("spread", SPREADS)
def test_offsets_past_2_to_31(spread: str, freed_memory) -> None:
    """Key, value and mask are views of buffers of more than 2^31 elements, NaN between."""
    strides = (*SPREADS[spread], 1)
    shape = (2, 2, 130, 64)
    extent = 1 + sum((n - 1) * s for n, s in zip(shape, strides, strict=True))
    assert extent > 2**31
    cases.need_memory(5 * extent / 1e9)
    g = ac.generator(spread)
    q, near_k, near_v = (ac.draw(shape, torch.bfloat16, g) for _ in range(3))
    grad = ac.gradient(q, g)
    want = ar.reference(q, near_k, near_v, grad)
    buffer = torch.full((extent,), torch.nan, dtype=torch.bfloat16, device=ac.DEVICE)
    far = buffer.as_strided(shape, strides)
    for place, near in ((1, near_k), (2, near_v)):
        far.copy_(near)
        args = [q, near_k, near_v]
        args[place] = far
        ar.check("bfloat16", f"{spread} {place}", ar.both(*args, grad)[0], want)
    far.copy_(q)
    ar.check("bfloat16", f"{spread} 0", ar.both(far, near_k, near_v, grad)[0], want)
    # As a mask of 130 rows and 64 columns.
    far.copy_(torch.randn(shape, generator=g, device=ac.DEVICE))
    few = [q, near_k[:, :, :64], near_v[:, :, :64]]
    want = ar.reference(*few, grad, far.clone(memory_format=torch.contiguous_format))
    ar.check("bfloat16", f"{spread} mask", ar.both(*few, grad, far)[0], want)


def test_output_past_2_to_31(freed_memory) -> None:
    """2^25 + 1001 rows of 64: each the same, because the query is one row expanded."""
    rows = 2**25 + 1001
    assert rows * 64 > 2**31
    cases.need_memory(12)
    g = ac.generator("rows")
    query = ac.draw((1, 1, 1, 64), torch.bfloat16, g)
    k, v = (ac.draw((1, 1, 70, 64), torch.bfloat16, g) for _ in range(2))
    with torch.no_grad():
        out, logsumexp = torch.ops.cubin.attention_forward(query.expand(1, 1, rows, 64), k, v)
    want = ar.reference(query, k, v)
    ar.check("bfloat16", "first row", [out[:, :, :1]], want)
    assert bool((out == out[:, :, :1]).all())
    assert bool((logsumexp == logsumexp[:, :, :1]).all())
