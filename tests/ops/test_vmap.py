"""Batching rules: any in_dims, nested, and one product for the whole batch."""

from __future__ import annotations

import itertools

import pytest
import torch
from ops.samples import (
    LINEAR_SHAPES,
    MATMUL_SHAPES,
    assert_near,
    ids,
    linear,
    make,
    make_all,
    matmul,
    reference_linear,
)
from recorded_ops import RecordedOps
from torch.func import vmap

BATCH = 3


def batched(shape: tuple[int, ...], dim: int | None, device: str) -> torch.Tensor:
    """A tensor of that shape with a batch dimension at `dim`."""
    if dim is None:
        return make(shape, device)
    return make((*shape[:dim], BATCH, *shape[dim:]), device)


def dims_of(shape: tuple[int, ...] | None) -> list[int | None]:
    return [None] if shape is None else [None, *range(len(shape) + 1)]


@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize("shapes", MATMUL_SHAPES, ids=lambda pair: "@".join(map(ids, pair)))
def test_vmap_of_matmul(shapes, grad, device):
    with torch.set_grad_enabled(grad):
        for dims in itertools.product(*map(dims_of, shapes)):
            if dims == (None, None):
                continue
            a, b = (batched(s, d, device) for s, d in zip(shapes, dims, strict=True))
            assert_near(vmap(matmul, dims)(a, b), vmap(torch.matmul, dims)(a, b))


@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize("shapes", LINEAR_SHAPES, ids=lambda three: ",".join(map(ids, three)))
def test_vmap_of_linear(shapes, grad, device):
    with torch.set_grad_enabled(grad):
        for dims in itertools.product(*map(dims_of, shapes)):
            if dims == (None, None, None):
                continue
            args = [
                None if s is None else batched(s, d, device)
                for s, d in zip(shapes, dims, strict=True)
            ]
            expected = vmap(lambda x, w, b: reference_linear(x, w, b), dims)(*args)
            assert_near(vmap(linear, dims)(*args), expected)
            if shapes[2] is None:
                assert_near(vmap(linear, dims[:2])(*args[:2]), expected)


def test_vmap_options(device):
    a, b = make((2, 3, BATCH), device), make((BATCH, 3, 4), device)
    expected = vmap(torch.matmul, (-1, 0), out_dims=1)(a, b)
    assert_near(vmap(matmul, (-1, 0), out_dims=1)(a, b), expected)
    assert_near(vmap(matmul, (-1, 0), out_dims=1, chunk_size=2)(a, b), expected)


def test_a_bias_to_each_batch_is_added_after_rounding_as_torch_does(device):
    x = torch.full((2, 3, 64), 200.0, dtype=torch.float16, device=device)
    weight = torch.full((4, 64), 4.0, dtype=torch.float16, device=device)
    bias = torch.tensor([[24.0], [-24.0]], dtype=torch.float16, device=device).expand(2, 4)
    dims = (0, None, 0)
    result = vmap(linear, dims)(x, weight, bias)
    expected = vmap(reference_linear, dims)(x, weight, bias)
    torch.testing.assert_close(result, expected, rtol=0, atol=0)


def test_nested_vmap(device):
    a, b = make((2, 5, 3), device), make((4, 3, 5), device)
    for op in (matmul, lambda x, y: linear(x, y)):
        first = make((4, 7, 3), device) if op is not matmul else a
        second = make((6, 5, 3), device) if op is not matmul else b
        stock = reference_linear if op is not matmul else torch.matmul
        result = vmap(lambda x: vmap(lambda y: op(x, y))(second))(first)  # noqa: B023
        expected = vmap(lambda x: vmap(lambda y: stock(x, y))(second))(first)  # noqa: B023
        assert_near(result, expected)


@pytest.mark.parametrize(
    ("shapes", "dims", "product"),
    [
        (((3, 2), (2, 4)), (0, None), ((3, 2), (2, 4))),  # rows: one matrix product
        (((3, 5, 2), (2, 4)), (0, None), ((3, 5, 2), (2, 4))),
        (((5, 2), (2, 3)), (None, 1), ((5, 2), (2, 3))),  # columns: one matrix product
        (((3, 5, 2), (3, 2, 4)), (0, 0), ((3, 5, 2), (3, 2, 4))),
        (((5, 2), (3, 2, 4)), (None, 0), ((1, 5, 2), (3, 2, 4))),
    ],
)
def test_a_batch_is_one_product(shapes, dims, product, device):
    a, b = make_all(shapes, device)
    with RecordedOps() as ops, torch.no_grad():
        vmap(matmul, dims)(a, b)
    assert [shapes for _, *shapes in ops.ours] == [[*product]]


def test_a_batch_of_inputs_is_one_linear(device):
    x, w, bias = make_all(((5, BATCH, 3), (4, 3), (4,)), device)
    with RecordedOps() as ops, torch.no_grad():
        vmap(linear, (1, None, None))(x, w, bias)
    assert [shapes for _, *shapes in ops.ours] == [[(BATCH, 5, 3), (4, 3), (4,)]]


@pytest.mark.parametrize("grad", [False, True])
def test_mistakes_under_vmap_show_the_shapes_that_the_function_sees(grad, device):
    a, b = make((BATCH, 2, 3), device), make((BATCH, 4, 5), device)
    message = r"torch_cubin \[input\]: matmul shapes \(2, 3\) and \(4, 5\) cannot be multiplied"
    with torch.set_grad_enabled(grad), pytest.raises(RuntimeError, match=message):
        vmap(matmul)(a, b)
    scalars = make((BATCH,), device)
    with torch.set_grad_enabled(grad), pytest.raises(RuntimeError, match=r"\[input\].*0-dim"):
        vmap(matmul)(scalars, a)
    bias = make((BATCH, 7), device)
    with torch.set_grad_enabled(grad), pytest.raises(RuntimeError, match=r"\[input\].*'bias'"):
        vmap(linear, (0, None, 0))(a, make((4, 3), device), bias)
