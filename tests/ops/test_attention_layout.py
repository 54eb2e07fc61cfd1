"""Outputs lie in memory as their inputs do, by the same rule in C++ and in the fake kernels."""

from __future__ import annotations

import random

import pytest
import torch
from ops.attention_samples import attention, make_qkv, ops, random_case, random_qkv
from ops.samples import DTYPES
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import (
    DimDynamic,
    ShapeEnv,
    StatelessSymbolicContext,
)


def facts(tensors) -> list[tuple]:
    tensors = tensors if isinstance(tensors, tuple | list) else [tensors]
    return [(tuple(t.shape), t.stride(), t.storage_offset(), t.dtype) for t in tensors]


def as_meta(tensor: torch.Tensor) -> torch.Tensor:
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")


def test_fake_and_real_agree_on_ten_thousand_layouts(device):
    # One rule for all devices, so the CPU's ten thousand would do; a GPU shows that it is followed.
    for seed in range(10_000 if device == "cpu" else 1_000):
        rng = random.Random(seed)
        shapes, options = random_case(rng)
        args = random_qkv(rng, shapes, rng.choice(DTYPES), device)
        fakes = [as_meta(arg) for arg in args]
        where = f"seed {seed}: {shapes}, {[arg.stride() for arg in args]}, {options}"
        if seed % 4:
            real = ops._scaled_dot_product_attention(*args, **options)
            fake = ops._scaled_dot_product_attention(*fakes, **options)
            assert facts(real) == facts(fake), where
            continue
        real, fake = (
            ops._attention_forward(*args, **options),
            ops._attention_forward(*fakes, **options),
        )
        assert facts(real) == facts(fake), where
        gradient = torch.randn_like(real[0])
        real = ops._attention_backward(gradient, *args, *real, **options)
        fake = ops._attention_backward(as_meta(gradient), *fakes, *fake, **options)
        assert facts(real) == facts(fake), where


@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_a_view_of_rows_before_heads_gives_one(dtype, grad, device):
    args = [
        torch.randn(2, rows, 3, 8, dtype=dtype, device=device).transpose(1, 2) for rows in (5, 7, 7)
    ]
    args = [arg.detach().requires_grad_(grad) for arg in args]
    out = attention(*args)
    assert out.shape == (2, 3, 5, 8)
    assert out.transpose(1, 2).is_contiguous()
    if grad and dtype == torch.float32:  # those of a composition are as its ops leave them
        for arg in torch.autograd.grad(out.sum(), args):
            assert arg.transpose(1, 2).is_contiguous()


@pytest.mark.parametrize(
    ("order", "kept"),
    [
        ((0, 1, 2, 3), True),
        ((0, 2, 1, 3), True),
        ((2, 0, 1, 3), True),
        ((0, 1, 3, 2), False),  # columns are not innermost
    ],
)
def test_order_of_dims(order, kept, device):
    sizes = (2, 3, 4, 8)
    base = torch.randn([sizes[i] for i in order], device=device)
    query = base.permute([order.index(i) for i in range(4)])
    key = torch.randn(2, 3, 7, 8, device=device)
    out = attention(query, key, key)
    assert out.stride() == (query.stride() if kept else torch.empty(sizes).stride())


def test_parts_of_a_packed_tensor_give_rows_before_heads(device):
    qkv = torch.randn(2, 5, 3, 4, 8, device=device)
    query, key, value = (x.transpose(1, 2) for x in qkv.unbind(2))
    assert attention(query, key, value).transpose(1, 2).is_contiguous()


def test_a_query_that_shares_elements_gives_a_contiguous_output(device):
    key = torch.randn(2, 3, 5, 8, device=device)
    shared = torch.randn(2, 5, 1, 8, device=device).transpose(1, 2).expand(2, 3, 5, 8)
    overlapping = torch.randn(400, device=device).as_strided((2, 3, 5, 8), (160, 8, 12, 1))
    for query in (shared, overlapping):
        assert attention(query, key, key).is_contiguous()


def test_a_slice_of_data_dependent_length_keeps_the_order():
    with FakeTensorMode(shape_env=ShapeEnv()) as mode:
        rows = mode.shape_env.create_unbacked_symint()
        torch._check(rows >= 2)
        torch._check(rows <= 16)
        query = torch.empty(2, 16, 3, 8)[:, :rows].transpose(1, 2)
        key = torch.empty(2, 3, 7, 8)
        assert attention(query, key, key).stride()[1:] == (8, 24, 1)


def test_symbolic_sizes_keep_the_order(device):
    """One graph serves all lengths: the order may not depend on how large a size is."""
    args = [torch.randn(2, rows, 3, 8, device=device).transpose(1, 2) for rows in (5, 7, 7)]
    env = ShapeEnv()
    with FakeTensorMode(shape_env=env) as mode:
        dynamic = [DimDynamic.DYNAMIC, DimDynamic.STATIC, DimDynamic.DYNAMIC, DimDynamic.STATIC]
        fakes = [
            mode.from_tensor(arg, symbolic_context=StatelessSymbolicContext(dynamic))
            for arg in args
        ]
        out = attention(*fakes)
    assert [int(step) for step in out.stride()] == list(attention(*args).stride())
    assert not isinstance(out.shape[2], int)
    assert not isinstance(out.stride(0), int)


def test_data_dependent_sizes():
    with FakeTensorMode(shape_env=ShapeEnv()) as mode:
        rows = mode.shape_env.create_unbacked_symint()
        torch._check(rows >= 2)
        query = torch.empty(2, rows, 3, 8).transpose(1, 2)
        key = torch.empty(2, 3, 7, 8)
        out = attention(query, key, key)
        assert out.stride()[1:] == (8, 24, 1)
        many = torch.empty(2, 3, rows, 8)
        assert attention(key, many, many).is_contiguous()


def test_outputs_are_fresh(device):
    """Results are not views: an in-place change of one changes no other tensor."""
    args = make_qkv(((2, 3, 5, 8),) * 3, device, requires_grad=True)
    out = attention(*args)
    assert out._base is None
    out, logsumexp = ops.attention_forward(*args)
    assert out._base is None
    assert logsumexp._base is None
    assert logsumexp.is_contiguous()
