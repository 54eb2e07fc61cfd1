"""Attention gives what F.scaled_dot_product_attention gives, and its options what they promise."""

from __future__ import annotations

import math

import pytest
import torch
from ops.attention_samples import (
    SHAPES,
    SHARED,
    attention,
    case_id,
    formula,
    kept_weights,
    make_qkv,
    ops,
    reference,
    stock,
)
from ops.samples import DTYPES
from recorded_ops import RecordedOps

# Of out, relative to the largest element: weights in 16 bits are rounded once more than in torch.
LIMITS = {
    torch.float16: 4e-3,
    torch.bfloat16: 3e-2,
    torch.float32: 2e-5,
    torch.float64: 1e-12,
}
SQUARE = ((2, 3, 5, 8), (2, 3, 5, 8), (2, 3, 5, 8))
CROSS = ((2, 3, 5, 8), (2, 3, 7, 8), (2, 3, 7, 8))


def near(actual: torch.Tensor, expected: torch.Tensor, dtype: torch.dtype | None = None) -> None:
    """Up to rounding in `dtype`; NaN and infinities in the same places."""
    dtype = dtype or actual.dtype
    finite = expected[expected.isfinite()]
    most = max(float(finite.abs().max()) if finite.numel() else 0.0, 1.0)
    torch.testing.assert_close(
        actual.double(),
        expected.double(),
        rtol=LIMITS[dtype],
        atol=LIMITS[dtype] * most,
        equal_nan=True,
    )


def check(args, *rest, **options) -> None:
    """The public op in both grad modes against torch, whose kernel may choose how it rounds."""
    expected = reference(*(arg.double() for arg in args), *rest, **options)
    for grad in (False, True):
        inputs = [arg.detach().requires_grad_(grad) for arg in args]
        out = attention(*inputs, *rest, **options)
        assert out.dtype == args[0].dtype
        assert out.requires_grad == grad
        near(out.detach(), expected)


def attention_kernels(call) -> set[str]:
    """Those of PyTorch's attention that the call runs."""
    with torch.no_grad(), RecordedOps() as ops:
        call()
    return {name for name in ops.names if "attention" in name}


def test_the_reference_is_not_a_fused_kernel(device):
    """Which may answer otherwise on another processor (conftest.py)."""
    query, key, value = make_qkv(SQUARE, device)
    layer = torch.nn.MultiheadAttention(8, 2, batch_first=True, device=device)
    rows = query[:, 0]
    for call in (
        lambda: stock(query, key, value),
        lambda: stock(query, key, value, is_causal=True),
        lambda: layer.train()(rows, rows, rows, need_weights=False),
    ):
        assert attention_kernels(call) <= {"aten::_scaled_dot_product_attention_math"}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shapes", SHAPES, ids=case_id)
def test_as_torch(shapes, dtype, device):
    args = make_qkv(shapes, device, dtype)
    check(args)
    check(args, scale=0.25)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shapes", SHARED, ids=case_id)
def test_heads_of_a_group(shapes, dtype, device):
    args = make_qkv(shapes, device, dtype)
    check(args, enable_gqa=True)
    check(args, enable_gqa=True, is_causal=True)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("lengths", [(5, 5), (5, 7), (7, 5), (1, 5), (5, 1)], ids=str)
def test_causal(lengths, dtype, device):
    rows, columns = lengths
    shapes = ((2, 3, rows, 8), (2, 3, columns, 8), (2, 3, columns, 8))
    check(make_qkv(shapes, device, dtype), is_causal=True)


MASKS = [(5, 7), (1, 7), (5, 1), (1, 1), (3, 5, 7), (2, 3, 5, 7), (2, 1, 5, 7), (1, 3, 1, 7)]


@pytest.mark.parametrize("kind", ["bool", "own", "float32"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", MASKS, ids=str)
def test_masks_of_every_shape(shape, dtype, kind, device):
    args = make_qkv(CROSS, device, dtype)
    mask = torch.randn(shape, device=device)
    mask = mask > -0.5 if kind == "bool" else mask.to(dtype) if kind == "own" else mask
    expected = stock(*(arg.double() for arg in args), mask if kind == "bool" else mask.double())
    for grad in (False, True):
        inputs = [arg.detach().requires_grad_(grad) for arg in args]
        near(attention(*inputs, mask).detach(), expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_masks_of_any_stride(dtype, device):
    args = make_qkv(CROSS, device, dtype)
    base = torch.randn(7, 10, 3, 2, device=device)
    mask = base.permute(3, 2, 1, 0)[:, :, ::2]
    assert mask.shape == (2, 3, 5, 7)
    for view in (mask, mask[0, 0].expand(2, 3, 5, 7), mask[:, :, :1].expand(2, 3, 5, 7)):
        expected = stock(*(arg.double() for arg in args), view.double())
        near(attention(*args, view), expected)
        near(attention(*args, view > 0), stock(*(a.double() for a in args), view > 0))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_fully_masked_rows(dtype, device):
    args = make_qkv(CROSS, device, dtype)
    mask = torch.ones(5, 7, dtype=torch.bool, device=device)
    mask[1] = False
    mask[3, 2:] = False
    for one in (mask, torch.zeros(5, 7, device=device).masked_fill(~mask, -math.inf)):
        out, logsumexp = ops.attention_forward(*args, one)
        assert (out[:, :, 1] == 0).all()
        assert (logsumexp[:, :, 1] == -math.inf).all()
        expected, expected_logsumexp = formula(*args, mask)
        near(out, expected)
        near(logsumexp, expected_logsumexp, dtype)
        inputs = [arg.detach().requires_grad_() for arg in args]
        for grad in torch.autograd.grad(attention(*inputs, one).sum(), inputs):
            assert grad.isfinite().all()


def test_no_keys_at_all(device):
    query, key = torch.ones(2, 3, 5, 8, device=device), torch.ones(2, 3, 0, 8, device=device)
    out, logsumexp = ops.attention_forward(query, key, key)
    assert (out == 0).all()
    assert (logsumexp == -math.inf).all()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("what", ["nan in query", "nan in key", "nan in value", "inf in query"])
def test_nonfinite_values_propagate_as_in_torch(what, dtype, device):
    query, key, value = make_qkv(CROSS, device, dtype)
    tensor = {"query": query, "key": key, "value": value}[what.split()[-1]]
    tensor[0, 1, 2, 3] = math.nan if what.startswith("nan") else math.inf
    if what.startswith("inf"):
        key[..., 3] = key[..., 3].abs() + 1  # scores of +inf
    expected = stock(query.double(), key.double(), value.double())
    out = attention(query, key, value)
    assert torch.equal(out.isnan(), expected.isnan())
    clean = ~expected.isnan()
    near(out[clean], expected[clean])


@pytest.mark.parametrize("scale", [0.0, -0.5, 3.0, None])
def test_any_scale(scale, device):
    check(make_qkv(CROSS, device), scale=scale)


@pytest.mark.parametrize("head_dim", [1, 3, 16, 40, 72, 128, 200, 256, 264])
def test_any_head_dim(head_dim, device):
    rows = ((1, 2, 4, head_dim), (1, 2, 6, head_dim))
    for dtype in (torch.float16, torch.float32):
        check(make_qkv((*rows, rows[1]), device, dtype))
        check(make_qkv((*rows, (1, 2, 6, 8)), device, dtype))


def test_views_of_one_tensor(device):
    packed = torch.randn(2, 5, 3, 4, 8, device=device)
    check([x.transpose(1, 2) for x in packed.unbind(2)])
    check([packed[:, :, 0].transpose(1, 2)] * 3)
    check([packed[..., 0, ::2].permute(0, 2, 1, 3)] * 3)
    check([packed[:1, :, 0].transpose(1, 2).expand(2, 4, 5, 8)] * 3)
    check([packed[:, :, 0].permute(0, 2, 3, 1)] * 3)  # columns are not innermost


@pytest.mark.parametrize("batch", [0, 1, 3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_slopes_of_any_stride(dtype, batch, device):
    """Of no batch, too, where a tensor counts as contiguous whatever its strides are."""
    q, k, v = (torch.randn(batch, 4, 6, 8, dtype=dtype, device=device) for _ in range(3))
    numbers = torch.rand(8, device=device)
    for slopes in (
        numbers[:1].expand(4),
        numbers[::2],
        numbers[:1].expand(3, 4)[:batch],
        numbers.view(4, 2).t()[:1].expand(batch, 4),
    ):
        ours = torch.ops.cubin.attention_forward(q, k, v, alibi_slopes=slopes)
        want = torch.ops.cubin.attention_forward(q, k, v, alibi_slopes=slopes.clone().contiguous())
        for x, y in zip(ours, want, strict=True):
            assert torch.equal(x, y)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_logsumexp(dtype, device):
    for shapes in SHAPES:
        args = make_qkv(shapes, device, dtype)
        out, logsumexp = ops.attention_forward(*args)
        expected, expected_logsumexp = formula(*args)
        assert logsumexp.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
        assert logsumexp.shape == out.shape[:-1]
        near(out, expected.expand(out.shape))
        near(logsumexp, expected_logsumexp.expand(logsumexp.shape), dtype)


# The square ones see rows without a column, on both sides.
OPTIONS = [
    {"window_left": 2},
    {"window_right": 1},
    {"window_left": 1, "window_right": 1},
    {"window_left": 0, "window_right": 0},
    {"window_left": 2, "is_causal": True},
    {"bottom_right": True, "is_causal": True},
    {"bottom_right": True, "window_left": 2, "window_right": 0},
    {"softcap": 0.7},
    {"alibi_slopes": (3,)},
    {"alibi_slopes": (2, 3)},
    {"sinks": (3,)},
    {"sinks": (3,), "softcap": 1.5, "window_left": 3, "is_causal": True, "alibi_slopes": (3,)},
]


def with_tensors(options: dict, device: str) -> dict:
    return {
        name: torch.rand(value, device=device) if isinstance(value, tuple) else value
        for name, value in options.items()
    }


def option_id(options: dict) -> str:
    return "-".join(options)


@pytest.mark.parametrize("lengths", [(5, 7), (7, 5)], ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("options", OPTIONS, ids=option_id)
def test_options(options, dtype, lengths, device):
    rows, columns = lengths
    shapes = ((2, 3, rows, 8), (2, 3, columns, 8), (2, 3, columns, 8))
    args, options = make_qkv(shapes, device, dtype), with_tensors(options, device)
    expected, expected_logsumexp = formula(*args, **options)
    for grad in (False, True):
        inputs = [arg.detach().requires_grad_(grad) for arg in args]
        out, logsumexp = ops.attention_forward(*inputs, **options)
        near(out.detach(), expected)
        near(logsumexp.detach(), expected_logsumexp, dtype)


PACKED = [
    ((0, 3, 8), (0, 3, 8)),
    ((0, 3, 3, 8), (0, 4, 6, 11)),  # an empty sequence of queries
    ((0, 3, 5, 8), (0, 4, 4, 11)),  # one without keys
    ((0, 8), (0, 11)),
]


@pytest.mark.parametrize("options", [{}, {"is_causal": True}, {"window_left": 1}, {"softcap": 1.0}])
@pytest.mark.parametrize("offsets", PACKED, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_packed_sequences(dtype, offsets, options, device):
    q_at, k_at = offsets
    args = make_qkv(((8, 4, 8), (k_at[-1], 2, 8), (k_at[-1], 2, 6)), device, dtype)
    cu_seqlens = [torch.tensor(x, dtype=torch.int32, device=device) for x in offsets]
    named = {"cu_seqlens_q": cu_seqlens[0], "cu_seqlens_k": cu_seqlens[1], "enable_gqa": True}
    longest = {"max_seqlen_q": 8, "max_seqlen_k": k_at[-1]}
    for grad in (False, True):
        inputs = [arg.detach().requires_grad_(grad) for arg in args]
        for bounds in ({}, longest):
            out, logsumexp = ops.attention_forward(*inputs, **named, **options, **bounds)
            assert out.shape == (8, 4, 6)
            assert logsumexp.shape == (4, 8)
            for i in range(len(q_at) - 1):
                rows, columns = slice(q_at[i], q_at[i + 1]), slice(k_at[i], k_at[i + 1])
                one = (args[0][rows], args[1][columns], args[2][columns])
                one = [x.transpose(0, 1) for x in one]
                expected, expected_logsumexp = formula(*one, enable_gqa=True, **options)
                near(out.detach()[rows].transpose(0, 1), expected)
                near(logsumexp.detach()[:, rows], expected_logsumexp, dtype)


def test_dropout_keeps_the_expected_weights(device):
    seed = torch.tensor([1234567890123], device=device)
    for p in (0.1, 0.5, 0.9):
        kept = kept_weights((2, 4, 64, 96), p, seed, device)
        fraction = float((kept != 0).double().mean())
        count = kept.numel()
        assert abs(fraction - (1 - p)) < 5 * math.sqrt(p * (1 - p) / count) + 1e-4
        torch.testing.assert_close(
            kept.max(), torch.tensor(1 / (1 - p), device=device).double(), rtol=1e-4, atol=0
        )
        # No two heads, rows or batches drop alike.
        flat = (kept != 0).flatten(0, 2)
        assert len({tuple(row.tolist()) for row in flat}) == len(flat)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_dropout_is_a_function_of_its_seed(dtype, device):
    args = make_qkv(CROSS, device, dtype)
    seed = torch.tensor([42], device=device)
    kept = kept_weights((2, 3, 5, 7), 0.4, seed, device)
    expected, expected_logsumexp = formula(*args, kept=kept)
    for grad in (False, True):
        inputs = [arg.detach().requires_grad_(grad) for arg in args]
        out, logsumexp = ops.attention_forward(*inputs, None, 0.4, False, seed)
        near(out.detach(), expected)
        near(logsumexp.detach(), expected_logsumexp, dtype)  # that of the weights before dropout
    other, _ = ops.attention_forward(*args, None, 0.4, False, seed + 1)
    assert not torch.equal(other, out)


def test_dropout_with_p_one_and_p_zero(device):
    args = make_qkv(CROSS, device)
    assert (attention(*args, None, 1.0) == 0).all()
    assert torch.equal(attention(*args, None, 0.0), attention(*args))


@pytest.mark.parametrize("grad", [False, True])
def test_manual_seed_decides_the_dropout(grad, device):
    args = make_qkv(CROSS, device, requires_grad=grad)

    def run() -> torch.Tensor:
        return attention(*args, dropout_p=0.5).detach()

    torch.manual_seed(7)
    first, second = run(), run()
    assert not torch.equal(first, second)
    torch.manual_seed(7)
    assert torch.equal(run(), first)
    assert torch.equal(run(), second)


def test_the_seed_does_not_depend_on_the_grad_mode(device):
    args = make_qkv(CROSS, device)
    results = []
    for mode in (torch.enable_grad, torch.no_grad, torch.inference_mode):
        torch.manual_seed(3)
        with mode():
            results.append(attention(*args, dropout_p=0.5))
    assert torch.equal(results[0], results[1])
    assert torch.equal(results[0], results[2])


def test_no_dropout_draws_no_number(device):
    args = make_qkv(CROSS, device)
    torch.manual_seed(5)
    expected = torch.rand(1, device=device)
    torch.manual_seed(5)
    attention(*args)
    assert torch.equal(torch.rand(1, device=device), expected)


def test_same_inputs_same_bits(device):
    args = make_qkv(CROSS, device, requires_grad=True)
    results = []
    for _ in range(3):
        out = attention(*args)
        results.append([out, *torch.autograd.grad(out.sum(), args)])
    for again in results[1:]:
        assert all(map(torch.equal, again, results[0]))
