"""Every kind of wrong argument, tensor map and scalar: what a user reads, class and message."""

from __future__ import annotations

import gc
from pathlib import Path

import pytest
import torch
from wrong_calls import call, expect, x

import torch_cubin
from torch_cubin import errors
from torch_cubin._native import launcher

SEVERAL = Path(__file__).resolve().parents[1] / "data" / "several.sm_90a.cuda130.cubin"

wide = torch.zeros(8, 8)
VEC_ADD = """The binary says:
kernel vec_add
  12 registers
  param  offset   size  kind
      0       0      8  unknown
      1       8      8  unknown
      2      16      8  unknown
      3      24      4  value"""
SMALL = """The binary says:
kernel small
  8 registers
  param  offset   size  kind
      0       0      1  value
      1       1      1  value
      2       2      2  value
      3       8      8  unknown
      4      16      1  value
      5      24      8  unknown"""


class Array:
    def __init__(self, strides=None, address=1 << 40):
        self.__cuda_array_interface__ = {
            "data": (address, False),
            "shape": (4, 3),
            "strides": strides,
            "typestr": "<f4",
            "version": 3,
        }


def small(index, value):
    """A call of `small` whose argument `index` is `value`."""
    arguments = [True, 0, 0, 0.0, b"\0", x]
    arguments[index] = value
    return call(*arguments, kernel="small")


WRONG = {
    # --- count and sizes ---
    "too_few": (
        call(x, x, x),
        errors.ParamsError,
        "kernel 'vec_add' was given another number of arguments than it has parameters: expected "
        f"4, got 3. {VEC_ADD}",
    ),
    "too_many": (
        call(x, x, x, 64, 64),
        errors.ParamsError,
        "kernel 'vec_add' was given another number of arguments than it has parameters: expected "
        f"4, got 5. {VEC_ADD}",
    ),
    "tensor_for_int": (
        call(x, x, x, x),
        errors.ParamsError,
        "argument 3 of kernel 'vec_add' does not fit its parameter: expected 4 bytes, got a "
        f"tensor: a pointer of 8 bytes. {VEC_ADD}",
    ),
    "none_for_int": (
        call(x, x, x, None),
        errors.ParamsError,
        "argument 3 of kernel 'vec_add' does not fit its parameter: expected 4 bytes, got None, a "
        f"null pointer of 8 bytes. {VEC_ADD}",
    ),
    "int64_for_int32": (
        call(x, x, x, torch_cubin.int64(64)),
        errors.ParamsError,
        "argument 3 of kernel 'vec_add' does not fit its parameter: expected 4 bytes, got "
        f"torch_cubin.int64(64). {VEC_ADD}",
    ),
    "bytes": (
        call(x, x, x, b"abc"),
        errors.ParamsError,
        "argument 3 of kernel 'vec_add' does not fit its parameter: expected 4 bytes, got 3 bytes "
        f"(bytes). {VEC_ADD}",
    ),
    "float_of_two_bytes": (
        small(2, 1.5),
        errors.ParamsError,
        "argument 2 of kernel 'small' does not fit its parameter: expected 2 bytes, got the float "
        f"1.5. Say which 16-bit type is meant: torch_cubin.float16 or bfloat16. {SMALL}",
    ),
    "float_of_one_byte": (
        small(1, 1.5),
        errors.ParamsError,
        "argument 1 of kernel 'small' does not fit its parameter: expected 1 bytes, got the float "
        f"1.5. {SMALL}",
    ),
    "struct_for_number": (
        small(3, b"12345"),
        errors.ParamsError,
        "argument 3 of kernel 'small' does not fit its parameter: expected 8 bytes, got 5 bytes "
        f"(bytes). {SMALL}",
    ),
    "int_for_struct": (
        call(5, 6, bytes(128), x, kernel="structs"),
        errors.ParamsError,
        "argument 1 of kernel 'structs' does not fit its parameter: expected 12 bytes, got the "
        "int 6. Pass a struct as bytes. The binary says:...",
    ),
    # --- ranges ---
    "int_too_large": (
        call(x, x, x, 2**32),
        errors.ParamsError,
        "argument 3 of kernel 'vec_add' is out of range for a parameter of 4 bytes: expected "
        "-2147483648 to 4294967295, got 4294967296.",
    ),
    "int_too_small": (
        call(x, x, x, -(2**31) - 1),
        errors.ParamsError,
        "argument 3 of kernel 'vec_add' is out of range for a parameter of 4 bytes: expected "
        "-2147483648 to 4294967295, got -2147483649.",
    ),
    "byte_too_large": (
        small(1, 256),
        errors.ParamsError,
        "argument 1 of kernel 'small' is out of range for a parameter of 1 bytes: expected -128 "
        "to 255, got 256.",
    ),
    "short_too_small": (
        small(2, -32769),
        errors.ParamsError,
        "argument 2 of kernel 'small' is out of range for a parameter of 2 bytes: expected -32768 "
        "to 65535, got -32769.",
    ),
    "pointer_too_large": (
        call(2**64, x, x, 1),
        errors.ParamsError,
        "argument 0 of kernel 'vec_add' is out of range for a parameter of 8 bytes: expected "
        "-9223372036854775808 to 18446744073709551615, got 18446744073709551616.",
    ),
    "float_too_large": (
        call(x, x, x, 1e39),
        errors.ParamsError,
        "argument 3 of kernel 'vec_add' is out of range for float32, which a parameter of 4 bytes "
        "takes: expected a number of at most 3.4028235e38, inf or nan, got 1e+39.",
    ),
    # --- tensors ---
    "not_contiguous": (
        call(x, wide.t(), x, 64),
        errors.InputError,
        "argument 1 of kernel 'vec_add' is not contiguous: expected a contiguous tensor, got "
        "shape (8, 8), strides (1, 8). Call .contiguous(), or pass torch_cubin.strided(tensor) to "
        "a kernel with strides.",
    ),
    "expanded": (
        call(x[:1].expand(5), x, x, 64),
        errors.InputError,
        "argument 0 of kernel 'vec_add' is not contiguous: expected a contiguous tensor, got shape "
        "(5,), strides (0,). Call .contiguous(), or pass torch_cubin.strided(tensor) to a kernel "
        "with strides.",
    ),
    "other_device_type": (
        call(x, x, torch.zeros(3, device="meta"), 64),
        errors.InputError,
        "argument 2 of kernel 'vec_add' lies on another kind of device: expected a cpu tensor, got "
        "meta. Copy it with .cuda(); pass a number as int or float.",
    ),
    "other_device": (
        call(x, Array(address=2 << 40), x, 64),
        errors.InputError,
        "argument 1 of kernel 'vec_add' lies on another device than an argument before it: "
        "expected cpu:0, got cpu:1. Copy it there with .to(), or launch on each device by itself.",
    ),
    "sparse": (
        call(torch.eye(3).to_sparse(), x, x, 64),
        errors.InputError,
        "argument 0 of kernel 'vec_add' is not a strided tensor: expected torch.strided, got "
        "torch.sparse_coo.",
    ),
    "conjugated": (
        call(torch.zeros(3, dtype=torch.complex64).conj(), x, x, 64),
        errors.InputError,
        "argument 0 of kernel 'vec_add' holds values that are yet to be conjugated or negated: "
        "expected memory with the tensor's own values, got a lazy view. Call .resolve_conj() or "
        ".resolve_neg() first.",
    ),
    "negated": (
        call(torch.zeros((), dtype=torch.complex64).conj().imag, x, x, 64),
        errors.InputError,
        "argument 0 of kernel 'vec_add' holds values that are yet to be conjugated or negated: "
        "expected memory with the tensor's own values, got a lazy view. Call .resolve_conj() or "
        ".resolve_neg() first.",
    ),
    "array_not_contiguous": (
        call(Array(strides=(4, 16)), x, x, 64),
        errors.InputError,
        "argument 0 of kernel 'vec_add' is not contiguous: expected a contiguous array, got shape "
        "(4, 3), strides (4, 16). Copy it, or pass torch_cubin.strided(array).",
    ),
    "array_on_no_gpu": (
        call(Array(address=0x1234), x, x, 64),
        errors.InputError,
        "argument 0 of kernel 'vec_add' is no memory of a GPU: expected the address of device "
        "memory, got 0x1234.",
    ),
    "list": (
        call([1, 2], x, x, 64),
        errors.InputError,
        "argument 0 of kernel 'vec_add' is of a type that a kernel cannot be given: expected a "
        "tensor, an int, float, bool or None, a torch_cubin scalar or TensorMap, bytes, a "
        "ctypes.Structure or a NumPy scalar, got list. A CPU array must be copied to the GPU "
        "first.",
    ),
}


@pytest.mark.fault_case(17, 18, 44)
@pytest.mark.parametrize("name", WRONG)
def test_wrong_argument(driver, several, name):
    expect(driver, several, WRONG[name])


MAP = torch.zeros(4, 8, 32)
WRONG_MAPS = {
    "box_of_other_rank": (lambda: torch_cubin.TensorMap(MAP, (8, 32)), "wrong number of dims"),
    "large_box": (lambda: torch_cubin.TensorMap(MAP, (1, 1, 512)), "a box out of range"),
    "box_out_of_step": (lambda: torch_cubin.TensorMap(MAP, (1, 1, 3)), "a multiple of 16 bytes"),
    "swizzle_span": (
        lambda: torch_cubin.TensorMap(MAP, (1, 1, 32), swizzle="64B"),
        "wider than the swizzle",
    ),
    "unknown_swizzle": (
        lambda: torch_cubin.TensorMap(MAP, (1, 1, 4), swizzle="256B"),
        "swizzle is wrong",
    ),
    "interleave_32B": (
        lambda: torch_cubin.TensorMap(MAP, (1, 1, 4), interleave="32B"),
        "go with interleave 32B",
    ),
    "interleave_rank": (
        lambda: torch_cubin.TensorMap(MAP[0], (1, 4), interleave="16B"),
        "3 to 5",
    ),
    "nan_for_ints": (
        lambda: torch_cubin.TensorMap(MAP.int(), (1, 1, 4), oob_fill="nan"),
        "a floating-point tensor",
    ),
    "element_strides": (
        lambda: torch_cubin.TensorMap(MAP, (1, 1, 4), element_strides=(1, 1, 9)),
        "1 to 8 for each dim",
    ),
    "complex": (lambda: torch_cubin.TensorMap(MAP.to(torch.complex64), (1, 1, 4)), "a real dtype"),
    "gaps": (lambda: torch_cubin.TensorMap(MAP[:, :, ::2], (1, 1, 4)), "stride 1 in the last dim"),
    "misaligned": (
        lambda: torch_cubin.TensorMap(MAP[:, :, 1:], (1, 1, 4)),
        "a multiple of 16 bytes",
    ),
    "stride": (
        lambda: torch_cubin.TensorMap(torch.zeros(4, 5), (1, 4)),
        "the hardware does not take",
    ),
    "empty": (lambda: torch_cubin.TensorMap(MAP[:0], (1, 1, 4)), "1 to 2^32 in each dim"),
    "six_dims": (lambda: torch_cubin.TensorMap(torch.zeros([4] * 6), [4] * 6), "1 to 5 sizes"),
    "no_tensor": (lambda: torch_cubin.TensorMap([1], (1,)), "a torch.Tensor"),
}


@pytest.mark.parametrize("name", WRONG_MAPS)
def test_wrong_tensor_map(driver, name):
    make, says = WRONG_MAPS[name]
    with pytest.raises(errors.InputError, match="TensorMap") as caught:
        make()
    assert says in str(caught.value)
    assert driver.journal() == []


@pytest.mark.fault_case(18, 44)
@pytest.mark.parametrize(
    ("make", "value"),
    [
        (torch_cubin.int8, 128),
        (torch_cubin.int8, 1.0),
        (torch_cubin.uint16, -1),
        (torch_cubin.int32, 2**31),
        (torch_cubin.uint64, 2**64),
        (torch_cubin.int32, "5"),
        (torch_cubin.float16, 65520.0),
        (torch_cubin.bfloat16, 3.4e38),
        (torch_cubin.float32, 1e39),
        (torch_cubin.float32, "x"),
        (torch_cubin.float64, 10**400),
    ],
)
def test_wrong_scalar(make, value):
    with pytest.raises(errors.ParamsError, match=f"torch_cubin.{make.__name__} does not hold"):
        make(value)


@pytest.mark.fault_case(44)
def test_objects_that_raise(driver, vec_add):
    class Broken:
        @property
        def __cuda_array_interface__(self):
            raise KeyError("of its own")

        def __index__(self):
            raise KeyError("of its own")

    with pytest.raises(KeyError, match="of its own"):
        vec_add(Broken(), x, x, 64, grid=1, block=1)
    with pytest.raises(KeyError, match="of its own"):
        vec_add(x, x, x, 64, grid=Broken(), block=1)


@pytest.mark.fault_case(40)
def test_fake_and_wrapped_tensors_are_refused(driver, vec_add):
    from torch._subclasses import FakeTensorMode
    from torch.nn.attention.bias import causal_upper_left

    with FakeTensorMode(), pytest.raises(errors.InputError, match="pass by FakeTensorMode"):
        vec_add(torch.zeros(3), x, x, 64, grid=1, block=1)

    def inside(row):
        with pytest.raises(errors.InputError, match="no memory of its own"):
            vec_add(row, x, x, 64, grid=1, block=1)
        return row

    torch.func.vmap(inside)(torch.zeros(2, 3))
    with pytest.raises(errors.InputError, match=r"no memory of its own.*CausalBias"):
        vec_add(causal_upper_left(8, 8), x, x, 64, grid=1, block=1)
    assert driver.launches() == []


@pytest.mark.parametrize("offset", [0, 1, 1 << 20])
def test_a_tensor_whose_storage_is_gone(driver, vec_add, offset: int) -> None:
    """Its address is null and the offset."""
    gone = torch.zeros(offset + 64)[offset:]
    gone.untyped_storage().resize_(0)
    vec_add(x, x, x, 64, grid=1, block=64)
    driver.reset()
    for launch in (vec_add, vec_add._launch_plainly):
        with pytest.raises(errors.InputError, match="no memory of its own"):
            launch(gone, x, x, 64, grid=1, block=64)
    with pytest.raises(errors.InputError, match="has elements but no memory"):
        vec_add(torch_cubin.TensorMap(gone.view(4, 16), (4, 16)), x, x, 64, grid=1, block=64)
    assert driver.launches() == []


def lazy_tensors() -> list[torch.Tensor]:
    """Contiguous, and yet to be negated."""
    row = torch.zeros(4, dtype=torch.complex64).conj().imag
    replaced = torch.zeros(8)
    replaced.data = torch._neg_view(torch.ones(8))
    return [row[:1], row.as_strided((4,), (1,)), torch._neg_view(torch.ones(8)), replaced]


@pytest.mark.fault_case(40)
@pytest.mark.parametrize("index", range(4))
def test_lazily_negated_tensors_are_refused(driver, vec_add, index: int) -> None:
    lazy = lazy_tensors()[index]
    assert lazy.is_contiguous()
    assert lazy.is_neg()
    for launch in (vec_add, vec_add._launch_plainly):
        with pytest.raises(errors.InputError, match="yet to be conjugated or negated"):
            launch(lazy, x, x, 64, grid=1, block=64)
    assert driver.launches() == []


def test_the_extension_knows_plain_tensors(driver, vec_add, monkeypatch) -> None:
    """Plain tensors take the fast path; without this test they could silently become slow."""
    if launcher.Launcher is launcher.PlainLauncher:
        pytest.skip("the extension is off")
    monkeypatch.setattr(torch_cubin.Kernel, "_launch_plainly", lambda *a, **k: pytest.fail("plain"))
    with torch.inference_mode():
        inference = torch.zeros(64)
    leaf = torch.zeros(64, requires_grad=True)
    parameter = torch.nn.Parameter(torch.zeros(64))
    for tensor in (x, inference, leaf, leaf * 2, parameter, torch.zeros(80)[16:], x.detach()):
        vec_add(tensor, tensor, tensor, 64, grid=1, block=64)
    assert len(driver.launches()) == 7


def test_modules_outlive_the_finalizers_of_their_cycle(driver) -> None:
    """Garbage collection clears weak references before it calls any __del__."""
    seen, before = [], driver.libraries()

    class Last:
        def __init__(self) -> None:
            self.module, self.itself = torch_cubin.load(SEVERAL), self
            self.kernel = self.module["vec_add"]
            driver.declare(self.module)

        def __del__(self) -> None:
            self.kernel(x, x, x, 64, grid=1, block=64)
            seen.append(self.module.unload())

    for _ in range(3):
        Last()
        gc.collect()
    assert seen == [True] * 3
    assert driver.libraries() == before


def test_a_functional_tensor_has_no_memory(driver, vec_add) -> None:
    def inside(row: torch.Tensor) -> torch.Tensor:
        with pytest.raises(errors.InputError, match="no memory of its own"):
            vec_add(row, x, x, 64, grid=1, block=1)
        return row

    for offset in (0, 1):
        torch.func.functionalize(inside)(torch.zeros(65)[offset:])
    assert driver.launches() == []
