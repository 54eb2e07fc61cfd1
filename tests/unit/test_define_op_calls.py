"""Calls of declared ops that would cost memory or derivatives, and finer points of definitions.

On the CPU and with meta tensors; csrc/declared says the same of CUDA tensors.
"""

from __future__ import annotations

import ctypes
import shutil
import struct

import pytest
import torch
from declared import DATA, DECLARED, LAUNCH, VEC_ADD, cube, schema, vec_add
from torch.autograd import forward_ad
from torch.func import jvp

import torch_cubin
from torch_cubin import errors
from torch_cubin._declared import contract
from torch_cubin._declared import signature as _signature


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_none_for_a_tensor_that_a_call_must_give(device: str) -> None:
    op = vec_add()
    with pytest.raises(errors.InputError, match=f"op '{op.name}' argument 'y' is missing"):
        op(torch.ones(3, device=device), None)


def test_a_dtype_variable_is_one_dtype_in_a_call() -> None:
    op = torch_cubin.define_op(
        schema("f(Tensor x, Tensor[] xs, Tensor? a, Tensor? b) -> Tensor"),
        kernel=(LAUNCH, "vec_add"),
        dtypes={"T": ["float16", "float32"]},
        tensors={"x": "int8[m]", "xs": "T[n]", "a": "T", "b": "T", "out": "float32[m]"},
        args=lambda xs, out: (xs[0], xs[1], out, torch_cubin.int32(1)),
        grid=1,
        block=32,
        cpu=lambda x, xs, a, b: torch.zeros(x.shape),
    )
    x, single = torch.zeros(3, dtype=torch.int8), torch.zeros(4)
    half = single.half()
    assert op(x, [single, torch.zeros(5)], single, single).shape == (3,)  # sizes are each item's
    assert op(x, [half, half], None, half).shape == (3,)
    for xs, a, b in (
        ([single, half], None, None),
        ([single], half, None),
        ([], single, half),
    ):
        with pytest.raises(errors.InputError, match="has another dtype"):
            op(x, xs, a, b)


@pytest.fixture(scope="module")
def double() -> torch_cubin.Op:
    return torch_cubin.define_op(
        schema("double_(Tensor(a!) x) -> ()"),
        kernel=(DECLARED, "cube"),
        tensors={"x": "float32[m, n] strided"},
        args=lambda x, m: (x, x, torch_cubin.int32(m)),
        grid=1,
        block=32,
        cpu=lambda x: [x.mul_(2)][1:] or None,
    )


OVERLAPPING = [
    torch.ones(8).as_strided((4, 5), (1, 1)),
    torch.ones(40).as_strided((8, 4), (2, 1)),
    torch.ones(1, 5).expand(4, 5),
    torch.ones(()).expand(2, 2),
]


@pytest.mark.parametrize("tensor", OVERLAPPING, ids=lambda tensor: str(tensor.stride()))
def test_a_tensor_that_overlaps_itself_is_not_written(double, tensor) -> None:
    for device in ("cpu", "meta"):
        given = (
            tensor
            if device == "cpu"
            else torch.empty_strided(tensor.shape, tensor.stride(), device="meta")
        )
        with pytest.raises(errors.InputError, match="overlaps itself, and the op writes to it"):
            double(given)
    assert tensor.eq(1).all()


def test_a_tensor_with_gaps_is_written(double) -> None:
    base = torch.ones(6, 8)
    for view in (base[::2, ::2], base.mT, base[:1].mT, torch.ones(1, 5).expand(1, 5), base[:0]):
        before = view.clone()
        double(view)
        assert torch.equal(view, 2 * before)
    compiled = torch.compile(double, fullgraph=True, dynamic=True, backend="eager")
    for shape in ((4, 5), (6, 7)):
        view = torch.ones(shape).mT
        compiled(view)
        assert view.eq(2).all()


@pytest.mark.parametrize("offset", [0, 1])
def test_a_tensor_without_memory(offset: int) -> None:
    op, gone = cube(), torch.ones(5)[offset:]
    gone.untyped_storage().resize_(0)
    with pytest.raises(errors.InputError, match="has elements but no memory"):
        op(gone)


def test_no_call_in_a_forward_mode_level() -> None:
    x = torch.ones(3)
    with_formula = cube()
    with_formula.register_autograd(lambda ctx, grad: grad)
    for op in (cube(), with_formula):
        with forward_ad.dual_level():
            dual = forward_ad.make_dual(x, x)
            for given in (dual, x, x.clone().requires_grad_()):
                with torch.no_grad(), pytest.raises(errors.InputError, match="forward-mode level"):
                    op(given)
            with pytest.raises(errors.InputError, match="has no derivative"):
                op(dual)
            with pytest.raises(errors.InputError, match="forward-mode level"):
                op(torch.empty(3, device="meta"))
        for function in (op, lambda x, op=op: x * op(torch.ones(3))):
            with pytest.raises(errors.InputError, match="has no derivative"):
                jvp(function, (x,), (x,))
        assert torch.equal(op(x), x)


def test_outputs_of_a_cpu_function_share_no_memory() -> None:
    op = torch_cubin.define_op(
        schema("twice(Tensor x) -> (Tensor a, Tensor b)"),
        kernel=(LAUNCH, "vec_add"),
        tensors=dict.fromkeys(("x", "a", "b"), "float32[*s]"),
        args=lambda x, a, b: (x, a, b, torch_cubin.int32(1)),
        grid=1,
        block=32,
        cpu=lambda x: [x + 1] * 2,
    )
    a, b = op(torch.ones(3))
    a.zero_()
    assert torch.equal(b, torch.full((3,), 2.0))


def test_sets_of_dtypes_have_an_order() -> None:
    signature = _signature.parse("mylib::f(Tensor x) -> Tensor")
    builder = contract.Builder(signature, {"T": {"int8", torch.float16, "float32", "bfloat16"}})
    assert builder.dtypes == {"T": ["bfloat16", "float16", "float32", "int8"]}


def test_outputs_may_ask_numbers_of_any_type() -> None:
    select = torch_cubin.select
    op = torch_cubin.define_op(
        schema("f(Tensor x, int n, float f, bool wide) -> (Tensor a, Tensor b)"),
        kernel=(LAUNCH, "vec_add"),
        tensors={
            "x": "float32[m]",
            "a": lambda n, f: torch_cubin.empty((select(n == f, 1, 2),), "float32"),
            "b": lambda x, wide: torch_cubin.empty(select(wide, 2, 1) * x.shape[0], "float32"),
        },
        args=lambda x, a, b: (x, a, b, torch_cubin.int32(1)),
        grid=1,
        block=32,
    )
    x = torch.empty(3, device="meta")
    assert [out.shape for out in op(x, 2, 2.0, True)] == [(1,), (6,)]
    assert [out.shape for out in op(x, 2**53 + 1, 2.0**53, False)] == [(2,), (3,)]
    for size in ("2 * f", "2 * wide", "f // 2"):
        with pytest.raises(
            errors.InputError, match="expected (an integer|numbers for|integers for)"
        ):
            torch_cubin.define_op(
                schema("f(Tensor x, float f, bool wide) -> Tensor"),
                **{
                    **VEC_ADD,
                    "tensors": {"x": "float32[m]", "out": f"float32[{size}]"},
                    "args": ("x", "x", "out", 1),
                },
            )


class Base(ctypes.Structure):
    _fields_ = (("n", ctypes.c_int32),)


class Derived(Base):
    _fields_ = (("factor", ctypes.c_float),)


class Swapped(ctypes.BigEndianStructure):
    _fields_ = (("n", ctypes.c_int32),)


def test_structs_have_the_fields_of_their_bases() -> None:
    made = torch_cubin.struct(Derived, n=7, factor=1.5)
    assert (made.size, made.members) == (8, [(0, ["int32", 7]), (4, ["float32", 1.5])])
    with pytest.raises(errors.InputError, match="no value for the field 'n'"):
        torch_cubin.struct(Derived, factor=1.5)
    with pytest.raises(errors.InputError, match="byte order"):
        torch_cubin.struct(Swapped, n=7)
    numpy = pytest.importorskip("numpy")
    with pytest.raises(errors.InputError, match="another type"):
        torch_cubin.struct(numpy.dtype([("n", ">i4")]), n=7)
    assert struct.unpack("<i", bytes(Base(7))) == (7,)


def test_a_tensor_map_of_a_cpu_tensor_is_refused_when_it_is_made() -> None:
    for tensor in (torch.empty(8, 16), torch.empty(8, 16, device="meta")):
        with pytest.raises(errors.InputError, match=f"expected a cuda tensor, got {tensor.device}"):
            torch_cubin.TensorMap(tensor, (8, 16))


def test_tensor_maps_take_any_stride_of_a_dim_of_size_1(monkeypatch) -> None:
    monkeypatch.setattr(torch_cubin._kernels.tensor_map, "DEVICE_TYPES", ("cpu",))
    storage = torch.empty(4096 + 8)
    start = (-storage.data_ptr() // 4) % 8
    odd = storage[start:].as_strided((1, 4, 16), (7, 16, 1))
    torch_cubin.TensorMap(odd, box=(1, 4, 16))
    torch_cubin.TensorMap(odd.as_strided((1, 4, 16), (320, 16, 1)), box=(1, 4, 16))
    with pytest.raises(errors.InputError, match="dim 0"):
        torch_cubin.TensorMap(odd.as_strided((2, 4, 16), (7, 16, 1)), box=(1, 4, 16))


def test_a_loaded_kernel_is_of_the_bytes_that_were_loaded(tmp_path) -> None:
    file = tmp_path / "k.cubin"
    shutil.copy(LAUNCH, file)
    kernel = torch_cubin.load(file)["vec_add"]
    assert torch.equal(vec_add(kernel=kernel)(torch.ones(2), torch.ones(2)), torch.full((2,), 2.0))
    shutil.copy(DATA / "vec_add.sm_90a.cuda124.cubin", file)
    with pytest.raises(errors.HashError, match="not what the kernel was loaded from"):
        vec_add(kernel=kernel)


def test_a_modules_repr_counts_its_kernels() -> None:
    one = torch_cubin.load(DATA / "vec_add.sm_80.cuda118.cubin")
    assert repr(one).endswith("sm_80; 1 kernel>")
    assert repr(torch_cubin.load(LAUNCH)).endswith(
        f"sm_90a; {len(torch_cubin.load(LAUNCH))} kernels>"
    )
    with pytest.raises(errors.ImageError, match="the buffer given is too short"):
        torch_cubin.load(b"\x7fELF")
