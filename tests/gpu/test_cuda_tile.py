"""Ops of the kernels of cuTile (tests/data/make_tile.py) and CuTe DSL on a GPU."""

from __future__ import annotations

import ctypes
import itertools
from pathlib import Path

import pytest
import torch

import torch_cubin
import torch_cubin.producers.tile as tile
from torch_cubin import errors

DATA = Path(__file__).resolve().parents[1] / "data" / "tile"
names = itertools.count()
VECTORS = {"x": "float32[n]", "y": "float32[n]", "out": "float32[n]"}

pytestmark = pytest.mark.skipif(
    torch.cuda.is_available() and torch.cuda.get_device_capability() != (9, 0),
    reason="kernels of tests/data/tile are for compute capability 9.0",
)


def define_add(*files: str) -> torch_cubin.Op:
    return tile.define_op(
        f"cuda_tile::add{next(names)}(Tensor x, Tensor y) -> Tensor",
        [DATA / file for file in files], tensors=VECTORS, args=("x", "y", "out", 1024),
        grid=lambda n: torch_cubin.cdiv(n, 1024),
    )  # fmt: skip


@pytest.mark.parametrize("n", [1, 1000, 4096, 5000, 1 << 20])
def test_add(n: int) -> None:
    op = define_add("add.sm_80.cubin", "add.sm_90.cubin", "add_const.sm_90.cubin")
    x, y = torch.randn(2, n, device="cuda").unbind()
    y = y.clone()  # at an aligned address
    assert torch.equal(op(x, y), x + y)


@pytest.mark.parametrize("n", [16, 1024, 4000, 8192])
def test_clusters_of_two(n: int) -> None:
    """Every element: a grid without the cluster's factor gives half of them."""
    op = define_add("add2.sm_90.cubin")
    x, y = torch.randn(n, device="cuda"), torch.randn(n, device="cuda")
    out = op(x, y)
    assert torch.equal(out, x + y)


def test_arguments_that_were_constant_are_checked() -> None:
    """Without the check, the kernel for 4,096 elements would give 4,096 results of 5,000."""
    op = define_add("add_const.sm_90.cubin")
    x = torch.randn(4096, device="cuda")
    assert torch.equal(op(x, x), 2 * x)
    with pytest.raises(errors.InputError, match="4096"):
        op(*torch.randn(2, 5000, device="cuda"))


def test_strides_and_scalars() -> None:
    op = tile.define_op(
        f"cuda_tile::scale{next(names)}(Tensor x, float by) -> Tensor", DATA / "scale.sm_90.cubin",
        tensors={"x": "float32[m, n] rows", "out": "float32[m, n]"},
        args=("x", "out", "by", 32),
        grid=(lambda m: torch_cubin.cdiv(m, 32), lambda n: torch_cubin.cdiv(n, 32)),
    )  # fmt: skip
    base = torch.randn(100, 72, device="cuda")
    for x in (base, base[:, :50], base[3:70, 4:60]):
        assert torch.equal(op(x, 0.5), x * 0.5)
    with pytest.raises(errors.InputError, match="a multiple of 4"):
        op(torch.randn(8, 71, device="cuda"), 0.5)
    torch.library.opcheck(op.overload, (base, 2.0))


@pytest.mark.parametrize("n", [1, 255, 5000])
def test_cute_dsl(n: int) -> None:
    """CuTe DSL's kernel of docs/producers.md, whose tensors are structs by value."""

    class Array(ctypes.Structure):
        _fields_ = [("data", ctypes.c_void_p), ("size", ctypes.c_int32)]

    op = torch_cubin.define_op(
        f"cuda_tile::cute{next(names)}(Tensor x, Tensor y) -> Tensor",
        kernels=torch_cubin.choices(DATA / "cute_add.sm_90a.cubin"), tensors=VECTORS,
        args=lambda x, y, out, n: [
            torch_cubin.struct(Array, data=tensor, size=n) for tensor in (x, y, out)
        ],
        grid=lambda n: torch_cubin.cdiv(n, 256),
    )  # fmt: skip
    x, y = torch.randn(n, device="cuda"), torch.randn(n, device="cuda")
    assert torch.equal(op(x, y), x + y)
