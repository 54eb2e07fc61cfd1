"""torch.ops.cubin.matmul is torch.matmul, for every rank, layout and kind of tensor."""

from __future__ import annotations

import random

import pytest
import torch
from ops.samples import (
    DTYPES,
    MATMUL_SHAPES,
    assert_near,
    ids,
    make,
    make_all,
    matmul,
    random_layout,
    random_matmul_shapes,
)


@pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: str(dtype).removeprefix("torch."))
@pytest.mark.parametrize("shapes", MATMUL_SHAPES, ids=lambda pair: "@".join(map(ids, pair)))
def test_matmul_as_torch(shapes, dtype, device):
    a, b = make_all(shapes, device, dtype)
    out = matmul(a, b)
    assert_near(out, torch.matmul(a, b))
    assert out.is_contiguous()
    with torch.no_grad():
        assert torch.equal(matmul(a, b), out)
    with torch.inference_mode():
        assert torch.equal(matmul(a, b), out)


@pytest.mark.fault_case(39)
def test_matmul_random_layouts(device):
    for seed in range(1000):
        rng = random.Random(seed)
        torch.manual_seed(seed)
        dtype = rng.choice(DTYPES)
        shapes = random_matmul_shapes(rng)
        a, b = (random_layout(rng, shape, dtype, device) for shape in shapes)
        try:
            assert_near(matmul(a, b), torch.matmul(a, b))
        except Exception as error:
            layouts = [(tuple(x.shape), x.stride(), x.storage_offset()) for x in (a, b)]
            raise AssertionError(f"seed {seed}, {dtype}, {layouts}") from error


@pytest.mark.fault_case(38)
@pytest.mark.parametrize("shapes", [((2, 0), (0, 4)), ((0,), (0,)), ((3, 2, 0), (0,))])
def test_matmul_without_terms_is_zero(shapes, device):
    a, b = make_all(shapes, device)
    # Fresh memory holds NaN here, so that a kernel that writes nothing is seen.
    torch.use_deterministic_algorithms(True)
    try:
        out = matmul(a, b)
    finally:
        torch.use_deterministic_algorithms(False)
    assert out.shape == torch.matmul(a, b).shape
    assert torch.equal(out, torch.zeros_like(out))


@pytest.mark.parametrize("shapes", [((1, 3), (3, 1)), ((5, 1), (1, 5)), ((2, 3), (3,))])
def test_matmul_strides_are_contiguous_where_sizes_are_one(shapes, device):
    a, b = make_all(shapes, device)
    a = a.t().contiguous().t()  # strides that a size of 1 hides from is_contiguous()
    out = matmul(a, b)
    assert out.stride() == torch.empty(out.shape).stride()


def test_matmul_never_aliases_or_changes_its_arguments(device):
    a, b = make((1, 1), device), make((1, 1), device)
    before = a.clone(), b.clone(), a._version, b._version
    out = matmul(a, b)
    assert out.data_ptr() not in (a.data_ptr(), b.data_ptr())
    assert out._base is None
    out.fill_(7)
    assert torch.equal(a, before[0])
    assert torch.equal(b, before[1])
    assert (a._version, b._version) == before[2:]
    square = make((3, 3), device)
    assert_near(matmul(square, square), torch.matmul(square, square))


@pytest.mark.fault_case(40)
def test_matmul_resolves_the_negative_bit(device):
    z = torch.randn(4, 4, dtype=torch.complex128, device=device)
    a = z.conj().imag
    assert a.is_neg()
    b = make((4, 4), device)
    for args in ((a, b), (b, a), (a, a)):
        assert_near(matmul(*args), torch.matmul(*args))
        with torch.no_grad():
            assert_near(matmul(*args), torch.matmul(*args))
    b.requires_grad_()
    (grad,) = torch.autograd.grad(matmul(a, b).sum(), b)
    (expected,) = torch.autograd.grad(torch.matmul(a, b).sum(), b)
    assert_near(grad, expected)


def test_matmul_takes_parts_of_complex_tensors(device):
    z = torch.randn(4, 4, dtype=torch.complex128, device=device)
    for a in (z.real, z.imag, z.conj().real, z.t().imag):
        assert_near(matmul(a, a), torch.matmul(a, a))


@pytest.mark.fault_case(39)
def test_matmul_channels_last_and_expanded(device):
    a = make((2, 3, 4, 5), device).to(memory_format=torch.channels_last)
    b = make((5, 6), device)
    assert_near(matmul(a, b), torch.matmul(a, b))
    wide = make((1, 5), device).expand(7, 5)
    assert_near(matmul(wide, b), torch.matmul(wide, b))
    batch = make((4, 5), device).expand(3, 4, 5)
    assert_near(matmul(batch, b), torch.matmul(batch, b))


def test_matmul_inference_tensors(device):
    with torch.inference_mode():
        a, b = make((2, 3), device), make((3, 4), device)
        out = matmul(a, b)
        assert out.is_inference()
    assert_near(matmul(a, b), torch.matmul(a, b))  # outside again, without a graph
    w = make((3, 4), device, requires_grad=True)
    with pytest.raises(RuntimeError, match="[Ii]nference tensor"):
        matmul(a, w)  # as torch.matmul: it cannot be saved for backward


def test_matmul_of_parameters_and_subclasses(device):
    class Tagged(torch.Tensor):
        seen: list = []

        @classmethod
        def __torch_function__(cls, func, types, args=(), kwargs=None):
            cls.seen.append(func)
            return super().__torch_function__(func, types, args, kwargs or {})

    a, b = make((2, 3), device), make((3, 4), device)
    weight = torch.nn.Parameter(b)
    assert type(matmul(a, weight)) is torch.Tensor
    out = matmul(a.as_subclass(Tagged), b)
    assert type(out) is Tagged
    assert Tagged.seen
    assert_near(out.as_subclass(torch.Tensor), torch.matmul(a, b))


def test_matmul_of_a_dispatching_subclass(device):
    from torch.testing._internal.two_tensor import TwoTensor

    a, b = make((2, 3), device, requires_grad=True), make((3, 4), device)
    two = TwoTensor(a.detach(), 2 * a.detach()).requires_grad_()
    out = matmul(two, b)
    assert isinstance(out, TwoTensor)
    assert_near(out.a, torch.matmul(a, b))
    assert_near(out.b, 2 * torch.matmul(a, b))
    out.sum().backward()
    (expected,) = torch.autograd.grad(torch.matmul(a, b).sum(), a)
    assert_near(two.grad.a, expected)


def test_matmul_arguments_by_name(device):
    a, b = make((2, 3), device), make((3, 4), device)
    assert_near(matmul(self=a, other=b), torch.matmul(a, b))
    assert_near(torch.ops.cubin.matmul.default(a, other=b), torch.matmul(a, b))
