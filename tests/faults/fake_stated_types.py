"""Types that a file states: arguments are converted to them or refused, in both launchers."""

from __future__ import annotations

import ctypes
import struct

import numpy
import pytest
import torch
from fake_driver import tensors
from unit.stated_cubins import TMPL, cubin, entry, ptx

import torch_cubin
from torch_cubin import errors

# (__half*, char const*, float, double, unsigned int, long, bool, __nv_bfloat16)
MIXED = "_Z5mixedP6__halfPKcfdjlb13__nv_bfloat16"
SIZES = (8, 8, 4, 8, 4, 8, 1, 2)
# (float2*, uint4*, float**, std::complex<float>*, unsigned char*, void*, Foo*, short*)
VECTORS = "_Z7vectorsP6float2P5uint4PPfPSt7complexIfEPhPvP3FooPs"
VECTOR_TYPES = [
    "float32 complex64",
    "int32 uint32",
    "int64 uint64",
    "complex64",
    "",
    "",
    "",
    "int16",
]


@pytest.fixture(autouse=True)
def device(monkeypatch):
    """Where launches without tensors go, which PyTorch's CPU build cannot say."""
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)


def loaded(driver, kernels: dict, **fields):
    module = torch_cubin.load(cubin(kernels, **fields))
    driver.declare(module)
    return module


def params(driver) -> list[str]:
    return driver.launches()[-1]["params"]


def packed(code: str, value) -> str:
    return struct.pack("<" + code, value).hex()


def test_pointees_and_numbers_of_a_template(driver):
    kernel = loaded(driver, {TMPL: (8, 4)})["tmpl<float, 4>"]
    x = torch.zeros(4)
    kernel(x, 3, grid=1, block=32)
    assert params(driver)[1] == packed("i", 3)
    for wrong in (x.half(), x.int(), x.double(), x.bfloat16(), x.to(torch.uint8), x > 0):
        with pytest.raises(errors.ParamsError, match=r"expected float32, for 'float\*'"):
            kernel(wrong, 3, grid=1, block=32)
    for wrong in (3.0, torch_cubin.float32(3), numpy.float32(3), ctypes.c_float(3)):
        with pytest.raises(errors.ParamsError, match="another type.*for 'int'"):
            kernel(x, wrong, grid=1, block=32)
    for wrong in (1 << 31, -(1 << 31) - 1, 0xFFFFFFFF):
        with pytest.raises(errors.ParamsError, match="out of range"):
            kernel(x, wrong, grid=1, block=32)
    with pytest.raises(errors.ParamsError):
        kernel(x, x, grid=1, block=32)
    for right in (torch_cubin.int32(5), torch_cubin.uint32(5), numpy.int32(5), ctypes.c_int(5)):
        kernel(x, right, grid=1, block=32)
        assert params(driver)[1] == packed("i", 5)
    kernel(None, True, grid=1, block=32)
    assert params(driver) == [packed("q", 0), packed("i", 1)]
    kernel(x.data_ptr(), 3, grid=1, block=32)


def test_bits_pass_arguments_of_another_type(driver):
    kernel = loaded(driver, {TMPL: (8, 4)})[TMPL]
    x = torch.zeros(4, dtype=torch.float16)
    kernel(torch_cubin.bits(x), torch_cubin.bits(torch_cubin.float32(2)), grid=1, block=32)
    assert params(driver) == [packed("Q", x.data_ptr()), packed("f", 2)]
    kernel(x.view(torch.float32), struct.pack("<f", 2), grid=1, block=32)
    wide = torch.zeros(4, 4, dtype=torch.float16).t()[1:]
    kernel(torch_cubin.bits(torch_cubin.strided(wide)), 1, grid=1, block=32)
    with pytest.raises(errors.ParamsError):
        kernel(torch_cubin.strided(wide), 1, grid=1, block=32)
    with pytest.raises(errors.ParamsError):  # its size still counts
        kernel(torch_cubin.bits(x), torch_cubin.bits(torch_cubin.float64(2)), grid=1, block=32)


def test_ints_become_the_floats_that_are_stated(driver):
    kernel = loaded(driver, {MIXED: SIZES})["mixed"]
    x = torch.zeros(4, dtype=torch.float16)
    for raw in (x, x.byte(), x.double(), x.int()):  # char* is memory of any kind
        kernel(x, raw, 2, 3, 4, 5, True, 1, grid=1, block=32)
        assert params(driver)[2:] == [
            packed("f", 2), packed("d", 3), packed("I", 4), packed("q", 5), "01", "803f",
        ]  # fmt: skip
    kernel(x, x, 2.5, 3.5, 4, 5, 0, 1.5, grid=1, block=32)
    assert params(driver)[2:4] == [packed("f", 2.5), packed("d", 3.5)]
    assert params(driver)[6:] == ["00", "c03f"]
    right = [x, x, 2, 3, 4, 5, True, 1]
    for index, wrong in (
        (0, x.bfloat16()), (0, x.float()), (2, torch_cubin.int32(2)), (2, numpy.int32(2)),
        (3, torch_cubin.int64(3)), (3, x), (4, 4.0), (4, -1), (5, 1.0), (5, x), (5, None),
        (5, 1 << 63),
        (6, 2), (6, 1.0), (7, torch_cubin.float16(1)), (7, torch_cubin.int16(1)), (3, 1 << 5000),
    ):  # fmt: skip
        with pytest.raises(errors.ParamsError):
            kernel(*right[:index], wrong, *right[index + 1 :], grid=1, block=32)


@pytest.mark.parametrize("index", range(8))
def test_pointees(driver, index):
    kernel = loaded(driver, {VECTORS: (8,) * 8})["vectors"]
    taken = VECTOR_TYPES[index].split()
    for dtype in ("float32", "complex64", "int32", "uint32", "int64", "uint64", "float16", "int16"):
        x = torch.empty(8, dtype=getattr(torch, dtype))
        arguments = [None] * 8
        arguments[index] = x
        if not taken or dtype in taken or (taken == ["int16"] and dtype == "uint16"):
            kernel(*arguments, grid=1, block=32)
        else:
            with pytest.raises(errors.ParamsError, match="another type"):
                kernel(*arguments, grid=1, block=32)


# cond<4, float>(std::enable_if<((4)>(3)), float>::type*, int)
CONDITION = "_Z4condILi4EfEvPNSt9enable_ifIXgtT_Li3EET0_E4typeEi"


def test_an_operator_in_a_name_is_no_bracket(driver):
    kernel = loaded(driver, {CONDITION: (8, 4)})["cond<4, float>"]
    x = torch.zeros(4)
    kernel(x, 3, grid=1, block=32)
    assert params(driver)[1] == packed("i", 3)
    with pytest.raises(errors.ParamsError, match="another type.*for 'int'"):
        kernel(x, 3.0, grid=1, block=32)


# (std::complex<float>, float2, __half2, E, int S::*): three are not numbers, one is an enum
VALUES = "_Z6valuesSt7complexIfE6float27__half21EM1Si"


@pytest.mark.parametrize("index", range(4))
def test_a_value_that_is_no_number_takes_none(driver, index):
    kernel = loaded(driver, {VALUES: (8, 8, 4, 4, 8)})["values"]
    right = [bytes(8), bytes(8), bytes(4), 1, 8]
    kernel(*right, grid=1, block=32)
    wrong = (2.5, 3, None, torch.zeros(4)) if index < 3 else (2.5, None, torch.zeros(4))
    for argument in wrong:
        with pytest.raises(errors.ParamsError):
            kernel(*right[:index], argument, *right[index + 1 :], grid=1, block=32)
    kernel(*right[:3], torch_cubin.bits(torch_cubin.float32(2)), 8, grid=1, block=32)


def test_a_vector_beside_a_tensor_takes_no_number(driver):
    """All arguments but the wrong one are common, so the extension module sees the call first."""
    kernel = loaded(driver, {"_Z4pairPf7__half2": (8, 4)})["pair"]
    x = torch.zeros(4)
    kernel(x, bytes(4), grid=1, block=32)
    for wrong in (True, False, 3, 2.5):
        with pytest.raises(errors.ParamsError, match="another type"):
            kernel(x, wrong, grid=1, block=32)


def test_extern_c_states_nothing(driver):
    kernel = loaded(driver, {"plain": (8, 4)})["plain"]
    for x in (torch.zeros(4), torch.zeros(4).half(), torch.zeros(4).int()):
        kernel(x, 3, grid=1, block=32)
        assert params(driver)[1] == packed("i", 3)
        kernel(x, 3.0, grid=1, block=32)
        assert params(driver)[1] == packed("f", 3)


def test_a_name_with_other_parameters_states_no_types(driver):
    """A compiler may pass more, as Numba does for arrays, or others than the source says."""
    x = torch.zeros(4).half()
    for sizes in ((8, 8, 4), (4, 8)):
        kernel = loaded(driver, {TMPL: sizes})[TMPL]
        kernel(*[x if size == 8 else 1 for size in sizes], grid=1, block=32)


def test_types_of_ptx(driver):
    text = ptx(entry("k", "u64, f32, u32, f64, b32, b64") + entry("q", "u64 .ptr .global .align 4"))
    module = torch_cubin.load(text, jit=True)
    driver.declare(module)
    kernel, x = module["k"], torch.zeros(4)
    kernel(x, 2, 3, 4, 5, x, grid=1, block=32)
    assert params(driver)[1:5] == [packed("f", 2), packed("i", 3), packed("d", 4), packed("i", 5)]
    kernel(x.half(), 2.5, 0xFFFFFFFF, 4.5, 5.0, None, grid=1, block=32)
    assert params(driver)[1:5] == [packed("f", 2.5), "ffffffff", packed("d", 4.5), packed("f", 5)]
    right = [x, 2, 3, 4, 5, x]
    for index, wrong in ((0, 1.0), (1, torch_cubin.int32(2)), (2, 3.0), (3, torch_cubin.int64(1))):
        with pytest.raises(errors.ParamsError, match="another type"):
            kernel(*right[:index], wrong, *right[index + 1 :], grid=1, block=32)
    module["q"](x.half(), grid=1, block=32)


def test_ptx_beside_a_cubin_states_the_types_of_both(driver):
    text = ptx(entry("plain", "u64, f32"))
    module = torch_cubin.load([cubin({"plain": (8, 4)}), text], jit=True)
    driver.declare(module)
    module["plain"](torch.zeros(4), 2, grid=1, block=32)
    assert params(driver)[1] == packed("f", 2)


def op(name: str, args, kernel=TMPL, sizes=(8, 4), dtype="float32", **more):
    schema = f"stated::{name}(Tensor(a!) x) -> ()"
    return torch_cubin.define_op(
        schema, kernel=(cubin({kernel: sizes}), kernel), tensors={"x": f"{dtype}[n]"}, args=args,
        grid=1, block=32, **more,
    )  # fmt: skip


def test_declared_ops_are_refused_at_their_definition(driver):
    wrong = {
        "half": (lambda x: (x, 3), "float16"),
        "float_for_int": (lambda x: (x, 3.0), "float32"),
        "kind": (lambda x: (x, torch_cubin.float32(3)), "float32"),
        "tensor_for_int": (lambda x: (x, x), "float32"),
    }
    for name, (args, dtype) in wrong.items():
        with pytest.raises(errors.ParamsError):
            op(name, args, dtype=dtype)
    op("right", lambda x: (x, x.shape[0]))
    op(
        "bits",
        lambda x: (torch_cubin.bits(x), torch_cubin.bits(torch_cubin.float32(3))),
        dtype="int16",
    )


def test_a_declared_op_converts_ints(driver):
    args = lambda x: (x, None, 2, x.shape[0], 4, 5, True, 1)  # noqa: E731
    made = op("mixed", args, MIXED, SIZES, "float16")
    driver.declare(torch_cubin.load(cubin({MIXED: SIZES})))
    made(tensors.empty(8, dtype=torch.float16))
    assert params(driver)[2:] == [
        packed("f", 2), packed("d", 8), packed("I", 4), packed("q", 5), "01", "803f",
    ]  # fmt: skip


def test_a_dtype_variable_is_compared_by_the_call(driver):
    made = op("variable", lambda x: (x, 3), dtype="T", dtypes={"T": ("float32", "float16")})
    driver.declare(torch_cubin.load(cubin({TMPL: (8, 4)})))
    made(tensors.empty(8))
    with pytest.raises(errors.InputError, match="another type"):
        made(tensors.empty(8, dtype=torch.float16))
    with pytest.raises(errors.ParamsError):
        op("none", lambda x: (x, 3), dtype="T", dtypes={"T": ("bfloat16", "float16")})


def test_a_grid_that_counts_clusters(driver):
    directives = ".blocksareclusters .reqntid 32, 1, 1 .reqnctapercluster 2, 1, 1"
    text = ptx(entry("k", "u64", directives=directives)).replace(b"sm_80", b"sm_90")
    module = torch_cubin.load(text, jit=True)
    driver.declare(module)
    assert module.images[0]["k"].grid_in_clusters
    for _ in range(2):
        module["k"](torch.zeros(4), grid=3)
        assert driver.launches()[-1]["grid"] == [3, 1, 1]
    module["k"](torch.zeros(4), grid=3, cluster=2)
    with pytest.raises(errors.LaunchError):
        module["k"](torch.zeros(4), grid=3, cluster=3)
    plain = ".reqntid 32, 1, 1 .reqnctapercluster 2, 1, 1"
    text = ptx(entry("k", "u64", directives=plain)).replace(b"sm_80", b"sm_90")
    module = torch_cubin.load(text, jit=True)
    driver.declare(module)
    with pytest.raises(errors.LaunchError, match="whole number of clusters"):
        module["k"](torch.zeros(4), grid=3)
