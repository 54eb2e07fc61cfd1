"""torch.ops.cubin.linear computes what torch.nn.functional.linear does."""

from __future__ import annotations

import random

import pytest
import torch
from ops.samples import (
    DTYPES,
    LINEAR_SHAPES,
    assert_near,
    ids,
    linear,
    make,
    make_all,
    random_layout,
    random_linear_shapes,
    reference_linear,
)


@pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: str(dtype).removeprefix("torch."))
@pytest.mark.parametrize("shapes", LINEAR_SHAPES, ids=lambda three: ",".join(map(ids, three)))
def test_linear_as_torch(shapes, dtype, device):
    args = make_all(shapes, device, dtype)
    out = linear(*args)
    assert_near(out, reference_linear(*args))
    assert out.is_contiguous()
    with torch.no_grad():
        assert torch.equal(linear(*args), out)
    with torch.inference_mode():
        assert torch.equal(linear(*args), out)


def test_linear_random_layouts(device):
    for seed in range(1000):
        rng = random.Random(seed)
        torch.manual_seed(seed)
        dtype = rng.choice(DTYPES)
        shapes = random_linear_shapes(rng)
        args = [None if s is None else random_layout(rng, s, dtype, device) for s in shapes]
        try:
            assert_near(linear(*args), reference_linear(*args))
        except Exception as error:
            layouts = [x if x is None else (tuple(x.shape), x.stride()) for x in args]
            raise AssertionError(f"seed {seed}, {dtype}, {layouts}") from error


def test_linear_without_terms_is_the_bias(device):
    input, weight, bias = make_all(((2, 0), (4, 0), (4,)), device)
    assert torch.equal(linear(input, weight, bias), bias.expand(2, 4))
    assert torch.equal(linear(input, weight), torch.zeros(2, 4, device=device).double())


def test_linear_arguments_by_name(device):
    input, weight, bias = make_all(((2, 3), (4, 3), (4,)), device)
    expected = reference_linear(input, weight, bias)
    for grad in (False, True):
        with torch.set_grad_enabled(grad):
            assert_near(linear(input, weight, bias=bias), expected)
            assert_near(linear(bias=bias, weight=weight, input=input), expected)
            assert_near(linear(input, weight, None), reference_linear(input, weight))


def test_linear_resolves_the_negative_bit(device):
    z = torch.randn(4, 4, dtype=torch.complex128, device=device)
    a, bias = z.conj().imag, z.conj().imag[0]
    assert bias.is_neg()
    assert_near(linear(a, a, bias), reference_linear(a, a, bias))


def test_linear_in_a_module(device):
    class Layer(torch.nn.Linear):
        def forward(self, input):
            return linear(input, self.weight, self.bias)

    layer = Layer(3, 4, device=device)
    x = make((5, 3), device, torch.float32)
    y = layer(x)
    y.sum().backward()
    stock = torch.nn.functional.linear(x, layer.weight, layer.bias)
    expected = torch.autograd.grad(stock.sum(), list(layer.parameters()))
    assert_near(y.detach(), stock.detach())
    assert_near([p.grad for p in layer.parameters()], expected)
