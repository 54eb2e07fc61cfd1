"""Batching rules of attention: any in_dims, one call for the whole batch where there can be one."""

from __future__ import annotations

import pytest
import torch
from ops.attention_samples import (
    SHAPES,
    SHARED,
    attention,
    case_id,
    make_qkv,
    ops,
    reference,
    stock,
)
from ops.samples import assert_near, make
from ops.test_attention_semantics import near
from ops.test_vmap import BATCH, batched
from recorded_ops import RecordedOps
from torch.func import vmap

CROSS = ((2, 3, 5, 8), (2, 3, 7, 8), (2, 3, 7, 6))
DIMS = [(0, 0, 0), (-1, 0, 1), (0, None, None), (None, 0, None), (None, -1, 0), (1, None, -1)]


def one_by_one(op, dims, *args):
    """The definition of vmap."""
    results = [
        op(*(x if d is None else x.select(d, i) for x, d in zip(args, dims, strict=True)))
        for i in range(BATCH)
    ]
    if isinstance(results[0], torch.Tensor):
        return torch.stack(results)
    return tuple(torch.stack(parts) for parts in zip(*results, strict=True))


def samples(shapes, dims, device) -> list[torch.Tensor]:
    return [
        batched(shape, len(shape) if dim == -1 else dim, device).float()
        for shape, dim in zip(shapes, dims, strict=True)
    ]


@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize("shapes", [*SHAPES, *SHARED], ids=case_id)
def test_any_dims(shapes, grad, device):
    options = {"enable_gqa": shapes in SHARED}
    with torch.set_grad_enabled(grad):
        for dims in DIMS:
            args = samples(shapes, dims, device)
            result = vmap(lambda *args: attention(*args, **options), dims)(*args)
            expected = one_by_one(lambda *args: reference(*args, **options), dims, *args)
            near(result, expected)


@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize("kind", ["bool", "float"])
def test_masks(kind, grad, device):
    with torch.set_grad_enabled(grad):
        for shape in ((5, 7), (7,), (3, 1, 7), (2, 1, 5, 7), ()):
            for dims in ((0, 0, 0, 0), (None, None, None, 0), (0, 1, 2, None), (1, None, 0, -1)):
                *args, mask = samples((*CROSS, shape), dims, device)
                mask = mask > -0.5 if kind == "bool" else mask

                def by_stock(q, k, v, m):
                    return stock(q, k, v, m.expand(5, 7) if m.dim() < 2 else m)

                expected = one_by_one(by_stock, dims, *args, mask)
                near(vmap(attention, dims)(*args, mask), expected)


def test_a_batch_is_one_call(device):
    args = samples(CROSS, (0, 0, None), device)
    for options in ({}, {"is_causal": True}, {"scale": 0.5}):
        with RecordedOps() as calls, torch.no_grad():
            vmap(lambda *args: attention(*args, **options), (0, 0, None))(*args)  # noqa: B023
        assert [name for name, *_ in calls.ours] == ["_scaled_dot_product_attention"]
    slopes = torch.rand(3, device=device)
    with RecordedOps() as calls, torch.no_grad():
        vmap(lambda *args: ops.attention_forward(*args, alibi_slopes=slopes), (0, 0, None))(*args)
    assert len(calls.ours) == 1


OPTIONS = [
    ({"softcap": 0.7, "window_left": 2}, {}),
    ({}, {"sinks": (3,)}),
    ({}, {"alibi_slopes": (3,)}),
    ({}, {"alibi_slopes": (2, 3)}),
    ({"dropout_p": 0.5, "dropout_seed": (1,)}, {}),
]


@pytest.mark.parametrize("own", [False, True], ids=["shared", "own"])
@pytest.mark.parametrize("plain", OPTIONS, ids=lambda pair: "-".join([*pair[0], *pair[1]]))
def test_options(plain, own, device):
    """One value for all, and one for each of the batch."""
    numbers, shapes = plain
    seeded = "dropout_seed" in numbers
    options = {k: v for k, v in numbers.items() if k != "dropout_seed"}
    tensors = {
        name: torch.rand((BATCH, *shape) if own else shape, device=device)
        for name, shape in shapes.items()
    }
    if seeded:
        tensors["dropout_seed"] = torch.arange(BATCH if own else 1, device=device)[:, None][
            slice(None) if own else 0
        ]
    names = list(tensors)

    def forward(query, key, value, *extra):
        named = dict(zip(names, extra, strict=True))
        return ops.attention_forward(query, key, value, **options, **named)

    dims = (0, 0, None, *(0 if own else None for _ in names))
    args = [*samples(CROSS, (0, 0, None), device), *tensors.values()]
    result = vmap(forward, dims)(*args)
    expected = one_by_one(forward, dims, *args)
    for one, other in zip(result, expected, strict=True):
        near(one, other)


def test_logsumexp_and_backward(device):
    for shapes in (CROSS, ((5, 8), (7, 8), (7, 6)), ((3, 5, 8), (7, 8), (3, 7, 6))):
        for dims in ((0, 0, 0), (1, None, 0), (None, 0, None)):
            args = samples(shapes, dims, device)
            saved = vmap(ops.attention_forward, dims)(*args)
            expected = one_by_one(lambda *args: ops.attention_forward(*args), dims, *args)
            for one, other in zip(saved, expected, strict=True):
                near(one, other)
            for dim in (0, None):
                gradient = make(saved[0].shape[1:] if dim is None else saved[0].shape, device)
                all_dims = (dim, *dims, 0, 0)
                given = (gradient.float(), *args, *saved)
                grads = vmap(ops.attention_backward, all_dims)(*given)
                expected = one_by_one(lambda *x: ops.attention_backward(*x), all_dims, *given)
                for one, other in zip(grads, expected, strict=True):
                    near(one, other)


def test_packed_sequences(device):
    rows = [make((BATCH, 6, 2, 8), device).float() for _ in range(3)]
    offsets = torch.tensor([0, 2, 6], dtype=torch.int32, device=device)

    def forward(query, key, value):
        return ops.attention_forward(query, key, value, cu_seqlens_q=offsets, cu_seqlens_k=offsets)

    expected = one_by_one(forward, (0, 0, 0), *rows)
    for one, other in zip(vmap(forward)(*rows), expected, strict=True):
        near(one, other)


def test_nested_and_with_options(device):
    query, key = make((4, 2, 3, 5, 8), device).float(), make((6, 2, 3, 7, 8), device).float()
    result = vmap(lambda q: vmap(lambda k: attention(q, k, k))(key))(query)
    expected = stock(query[:, None], key[None], key[None])
    near(result, expected)
    args = samples(CROSS, (0, 0, 0), device)
    expected = vmap(attention)(*args)
    assert_near(vmap(attention, chunk_size=2, out_dims=1)(*args), expected.movedim(0, 1))


def test_grad_through_vmap(device):
    args = [arg.requires_grad_() for arg in samples(CROSS, (0, None, 0), device)]
    dims = (0, None, 0)
    out = vmap(attention, dims)(*args)
    weight = torch.randn_like(out)
    grads = torch.autograd.grad(out, args, weight)
    expected = torch.autograd.grad(one_by_one(stock, dims, *args), args, weight)
    for one, other in zip(grads, expected, strict=True):
        near(one, other)


@pytest.mark.parametrize("grad", [False, True])
def test_randomness_of_dropout(grad, device):
    """As vmap does to every random op: refused, the same for all, or drawn for each."""
    args = [arg[:1].expand_as(arg) for arg in samples(CROSS, (0, 0, 0), device)]

    def dropped(*args):
        return attention(*args, dropout_p=0.5)

    with torch.set_grad_enabled(grad):
        with pytest.raises(RuntimeError, match="rand"):
            vmap(dropped)(*args)
        same = vmap(dropped, randomness="same")(*args)
        assert torch.equal(same[0], same[1])
        different = vmap(dropped, randomness="different")(*args)
        assert not torch.equal(different[0], different[1])
        # Without a batched argument, too.
        alone = vmap(lambda _: dropped(*(arg[0] for arg in args)), randomness="different")
        out = alone(torch.zeros(BATCH, device=device))
        assert not torch.equal(out[0], out[1])


def test_mistakes_show_the_shapes_that_the_function_sees(device):
    query, key, value = make_qkv(((BATCH, 5, 8), (BATCH, 7, 8), (BATCH, 6, 8)), device)
    for grad in (False, True):
        with torch.set_grad_enabled(grad):
            with pytest.raises(RuntimeError, match=r"\[input\].*'value'.*expected 7, got 6"):
                vmap(attention)(query, key, value)
            mask = torch.zeros(BATCH, 4, 7, device=device)
            with pytest.raises(RuntimeError, match=r"\[input\].*'attn_mask'.*\(5, 7\).*\(4, 7\)"):
                vmap(attention)(query, key, key, mask)
            scalar = make((BATCH, 8), device).float()
            with pytest.raises(RuntimeError, match=r"\[input\].*'query'.*at least 2, got 1"):
                vmap(attention)(scalar, key, key)
