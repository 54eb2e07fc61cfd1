"""torch.utils.flop_counter counts for attention what its own formulas give, each call once."""

from __future__ import annotations

import pytest
import torch
from ops.attention_samples import attention, make_qkv, ops
from ops.test_flops import count
from torch.utils import flop_counter

CASES = [
    ((2, 4, 5, 8), (2, 4, 7, 8), (2, 4, 7, 8)),
    ((2, 4, 5, 8), (2, 4, 7, 8), (2, 4, 7, 6)),
    ((2, 4, 5, 8), (2, 2, 7, 8), (2, 2, 7, 6)),
    ((2, 4, 5, 8), (2, 1, 7, 8), (2, 1, 7, 8)),
]


@pytest.mark.parametrize("shapes", CASES, ids=str)
def test_as_torchs_formulas(shapes, device):
    query, key, value = shapes
    out = (*query[:-1], value[-1])
    forward = flop_counter.sdpa_flop_count(query, key, value) if query[1] == key[1] else None
    if forward is None:  # torch 2.11 has no formula for groups: as for repeated heads
        wide = [(*shape[:1], query[1], *shape[2:]) for shape in (key, value)]
        forward = flop_counter.sdpa_flop_count(query, *wide)
        backward = flop_counter.sdpa_backward_flop_count(out, query, *wide)
    else:
        backward = flop_counter.sdpa_backward_flop_count(out, query, key, value)
    options = {"enable_gqa": True, "is_causal": True}
    args = make_qkv(shapes, device, requires_grad=True)
    for f in (attention, ops.attention_forward, ops._attention_forward_autograd):
        assert count(lambda f=f: f(*args, **options)) == forward
    for f in (attention, ops.attention_forward):
        with torch.no_grad():
            assert count(lambda f=f: f(*args, **options)) == forward
        with torch.inference_mode():
            assert count(lambda f=f: f(*args, **options)) == forward
    assert count(lambda: attention(*args, **options).sum().backward()) == forward + backward
    saved = [x.detach() for x in ops.attention_forward(*args, **options)]
    for name in ("attention_backward", "_attention_backward", "_attention_backward_autograd"):
        plain = [x.detach() for x in args]
        f = getattr(ops, name)
        assert count(lambda f=f: f(saved[0], *plain, *saved, **options)) == backward  # noqa: B023


def test_composed_attention_counts_its_products(device):
    args = make_qkv(CASES[0], device, requires_grad=True)
    mask = torch.zeros(5, 7, device=device, requires_grad=True)
    assert count(lambda: attention(*args, mask)) == flop_counter.sdpa_flop_count(*CASES[0])


def test_other_ranks_and_no_data():
    for shapes in (((5, 8), (7, 8), (7, 6)), ((2, 3, 4, 5, 8), (7, 8), (7, 6))):
        for device in ("cpu", "meta"):
            leading = 24 if len(shapes[0]) == 5 else 1
            args = make_qkv(shapes, device)
            assert count(lambda: attention(*args)) == 2 * leading * 5 * 7 * (8 + 6)  # noqa: B023


def test_packed_sequences(device):
    args = make_qkv(((8, 4, 8), (11, 2, 8), (11, 2, 6)), device)
    q_at, k_at = (
        torch.tensor(x, dtype=torch.int32, device=device) for x in ((0, 3, 8), (0, 4, 11))
    )
    options = {"cu_seqlens_q": q_at, "cu_seqlens_k": k_at, "enable_gqa": True}
    scores = 4 * (3 * 4 + 5 * 7)
    assert count(lambda: ops.attention_forward(*args, **options)) == 2 * scores * (8 + 6)
    fakes = [x.to("meta") for x in args]
    options = {k: x.to("meta") if isinstance(x, torch.Tensor) else x for k, x in options.items()}
    options |= {"max_seqlen_q": 5, "max_seqlen_k": 7}
    worst = 2 * 4 * 2 * 5 * 7 * (8 + 6)  # each as long as the longest
    assert count(lambda: ops.attention_forward(*fakes, **options)) == worst


@pytest.mark.parametrize("form", ["apart", "packed keys", "packed"])
@pytest.mark.parametrize("varlen", [False, True])
def test_flash_attention(form, varlen, device):
    shape = (11, 4, 8) if varlen else (2, 5, 4, 8)
    query = torch.randn(shape, device=device)
    packed = {"apart": [query] * 3, "packed keys": [query, torch.stack([query] * 2, -3)]}
    args = packed.get(form, [torch.stack([query] * 3, -3)])
    offsets = torch.tensor([0, 4, 11], dtype=torch.int32, device=device)
    options = {"cu_seqlens_q": offsets, "cu_seqlens_k": offsets} if varlen else {}
    scores = 4 * (4 * 4 + 7 * 7) if varlen else 2 * 4 * 5 * 5
    for mode in (torch.enable_grad, torch.no_grad, torch.inference_mode):
        with mode():
            assert count(lambda: ops.flash_attention(*args, **options)) == 2 * scores * (8 + 8)
