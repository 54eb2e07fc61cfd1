"""torch.autocast: attention takes what F.scaled_dot_product_attention takes in its dtype."""

from __future__ import annotations

import pytest
import torch
from ops.attention_samples import attention, make_qkv, ops, stock
from ops.test_attention_semantics import near
from torch.nn.attention import SDPBackend, sdpa_kernel

CROSS = ((2, 3, 5, 8), (2, 3, 7, 8), (2, 3, 7, 8))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize("kind", ["none", "bool", "float"])
def test_as_torch(kind, dtype, grad, device):
    args = make_qkv(CROSS, device, requires_grad=grad)
    mask = None if kind == "none" else torch.randn(5, 7, device=device)
    mask = mask > -0.5 if kind == "bool" else mask
    with torch.autocast(device, dtype=dtype):
        for options in ({}, {"scale": 0.3}, {"is_causal": True} if mask is None else {}):
            out, expected = (op(*args, mask, **options) for op in (attention, stock))
            assert out.dtype == expected.dtype == dtype
            near(out.detach(), expected.detach())
            by_name = dict(zip(("query", "key", "value"), args, strict=True))
            assert torch.equal(attention(**by_name, attn_mask=mask, **options), out)
    if grad:
        grads, wanted = (torch.autograd.grad(x.float().sum(), args) for x in (out, expected))
        for one, other in zip(grads, wanted, strict=True):
            assert one.dtype == torch.float32
            near(one, other, dtype)


@pytest.mark.parametrize(
    "name", ["attention_forward", "_attention_forward", "_attention_forward_autograd"]
)
def test_every_op_casts_what_has_the_dtype_of_query(name, device):
    args = make_qkv(CROSS, device)
    half = [arg.bfloat16() for arg in args]
    mask, seed = torch.randn(5, 7, device=device), torch.tensor([5], device=device)
    options = {
        "sinks": torch.rand(3, device=device),
        "alibi_slopes": torch.rand(3, device=device),
        "scale": 0.3,
    }
    op = getattr(ops, name)
    expected = op(*half, mask.bfloat16(), 0.5, False, seed, **options)
    with torch.autocast(device, dtype=torch.bfloat16), torch.no_grad():
        for given in (args, [half[0], args[1], half[2]]):
            out, logsumexp = op(*given, mask, 0.5, False, seed, **options)
            assert out.dtype == torch.bfloat16
            assert logsumexp.dtype == torch.float32
            assert torch.equal(out, expected[0])
            assert torch.equal(logsumexp, expected[1])
            backward = name.replace("forward", "backward")
            grads = getattr(ops, backward)(
                torch.ones(out.shape, device=device),
                *given,
                *(out, logsumexp, mask, 0.5, False, seed),
                **options,
            )
            assert all(grad.dtype == torch.bfloat16 for grad in grads)


def test_packed_offsets_stay_as_they_are(device):
    rows = make_qkv(((6, 2, 8),) * 3, device)
    offsets = torch.tensor([0, 2, 6], dtype=torch.int32, device=device)
    with torch.autocast(device, dtype=torch.bfloat16):
        out, _ = ops.attention_forward(*rows, cu_seqlens_q=offsets, cu_seqlens_k=offsets)
    assert out.dtype == torch.bfloat16


def test_float64_is_not_cast(device):
    args = make_qkv(CROSS, device, torch.float64, requires_grad=True)
    with torch.autocast(device, dtype=torch.bfloat16):
        out = attention(*args)
        assert out.dtype == torch.float64
        near(out.detach(), stock(*args).detach())


def test_a_trainable_mask(device):
    """Composed, in the dtype of autocast as well, and no product inside is cast once more."""
    args = make_qkv(CROSS, device)
    mask = torch.randn(5, 7, device=device, requires_grad=True)
    results = []
    for op in (attention, stock):
        # On CUDA, PyTorch's own efficient backend refuses the gradient of a mask at this shape.
        with torch.autocast(device, dtype=torch.bfloat16), sdpa_kernel(SDPBackend.MATH):
            out = op(*args, mask)
        assert out.dtype == torch.bfloat16
        results.append([out.detach(), *torch.autograd.grad(out.float().sum(), mask)])
    for one, other in zip(*results, strict=True):
        near(one, other, torch.bfloat16)


def test_under_transforms(device):
    query, key, value = make_qkv(CROSS, device)
    with torch.autocast(device, dtype=torch.bfloat16):
        # NOTE: on a GPU PyTorch's own has no such gradient by its definition: types do not match.
        for op in (attention, stock) if device == "cpu" else (attention,):
            grad = torch.func.grad(lambda q, op=op: op(q, key, value).float().sum())(query)
            assert grad.dtype == torch.float32
        assert torch.func.vmap(attention)(query, key, value).dtype == torch.bfloat16
