"""Calls of declared ops on a GPU: every kind of argument and output, and wrong calls.

The kernels are those of tests/data/declared.cu and launch.cu, whose cubins are for compute
capability 9.0. What PyTorch does with such ops: test_cuda_define_op_torch.py.
"""

from __future__ import annotations

import ctypes

import pytest
import torch
from declared import (
    DECLARED,
    LAUNCH,
    affine,
    axpy,
    blocks,
    copy_dense,
    misaligned,
    repeat,
    schema,
    small,
    vec_add,
)
from gpu import hopper

import torch_cubin
from torch_cubin import errors
from torch_cubin import int32 as i32

pytestmark = hopper.for_cubins


@pytest.fixture(scope="module")
def add() -> torch_cubin.Op:
    return vec_add()


@pytest.mark.parametrize("shape", [(), (1,), (255,), (1000,), (3, 5, 7), (100_003,), (0,), (4, 0)])
def test_vec_add(add, nan_memory, shape: tuple[int, ...]) -> None:
    x, y = small(*shape), small(*shape)
    out = add(x, y)
    assert torch.equal(out, x + y)
    assert out.is_contiguous()
    assert torch.equal(getattr(torch.ops, add.name.split("::")[0]).vec_add(x, y=y), x + y)


WRONG_CALLS = {
    "fp16": (lambda x, y: (x.half(), y), "float32"),
    "fp16 second": (lambda x, y: (x, y.half()), "'y'"),
    "strided": (lambda x, y: (x.mT.contiguous().mT, y), "contiguous"),
    "every second": (lambda x, y: (x[:, ::2], y[:, ::2]), "contiguous"),
    "shorter": (lambda x, y: (x, y[:4]), "'y'"),
    "longer": (lambda x, y: (x[:4], y), "'y'"),
    "of other dims": (lambda x, y: (x, y.view(-1)), "'y'"),
    "expanded": (lambda x, y: (x, y[:1].expand(8, 8)), "contiguous"),
    "misaligned": (lambda x, y: (x, misaligned(8, 8, device="cuda")), "16"),
    "cpu": (lambda x, y: (x.cpu(), y), "'x'"),
    "cpu second": (lambda x, y: (x, y.cpu()), "'y'"),
    "requires grad": (lambda x, y: (x.requires_grad_(), y), "no derivative"),
}


@pytest.mark.parametrize("case", WRONG_CALLS)
def test_wrong_calls(add, case: str) -> None:
    arguments, says = WRONG_CALLS[case]
    x, y = small(8, 8), small(8, 8)
    before = torch_cubin._native.library.launches()
    given = arguments(x, y)
    with pytest.raises(errors.InputError, match=r"torch_cubin \[input\]") as caught:
        add(*given)
    assert says in str(caught.value)
    with pytest.raises(RuntimeError, match=r"torch_cubin \[input\]"):
        add.overload(*given)
    assert add.name in str(caught.value)
    assert torch_cubin._native.library.launches() == before
    assert torch.equal(add(y, y), 2 * y)


def test_cpu_tensors_without_a_cpu_function() -> None:
    op = vec_add(cpu=None)
    with pytest.raises(errors.InputError, match="cuda, got cpu"):
        op(torch.ones(3), torch.ones(3))


@pytest.mark.gpu(2)
def test_two_devices(add) -> None:
    for device in ("cuda:0", "cuda:1"):
        x = torch.ones(1000, device=device)
        out = add(x, x)
        assert out.device == x.device
        assert torch.equal(out, 2 * x)
    with pytest.raises(RuntimeError, match=r"\[input\].*another device"):
        add(torch.ones(3, device="cuda:0"), torch.ones(3, device="cuda:1"))


def test_the_tensors_stream(add) -> None:
    x = small(1 << 20)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        torch.cuda._sleep(10_000_000)
        y = x * 2
        out = add(x, y)
    stream.synchronize()
    assert torch.equal(out, 3 * x)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "int32", "int64"])
def test_a_variable_picks_the_kernel(dtype: str) -> None:
    op = torch_cubin.define_op(
        schema("copy(Tensor x) -> Tensor"),
        kernels=[
            torch_cubin.KernelChoice((DECLARED, "copy_16"), when=lambda x: x.element_size() == 2),
            torch_cubin.KernelChoice((DECLARED, "copy_32"), when=lambda x: x.itemsize == 4),
        ],
        dtypes={"T": ["float16", torch.bfloat16, "float32", "int32", "int64"]},
        tensors={"x": "T[*s]", "out": "T[*s]"},
        args=lambda x, out: (x, out, x.numel()),
        grid=blocks,
        block=256,
    )
    x = small(3, 100).to(getattr(torch, dtype))
    if dtype == "int64":
        with pytest.raises(RuntimeError, match=r"\[input\].*no kernel"):
            op(x)
        return
    assert torch.equal(op(x), x)
    with pytest.raises(RuntimeError, match=r"\[input\]"):
        op(x.double())


def test_every_kind_of_number() -> None:
    op = affine()
    x, bias = small(5, 7), small(5, 7)
    assert torch.equal(op(x, None, 2.0), 2 * x)
    assert torch.equal(op(x, bias, 0.5, -3), x / 2 - 3 + bias)
    assert torch.equal(op(x, bias, 1.0, relu=True), (x + bias).relu())
    assert torch.equal(op(x, None, 1.0, mode="negative"), -x)
    assert torch.equal(op(x, None, 1.0, mode="other", dtype=torch.float16), x + 100)
    with pytest.raises(RuntimeError, match=r"\[input\].*'bias'"):
        op(x, bias[:3], 1.0)
    with pytest.raises(RuntimeError, match=r"\[(input|params)\]"):
        op(x, None, 1.0, 2**40)


@pytest.mark.parametrize("count", [2, 3])
def test_lists(count: int) -> None:
    op = torch_cubin.define_op(
        schema("total(Tensor[] xs) -> Tensor"),
        kernels=[
            torch_cubin.KernelChoice(
                (DECLARED, "add_two"),
                when=lambda xs: torch_cubin.length(xs) == 2,
                args=lambda xs, out: (xs[0], xs[1], out, i32(xs[0].shape[0])),
            ),
            torch_cubin.KernelChoice(
                (DECLARED, "add_three"),
                when=lambda xs: torch_cubin.length(xs) == 3,
                args=lambda xs, out: (xs[0], xs[1], xs[2], out, i32(xs[0].numel())),
            ),
        ],
        tensors={
            "xs": "float32[n]",
            "out": lambda xs: torch_cubin.empty(xs[0].shape[0], "float32"),
        },
        grid=lambda xs: torch_cubin.cdiv(xs[0].numel(), 128),
        block=128,
    )
    xs = [small(1000) for _ in range(count)]
    assert torch.equal(op(xs), sum(xs))
    with pytest.raises(RuntimeError, match=r"\[input\]"):
        op(xs[:1])
    with pytest.raises(RuntimeError, match=r"\[input\]"):
        op([*xs[1:], xs[0].half()])
    with pytest.raises(RuntimeError, match="torch_cubin|xs"):
        op([])


def test_several_outputs_of_rows_that_lie_apart() -> None:
    op = torch_cubin.define_op(
        schema("limits(Tensor x) -> (Tensor least, Tensor largest)"),
        kernel=(DECLARED, "row_limits"),
        tensors={"x": "float32[m, k] rows align=4", "least": "float32[m]", "largest": "float32[m]"},
        args=lambda x, least, largest, m, k: (x, x.stride(0), least, largest, i32(m), i32(k)),
        grid=lambda m: torch_cubin.cdiv(m, 64),
        block=64,
    )
    for x in (small(300, 20), small(300, 50)[:, 3:20], misaligned(9, 5, device="cuda")):
        least, largest = op(x)
        assert torch.equal(least, x.amin(1))
        assert torch.equal(largest, x.amax(1))
    with pytest.raises(RuntimeError, match=r"\[input\]"):
        op(small(20, 300).mT)


def test_scratch() -> None:
    op = torch_cubin.define_op(
        schema("total(Tensor x) -> Tensor"),
        kernel=(DECLARED, "sum_through"),
        tensors={"x": "float32[n]", "out": "float32[]"},
        scratch={"partial": "float32[max(n // 8, 128)]"},
        args=lambda x, partial, out, n: (x, partial, out, i32(n)),
        grid=1,
        block=128,
    )
    for n in (1, 127, 5000):
        x = small(n)
        out = op(x)
        assert out.shape == ()
        assert out == x.sum()


def test_arithmetic_in_shapes() -> None:
    op = repeat()
    x = small(37, 11)
    assert torch.equal(op(x), x.repeat(1, 2))
    assert torch.equal(op(op(x)), x.repeat(1, 4))


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 0, 1), (1, 2, 0)])
def test_outputs_like_an_argument(order: tuple[int, ...]) -> None:
    op = copy_dense()
    x = small(3, 4, 5).permute(order)
    out = op(x)
    assert out.stride() == x.stride()
    assert torch.equal(out, x)
    with pytest.raises(RuntimeError, match=r"\[input\]"):
        op(small(8, 8)[:, ::2])


def test_mutated_arguments_bump_the_version() -> None:
    op = axpy()
    x, y = small(100), small(100)
    wanted, before = y + 2 * x, y._version
    assert op(x, y, 2.0) is None
    assert torch.equal(y, wanted)
    assert y._version == before + 1
    leaf = small(100).requires_grad_()
    saved = leaf * 1
    square = saved * saved
    with torch.no_grad():
        op(x, saved, 1.0)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        square.sum().backward()
    with pytest.raises(RuntimeError, match="no derivative"):
        op(x, leaf, 1.0)
    compiled = torch.compile(lambda x, y: (op(x, y, 1.0), y * 2)[1], fullgraph=True)
    y = small(100)
    wanted = 2 * (x + y)
    assert torch.equal(compiled(x, y), wanted)
    assert torch.equal(2 * y, wanted)


class Scale(ctypes.Structure):
    _fields_ = (
        ("factor", ctypes.c_float),
        ("offset", ctypes.c_int32),
        ("shift", ctypes.c_double),
        ("sign", ctypes.c_int8),
    )


def test_a_struct_by_value() -> None:
    op = torch_cubin.define_op(
        schema("scale(Tensor x, float factor, int offset) -> Tensor"),
        kernel=(LAUNCH, "scale"),
        tensors={"x": "float32[n]", "out": "float32[n]"},
        args=lambda x, out, factor, offset, n: (
            torch_cubin.struct(Scale, factor=factor, offset=offset, shift=0.5, sign=-1),
            x,
            out,
            i32(n),
        ),
        grid=blocks,
        block=256,
    )
    x = small(1000)
    assert torch.equal(op(x, 2.0, 3), -(2 * x + 3.5))


def test_a_tensor_map() -> None:
    op = torch_cubin.define_op(
        schema("box(Tensor x, int row, int column) -> Tensor"),
        kernel=(LAUNCH, "tma_box"),
        tensors={"x": "float32[m, n] rows", "out": torch_cubin.empty((8, 16), "float32")},
        args=lambda x, out, row, column: (
            torch_cubin.TensorMap(x, box=(8, 16)),
            i32(row),
            i32(column),
            i32(128),
            out,
        ),
        grid=1,
        block=128,
    )
    x = small(100, 64)
    assert torch.equal(op(x, 10, 20), x[10:18, 20:36])
    wide = small(100, 128)[:, 4:68]
    assert torch.equal(op(wide, 92, 48), wide[92:100, 48:64])
    beyond = op(x, 96, 56)
    assert torch.equal(beyond[:4, :8], x[96:, 56:])
    assert not beyond[4:].any()
    with pytest.raises(RuntimeError, match=r"\[input\]"):
        op(small(100, 63), 0, 0)  # rows that are not multiples of 16 bytes


def test_cooperative_grids_and_clusters() -> None:
    op = torch_cubin.define_op(
        schema("ranks(Tensor x, int blocks) -> Tensor"),
        kernel=(LAUNCH, "cluster_ranks"),
        tensors={"x": "float32", "out": "int32[blocks]"},
        args=lambda out: (out,),
        grid=lambda blocks: blocks,
        block=32,
        cluster=(4, 1, 1),
    )
    x = small(1)
    wanted = torch.arange(16, device="cuda", dtype=torch.int32) % 4 + 400
    assert torch.equal(op(x, 16), wanted)
    with pytest.raises(RuntimeError, match=r"\[(launch|input)\]"):
        op(x, 15)
    together = torch_cubin.define_op(
        schema("together(Tensor(a!) arrived, int blocks) -> (Tensor parts, Tensor out)"),
        kernel=(LAUNCH, "grid_sum"),
        tensors={"arrived": "int32[1]", "parts": "int32[blocks]", "out": "int32[blocks]"},
        args=lambda arrived, parts, out: (arrived, parts, out),
        grid=lambda blocks: blocks,
        block=32,
        cooperative=True,
    )
    arrived = torch.zeros(1, dtype=torch.int32, device="cuda")
    _, out = together(arrived, 8)
    assert out.tolist() == [36] * 8
    with pytest.raises(RuntimeError, match=r"\[launch\]"):
        together(arrived, 1 << 20)


def test_empty_grids() -> None:
    op = torch_cubin.define_op(
        schema("fill(Tensor x) -> Tensor"),
        kernel=(DECLARED, "fill_64"),
        tensors={"x": "float32[n]", "out": "float32[n + 1]"},
        args=lambda out, n: (out, i32(n)),
        grid=lambda n: torch_cubin.cdiv(n, 64),
    )
    assert op(small(100))[:100].eq(64).all()
    with pytest.raises(RuntimeError, match=r"\[input\].*empty grid"):
        op(small(0))  # an output with an element that nothing would write


def test_the_device_in_expressions() -> None:
    op = torch_cubin.define_op(
        schema("copy(Tensor x) -> Tensor"),
        kernels=[
            torch_cubin.KernelChoice((DECLARED, "copy_32"), when=lambda sm: sm < 90, grid=1),
            torch_cubin.KernelChoice(
                (DECLARED, "copy_32"),
                when=lambda multiprocessors: multiprocessors > 1,
                grid=lambda x, multiprocessors: torch_cubin.maximum(multiprocessors, blocks(x)),
            ),
        ],
        tensors={"x": "float32[n]", "out": "float32[n]"},
        args=lambda x, out: (x, out, x.numel()),
        block=256,
    )
    x = small(100_000)
    assert torch.equal(op(x), x)
