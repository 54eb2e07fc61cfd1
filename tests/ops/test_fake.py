"""Fake kernels: the same shapes, strides and messages as the real ones, without data."""

from __future__ import annotations

import random

import pytest
import torch
from ops.samples import (
    DTYPES,
    LINEAR_SHAPES,
    MATMUL_SHAPES,
    linear,
    make_all,
    matmul,
    random_layout,
    random_linear_shapes,
    random_matmul_shapes,
)
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv


def facts(tensor: torch.Tensor) -> tuple:
    return tuple(tensor.shape), tensor.stride(), tensor.storage_offset(), tensor.dtype


def as_meta(tensor: torch.Tensor | None) -> torch.Tensor | None:
    if tensor is None:
        return None
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")


@pytest.mark.parametrize("grad", [False, True])
def test_fake_and_real_agree_on_ten_thousand_layouts(grad, device):
    for seed in range(5000):
        rng = random.Random(f"{grad}{seed}")
        dtype = rng.choice(DTYPES)
        op = matmul if seed % 2 else linear
        shapes = random_matmul_shapes(rng) if seed % 2 else random_linear_shapes(rng)
        args = [None if s is None else random_layout(rng, s, dtype, device) for s in shapes]
        with torch.set_grad_enabled(grad):
            real, fake = op(*args), op(*map(as_meta, args))
        assert facts(real) == facts(fake), f"seed {seed}: {op}, {shapes}"


@pytest.mark.parametrize("grad", [False, True])
def test_fake_tensors(grad, device):
    for op, cases in ((matmul, MATMUL_SHAPES), (linear, LINEAR_SHAPES)):
        for shapes in cases:
            args = make_all(shapes, device, requires_grad=grad)
            real = op(*args)
            with FakeTensorMode() as mode:
                fake = op(*(None if a is None else mode.from_tensor(a) for a in args))
            assert facts(real) == facts(fake)
            assert real.device == fake.device
            assert real.requires_grad == fake.requires_grad


def test_meta_tensors_and_their_gradients():
    for op, cases in ((matmul, MATMUL_SHAPES), (linear, LINEAR_SHAPES)):
        for shapes in cases:
            args = make_all(shapes, "meta", requires_grad=True)
            out = op(*args)
            assert out.is_meta
            out.backward(torch.empty_like(out))
            for arg in args:
                assert arg is None or arg.grad.shape == arg.shape


def symbolic(mode: FakeTensorMode, args: list) -> list:
    from torch.fx.experimental.symbolic_shapes import DimDynamic, StatelessSymbolicContext

    return [
        None
        if arg is None
        else mode.from_tensor(
            arg,
            symbolic_context=StatelessSymbolicContext([DimDynamic.DYNAMIC] * arg.dim()),
        )
        for arg in args
    ]


def test_symbolic_sizes(device):
    for op, cases in ((matmul, MATMUL_SHAPES), (linear, LINEAR_SHAPES)):
        for shapes in cases:
            if any(size < 2 for shape in shapes if shape is not None for size in shape):
                continue  # torch makes no symbols of 0 and 1
            args = make_all(shapes, device)
            with FakeTensorMode(shape_env=ShapeEnv()) as mode:
                fake = op(*symbolic(mode, args))
            assert [int(size) for size in fake.shape] == list(op(*args).shape)
            assert fake.is_contiguous()
            assert fake.dim() == 0 or not all(isinstance(size, int) for size in fake.shape)


def test_data_dependent_sizes():
    """Unbacked symbols: the check becomes one at run time instead of an error now."""

    with FakeTensorMode(shape_env=ShapeEnv()) as mode:
        rows = mode.shape_env.create_unbacked_symint()
        torch._check(rows >= 2)
        out = matmul(torch.empty(rows, 3), torch.empty(3, 4))
        assert out.shape[0] is rows or out.shape[0] == rows
        out = linear(torch.empty(rows, 3), torch.empty(4, 3), torch.empty(4))
        assert out.shape[1] == 4


def message(op, args) -> str:
    with pytest.raises(RuntimeError) as caught:
        op(*args)
    return str(caught.value).replace("meta", "cpu").split("\n\nAt:")[0].strip()


WRONG_SHAPES = [
    (matmul, ((2, 3), (2, 3))),
    (matmul, ((3,), (2,))),
    (matmul, ((2, 3), (4,))),
    (matmul, ((3,), (2, 4, 3))),
    (matmul, ((), (3,))),
    (matmul, ((2, 3), ())),
    (matmul, ((2, 4, 3), (3, 3, 4))),
    (matmul, ((5, 2, 4, 3), (4, 3, 4, 4))),
    (matmul, ((5, 2, 4, 3), (4, 3, 3, 4))),
    (linear, ((2, 3), (3, 4), None)),
    (linear, ((3,), (4,), None)),
    (linear, ((), (3,), None)),
    (linear, ((2, 3), (), None)),
    (linear, ((2, 3), (2, 4, 3), None)),
    (linear, ((2, 3), (4, 3), (3,))),
    (linear, ((2, 3), (4, 3), (2, 4))),
    (linear, ((2, 3), (3,), (1,))),
    (matmul, ((1,) * 65, (1,) * 2)),
    (matmul, ((1,), (1,) * 72)),
    (linear, ((1,) * 72, (1, 1), None)),
    (linear, ((1, 1), (1,) * 72, None)),
    (linear, ((1, 1), (1, 1), (1,) * 65)),
]


@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize(("op", "shapes"), WRONG_SHAPES, ids=lambda value: str(value))
def test_fake_and_real_refuse_alike(op, shapes, grad):
    with torch.set_grad_enabled(grad):
        real = message(op, make_all(shapes, "cpu"))
        assert real.startswith("torch_cubin [input]: ")
        assert message(op, make_all(shapes, "meta")) == real


@pytest.mark.parametrize(
    "dtypes",
    [
        (torch.int64,) * 2,
        (torch.float32, torch.float64),
        (torch.float8_e4m3fnuz,) * 2,
        (torch.float8_e8m0fnu,) * 2,
    ],
    ids=str,
)
def test_fake_and_real_refuse_the_same_dtypes(dtypes):
    a, b = (torch.ones(2, 2, dtype=dtype) for dtype in dtypes)
    assert message(matmul, (a, b)) == message(matmul, (as_meta(a), as_meta(b)))
    assert message(linear, (a, b)) == message(linear, (as_meta(a), as_meta(b)))


# Quantised tensors are a backend of their own: torch refuses them before any kernel runs.
DTYPES_OF_TORCH = sorted(
    {
        dtype
        for name, dtype in vars(torch).items()
        if isinstance(dtype, torch.dtype) and not name.startswith(("qint", "quint"))
    },
    key=str,
)


@pytest.mark.filterwarnings("ignore:ComplexHalf")
@pytest.mark.parametrize("dtype", DTYPES_OF_TORCH, ids=str)
def test_a_refused_dtype_has_torchs_name(dtype):
    x = torch.empty(2, 2, dtype=dtype, device="meta")
    if dtype in DTYPES:
        assert matmul(x, x).dtype == dtype
    else:
        assert f"got {str(dtype).removeprefix('torch.')}. " in message(matmul, (x, x))
