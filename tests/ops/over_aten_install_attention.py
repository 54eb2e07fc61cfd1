"""install() below PyTorch's fused attention ops: results, layouts and gradients match PyTorch's.

A CPU build has none of them, so their operators are called directly, and compared with the
definition of attention.
"""

from __future__ import annotations

import pytest
import torch
from installed import installed
from ops.attention_samples import formula

import torch_cubin
from torch_cubin._pytorch.aten_kernels import has_cuda

aten = torch.ops.aten
BHSD, BSHD = "heads first", "rows first"
# What calls raise that are left to PyTorch: a CUDA build has kernels, which raise texts of their
# own for tensors of the CPU.
NOT_ON_THE_CPU = None if has_cuda() else "only PyTorch could serve"


def attention(query, key, value, bias=None, **options):
    """By its definition, in float64, with the logsumexp."""
    return formula(query, key, value, bias, enable_gqa=True, **options)


def operand(heads: int, rows: int, layout: str, dtype, dim: int = 16) -> torch.Tensor:
    if layout == BHSD:
        return torch.randn(2, heads, rows, dim, dtype=dtype)
    return torch.randn(2, rows, heads, dim, dtype=dtype).transpose(1, 2)


def close(own: torch.Tensor, wanted: torch.Tensor) -> None:
    tolerance = {torch.float32: 1e-5, torch.bfloat16: 3e-2, torch.float16: 5e-3}[own.dtype]
    torch.testing.assert_close(own.double(), wanted, rtol=tolerance, atol=tolerance)


def reports() -> tuple[list[str], list[str]]:
    report = torch_cubin.report()
    return [row.function for row in report.served], [row.reason for row in report.declined]


def reference_gradients(query, key, value, grad, **options):
    leaves = [x.detach().double().requires_grad_() for x in (query, key, value)]
    out, _ = attention(*leaves, **options)
    return torch.autograd.grad(out, leaves, grad.double())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("layout", [BHSD, BSHD])
@pytest.mark.parametrize(("rows", "columns", "heads"), [(24, 24, 4), (24, 40, 2), (40, 24, 4)])
def test_flash(dtype, layout, rows, columns, heads) -> None:
    query = operand(4, rows, layout, dtype)
    key, value = (operand(heads, columns, layout, dtype) for _ in range(2))
    grad = torch.randn_like(query)
    options = {"is_causal": True, "bottom_right": True, "scale": 0.3}
    wanted, sums = attention(query, key, value, **options)
    with installed():
        out, logsumexp, cum_q, cum_k, max_q, max_k, seed, unused, debug = (
            aten._scaled_dot_product_flash_attention(query, key, value, 0.0, True, scale=0.3)
        )
        gradients = aten._scaled_dot_product_flash_attention_backward(
            *(grad, query, key, value, out, logsumexp, cum_q, cum_k, max_q, max_k, 0.0, True),
            *(seed, unused),
            scale=0.3,
        )
        name = "aten::_scaled_dot_product_flash_attention"
        assert reports() == ([name, f"{name}_backward"], [])
    close(out, wanted)
    assert out.stride() == torch.empty_like(query).stride()
    assert (cum_q, cum_k, max_q, max_k) == (None, None, rows, columns)
    empty = torch.isinf(sums)
    assert torch.equal(torch.isposinf(logsumexp), empty)
    torch.testing.assert_close(logsumexp[~empty].double(), sums[~empty], rtol=1e-3, atol=1e-3)
    assert (seed.dtype, unused.dtype, debug.numel()) == (torch.uint64, torch.uint64, 0)
    if rows <= columns:  # the definition's gradient of an empty row is NaN
        for own, other, leaf in zip(
            gradients, reference_gradients(query, key, value, grad, **options),
            (query, key, value), strict=True,
        ):  # fmt: skip
            close(own, other)
            assert own.stride() == torch.empty_like(leaf).stride()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("layout", [BHSD, BSHD])
@pytest.mark.parametrize("kind", ["plain", "causal", "bias"])
@pytest.mark.parametrize("rows", [24, 32, 33])
def test_efficient(dtype, layout, kind, rows) -> None:
    query, key, value = (operand(4, n, layout, dtype) for n in (rows, 40, 40))
    bias = torch.randn(2, 4, rows, 40).to(dtype) if kind == "bias" else None
    causal, grad = kind == "causal", torch.randn_like(query)
    options = {"is_causal": causal, "bias": bias}
    wanted, sums = attention(query, key, value, **options)
    with installed():
        out, logsumexp, seed, offset = aten._scaled_dot_product_efficient_attention(
            query, key, value, bias, True, 0.0, causal
        )
        gradients = aten._scaled_dot_product_efficient_attention_backward(
            *(grad, query, key, value, bias, out, logsumexp, seed, offset, 0.0),
            *([True, True, True, False], causal),
        )
        none = aten._scaled_dot_product_efficient_attention(query, key, value, bias, False)[1]
        assert reports()[1] == []
    close(out, wanted)
    assert out.transpose(1, 2).is_contiguous()
    assert logsumexp.shape == (2, 4, (rows + 31) // 32 * 32)
    assert none.shape == (2, 4, 0)
    torch.testing.assert_close(
        logsumexp[:, :, :rows].double(), sums, rtol=1e-3, atol=1e-2 if bias is not None else 1e-3
    )
    assert torch.isposinf(logsumexp[:, :, rows:]).all()
    assert gradients[3] is None
    for own, other in zip(
        gradients, reference_gradients(query, key, value, grad, **options), strict=False
    ):
        close(own, other)
        assert own.transpose(1, 2).is_contiguous()


@pytest.mark.parametrize("layout", [BHSD, BSHD])
@pytest.mark.parametrize("kind", ["plain", "causal", "bias"])
def test_cudnn(layout, kind) -> None:
    dtype, causal = torch.float16, kind == "causal"
    query, key, value = (operand(h, 24, layout, dtype) for h in (4, 2, 2))
    bias = torch.randn(2, 1, 24, 24).to(dtype) if kind == "bias" else None
    grad, options = torch.randn_like(query), {"is_causal": causal, "bias": bias}
    wanted, sums = attention(query, key, value, **options)
    with installed():
        out, logsumexp, cum_q, cum_k, max_q, max_k, seed, offset, debug = (
            aten._scaled_dot_product_cudnn_attention(query, key, value, bias, True, 0.0, causal)
        )
        gradients = aten._scaled_dot_product_cudnn_attention_backward(
            *(grad, query, key, value, out, logsumexp, seed, offset, bias, cum_q, cum_k),
            *(max_q, max_k, 0.0, causal),
        )
        assert reports()[1] == []
    close(out, wanted)
    assert out.stride() == torch.empty_like(query).stride()
    assert (logsumexp.shape, debug) == ((2, 4, 24, 1), None)
    torch.testing.assert_close(logsumexp[..., 0].double(), sums, rtol=1e-3, atol=1e-2)
    for own, other, leaf in zip(
        gradients, reference_gradients(query, key, value, grad, **options), (query, key, value),
        strict=True,
    ):  # fmt: skip
        close(own, other)
        assert own.stride() == torch.empty_like(leaf).stride()


@pytest.mark.parametrize("kind", ["efficient", "cudnn"])
@pytest.mark.parametrize("read", [True, False])
def test_a_logsumexp_that_is_not_asked_for_is_not_changed(kind: str, read: bool) -> None:
    """Ours has -inf for a row that sees no key, PyTorch's inf: that is a kernel more."""
    query, key, value = (operand(4, 40, BHSD, torch.bfloat16) for _ in range(3))
    bias = torch.full((2, 4, 40, 40), -torch.inf, dtype=torch.bfloat16)
    bias[:, :, 1:] = 0
    op = getattr(aten, f"_scaled_dot_product_{kind}_attention")
    with installed(), torch.profiler.profile() as profile:
        logsumexp = op(query, key, value, bias, read)[1]
    assert ("aten::nan_to_num_" in {event.key for event in profile.key_averages()}) == read
    assert not read or torch.isposinf(logsumexp[:, :, 0]).all()


@pytest.mark.parametrize(("batch", "heads"), [(0, 4), (2, 0)])
def test_calls_without_elements(batch: int, heads: int) -> None:
    """PyTorch's flash attention divides by the heads of keys, and cuDNN's gives no tensor."""
    x = torch.empty(batch, heads, 24, 16, dtype=torch.bfloat16)
    with installed():
        flash = aten._scaled_dot_product_flash_attention(x, x, x, 0.0, True)
        efficient = aten._scaled_dot_product_efficient_attention(x, x, x, None, True)
        cudnn = aten._scaled_dot_product_cudnn_attention(x, x, x, None, True)
        gradients = (
            aten._scaled_dot_product_flash_attention_backward(
                x, x, x, x, *flash[:6], 0.0, True, *flash[6:8]
            ),
            aten._scaled_dot_product_efficient_attention_backward(
                x, x, x, x, None, *efficient, 0.0, [True, True, True, False]
            )[:3],
            aten._scaled_dot_product_cudnn_attention_backward(
                x, x, x, x, *cudnn[:2], *cudnn[6:8], None, *cudnn[2:6], 0.0, False
            ),
        )
        served, declined = reports()
    assert (len(served), declined) == (6, [])
    for own in (flash[0], efficient[0], cudnn[0], *(dx for each in gradients for dx in each)):
        assert own.shape == x.shape


@pytest.mark.parametrize(
    ("call", "reason"),
    [
        (
            lambda q: aten._scaled_dot_product_flash_attention(q, q, q, 0.5),
            "dropout, whose numbers PyTorch's backward draws again",
        ),
        (
            lambda q: aten._scaled_dot_product_flash_attention(*[q.float()] * 3),
            "a dtype that is not float16 or bfloat16",
        ),
        (
            lambda q: aten._scaled_dot_product_efficient_attention(*[q.double()] * 3, None, True),
            "dtype float64",
        ),
        (
            lambda q: aten._scaled_dot_product_cudnn_attention(
                q, q[:, :, :8], q[:, :, :8], None, False, 0.0, True
            ),
            "is_causal with other keys than queries",
        ),
    ],
)
def test_declined_calls_have_a_reason(call, reason) -> None:
    query = operand(4, 24, BHSD, torch.bfloat16)
    with installed():
        with pytest.raises(RuntimeError, match=NOT_ON_THE_CPU):
            call(query)
        assert reports() == ([], [reason])


@pytest.mark.parametrize("dtype", [torch.bool, torch.bfloat16], ids=str)
@pytest.mark.parametrize("policy", ["fastest", "all"])
def test_masks_for_few_queries_are_cudnns_under_fastest(policy, dtype) -> None:
    """A step of decoding: one row of queries, and a mask of the cache's keys."""
    query, keys = torch.randn(64, 32, 1, 64).bfloat16(), torch.randn(64, 32, 192, 64).bfloat16()
    mask = (torch.arange(192) < 130).expand(64, 1, 1, 192).to(dtype)
    with installed(policy):
        call = aten._scaled_dot_product_cudnn_attention
        if policy == "all":
            call(query, keys, keys, mask, True)
            assert reports() == (["aten::_scaled_dot_product_cudnn_attention"], [])
            return
        with pytest.raises(RuntimeError, match=NOT_ON_THE_CPU):
            call(query, keys, keys, mask, True)
        reason = "a mask for fewer than 128 queries, which is not known to be quicker"
        assert reports() == ([], [reason])
