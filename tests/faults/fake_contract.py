"""Calls of declared ops: what is checked, allocated, packed, launched, and given back."""

from __future__ import annotations

import gc
import itertools
import os
import struct
import subprocess
import sys
import textwrap
import threading
import weakref

import contracts
import pytest
import torch
from contracts import LAUNCH, SEVERAL, changed, define, new_name
from fake_driver import tensors

import torch_cubin
from torch_cubin import errors


@pytest.fixture(autouse=True)
def declared(driver, clean):
    """The driver knows the parameters of both files' kernels."""
    for file in (SEVERAL, LAUNCH):
        driver.declare(torch_cubin.load(file))


def op_of(contract: dict, **more):
    """The defined op, to be called."""
    (answer,) = define(contract, **more)
    assert answer["state"] == "defined"
    space, name = answer["name"].split("::")
    packet = getattr(getattr(torch.ops, space), name.split(".")[0])
    return packet.default if "." not in name else getattr(packet, name.split(".")[1])


def refused(function, *arguments, match: str, tag: str = "input", **keywords) -> None:
    with pytest.raises(RuntimeError) as caught:
        function(*arguments, **keywords)
    assert str(caught.value).startswith(f"torch_cubin [{tag}]: "), caught.value
    assert match in str(caught.value)


def pointer(launch: dict, index: int) -> int:
    return int.from_bytes(bytes.fromhex(launch["params"][index]), "little")


def integer(launch: dict, index: int) -> int:
    return int.from_bytes(bytes.fromhex(launch["params"][index]), "little", signed=True)


def test_a_call(driver):
    op = op_of(contracts.vec_add())
    x, y = tensors.empty(1000), tensors.empty(1000)
    out = op(x, y)
    assert (out.shape, out.stride(), out.dtype) == ((1000,), (1,), torch.float32)
    assert str(out.device) == "cuda:0"
    (launch,) = driver.launches()
    assert (launch["kernel"], launch["grid"], launch["block"]) == (
        "vec_add",
        [4, 1, 1],
        [256, 1, 1],
    )
    assert launch["stream"] == 0x5000
    assert [pointer(launch, i) for i in range(3)] == [x.data_ptr(), y.data_ptr(), out.data_ptr()]
    assert integer(launch, 3) == 1000


def test_later_calls_make_no_other_driver_calls(driver):
    op = op_of(contracts.vec_add())
    x = tensors.empty(5)
    op(x, x)
    driver.reset()
    op(x, x)
    assert driver.journal() == [
        *("cuCtxGetCurrent", "cuCtxPushCurrent", "cuStreamIsCapturing", "cuLaunchKernelEx"),
        "cuCtxPopCurrent",
    ]


def test_the_tensors_device_and_stream(driver):
    op = op_of(contracts.vec_add())
    x = tensors.empty(5, device=1)
    assert op(x, x).device.index == 1
    (launch,) = driver.launches()
    assert (launch["device"], launch["stream"]) == (1, 0x5001)


def test_what_breaks_the_contract_is_refused(driver):
    op = op_of(contracts.vec_add())
    good = tensors.empty(4, 4)
    refused(op, good, tensors.empty(4, 5), match="*s = (4, 4)")
    refused(op, good, tensors.empty(4), match="shape (4,)")
    refused(
        op, good, tensors.empty(4, 4, dtype=torch.float16), match="expected float32, got float16"
    )
    refused(op, good, tensors.empty(4, 4, device=1), match="expected cuda:0, got cuda:1")
    refused(op, good, torch.zeros(4, 4), match="got cpu")
    refused(op, torch.zeros(4, 4), good, match="got cpu")
    refused(op, tensors.strided((4, 4), (1, 4)), good, match="strides (1, 4)")
    refused(op, tensors.strided((4, 4), (4, 1), offset=1), good, match="4 bytes past one")
    refused(op, tensors.empty(4, 4, dtype=torch.quint8), good, match="got dtype 13")
    assert driver.launches() == []
    op(good, good)


LAYOUTS = {
    # what layout takes (size, stride)
    "contiguous": [((2, 3), (3, 1)), ((1, 3), (77, 1)), ((2, 0), (5, 5)), ((), ()), ((5,), (1,))],
    "rows": [((2, 3), (8, 1)), ((2, 3), (0, 1)), ((2, 1), (4, 9)), ((), ())],
    "dense": [((2, 3), (1, 2)), ((4, 2, 3), (3, 12, 1)), ((3, 1), (1, 50)), ((2, 3), (3, 1))],
    "strided": [((2, 3), (0, 0)), ((2, 3), (7, 2)), ((2, 3), (3, 1))],
}
NOT = {
    "contiguous": [((2, 3), (1, 2)), ((2, 3), (4, 1)), ((2,), (2,))],
    "rows": [((2, 3), (1, 2)), ((3,), (2,))],
    "dense": [((2, 3), (4, 1)), ((2, 3), (0, 1)), ((2, 3), (1, 1)), ((2, 2), (1, 3))],
    "strided": [],
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts(driver, layout):
    contract = changed(contracts.vec_add(), "tensors/x/layout", layout)
    contract = changed(contract, "tensors/out/shape", [1])
    contract["tensors"]["y"]["shape"] = None
    contract["kernels"][0]["grid"] = [1, 1, 1]
    op = op_of(contract)
    y = tensors.empty(1)
    for size, stride in LAYOUTS[layout]:
        op(tensors.strided(size, stride), y)
    for size, stride in NOT[layout]:
        refused(op, tensors.strided(size, stride), y, match="argument 'x'")


def test_is_contiguous_and_dense_are_pytorchs(driver):
    """On every small layout, what the op takes is what torch calls so."""
    ops = {}
    for layout in ("contiguous", "dense"):
        contract = changed(contracts.vec_add(), "tensors/x/layout", layout)
        contract["kernels"][0]["grid"] = [1, 1, 1]
        contract["tensors"]["y"]["shape"] = None
        contract["tensors"]["out"]["shape"] = [1]
        ops[layout] = op_of(contract)
    y = tensors.empty(1)
    for size in itertools.product((1, 2, 3), repeat=3):
        for stride in itertools.product((1, 2, 3, 4, 6), repeat=3):
            x = tensors.strided(size, stride)
            meta = torch.empty_strided(size, stride, device="meta")
            dense = torch.ops.aten.is_non_overlapping_and_dense(meta)
            for layout, want in (("contiguous", meta.is_contiguous()), ("dense", dense)):
                try:
                    ops[layout](x, y)
                    got = True
                except RuntimeError:
                    got = False
                assert got == want, (size, stride, layout)


def test_alignment(driver):
    for align, right, wrong in ((4, 1, None), (8, 2, 1), (64, 16, 8)):
        op = op_of(changed(contracts.vec_add(), "tensors/x/align", align))
        y = tensors.empty(3)
        op(tensors.strided((3,), (1,), offset=right), y)
        op(tensors.strided((0,), (1,), offset=1), tensors.empty(0))
        if wrong is not None:
            refused(op, tensors.strided((3,), (1,), offset=wrong), y, match=f"multiple of {align}")


def shapes_op(schema: str, entries: dict, outputs: list, **kernel):
    """An op of `vec_add`'s kernel whose numbers are of no interest, but for its tensors."""
    contract = contracts.vec_add()
    contract["schema"] = new_name() + schema
    contract["tensors"] = {
        name: {"dtype": "float32", "shape": shape} if isinstance(shape, list | None) else shape
        for name, shape in entries.items()
    }
    contract["outputs"] = outputs
    first = next(iter(entries))
    contract["kernels"][0].update(
        args=[["pointer", first]] * 3 + [["int32", 0]], grid=[1, 1, 1], **kernel
    )
    return op_of(contract)


def test_sizes_bind_and_agree(driver):
    op = shapes_op(
        "(Tensor a, Tensor b) -> (Tensor out, Tensor sums)",
        {"a": ["*batch", "m", "k"], "b": ["k", "n"], "out": ["*batch", "m", "n"],
         "sums": [["add", ["number", "m"], ["mul", 2, ["number", "n"]]], 7]},
        ["out", "sums"],
    )  # fmt: skip
    for batch in ((), (5,), (2, 3), (0, 4)):
        out, sums = op(tensors.empty(*batch, 6, 8), tensors.empty(8, 9))
        assert out.shape == (*batch, 6, 9)
        assert out.is_contiguous()
        assert sums.shape == (24, 7)
    refused(op, tensors.empty(6, 8), tensors.empty(7, 9), match="8 (k) in shape (k, n), got 7")
    refused(op, tensors.empty(8), tensors.empty(8, 9), match="at least 2, shape (*batch, m, k)")


def test_a_group_in_the_middle(driver):
    op = shapes_op(
        "(Tensor a, Tensor b) -> Tensor", {"a": ["m", "*s", 4], "b": ["*s"], "out": ["*s", "m"]},
        ["out"],
    )  # fmt: skip
    assert op(tensors.empty(3, 5, 6, 4), tensors.empty(5, 6)).shape == (5, 6, 3)
    assert op(tensors.empty(3, 4), tensors.empty()).shape == (3,)
    refused(op, tensors.empty(3, 5, 5), tensors.empty(5), match="wrong size in dim 2")


def test_sizes_that_are_expressions_or_numbers(driver):
    op = shapes_op(
        "(Tensor w, Tensor x, int n) -> Tensor",
        {"w": [["mul", 3, ["number", "k"]]], "x": ["k", "n"], "out": ["n", "k"]},
        ["out"],
    )
    assert op(tensors.empty(12), tensors.empty(4, 5), 5).shape == (5, 4)
    refused(op, tensors.empty(13), tensors.empty(4, 5), 5, match="12 ((3 * k))")
    refused(op, tensors.empty(12), tensors.empty(4, 5), 6, match="6 (n)")


def test_negative_and_huge_outputs(driver):
    op = shapes_op("(Tensor x, int n) -> Tensor", {"x": None, "out": ["n"]}, ["out"])
    x = tensors.empty(3)
    assert op(x, 0).shape == (0,)
    refused(op, x, -1, match="negative size in dim 0, 'n'")
    refused(op, x, 2**62, match="too large")


def test_like(driver):
    entries = {
        "x": {"dtype": "float32", "shape": ["*s"], "layout": "dense"},
        "out": {"dtype": "float16", "like": "x"},
    }
    op = shapes_op("(Tensor x) -> Tensor", entries, ["out"])
    for size, stride in (((2, 3, 4), (1, 8, 2)), ((2, 3), (3, 1)), ((2, 1), (1, 9)), ((), ())):
        x = tensors.strided(size, stride)
        out = op(x)
        assert (out.shape, out.stride(), out.dtype) == (x.shape, x.stride(), torch.float16)


def test_dtype_variables(driver):
    contract = contracts.vec_add()
    contract["dtypes"] = {"T": ["float16", "bfloat16"]}
    for name in ("x", "y", "out"):
        contract["tensors"][name]["dtype"] = "T"
    contract["kernels"].append(changed(contract["kernels"][0], "block", [64, 1, 1]))
    contract["kernels"][0]["when"] = ["is_dtype", "x", "float16"]
    op = op_of(contract)
    half, brain = tensors.empty(3, dtype=torch.float16), tensors.empty(3, dtype=torch.bfloat16)
    assert op(half, half).dtype is torch.float16
    assert op(brain, brain).dtype is torch.bfloat16
    assert [launch["block"][0] for launch in driver.launches()] == [256, 64]
    refused(op, half, brain, match="expected float16 (T), got bfloat16")
    refused(op, tensors.empty(3), half, match="expected float16, bfloat16, got float32")


def test_every_dtype_can_be_an_output(driver):
    names = ["bool", "uint8", "int8", "int16", "int32", "int64", "float16", "bfloat16", "float32"]
    names += ["float64", "complex64", "complex128", "uint16", "uint32", "uint64", "float8_e4m3fn"]
    names += ["float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz", "float8_e8m0fnu", "complex32"]
    for name in names:
        op = shapes_op(
            "(Tensor x) -> Tensor", {"x": None, "out": {"dtype": name, "shape": [3]}}, ["out"]
        )
        assert str(op(tensors.empty(1)).dtype) == f"torch.{name}"


def test_no_kernel_for_the_arguments(driver):
    contract = changed(contracts.vec_add(), "kernels/0/when", ["lt", ["numel", "x"], 10])
    op = op_of(contract)
    op(tensors.empty(9), tensors.empty(9))
    refused(op, tensors.empty(10), tensors.empty(10), match="expected (x.numel < 10)")


# --- arguments of the other types ---


def echo(schema: str, scalars: list, extra: dict | None = None):
    """An op of `echo`, whose parameters are every kind of scalar; by name in the schema."""
    contract = {
        "schema": new_name("echo") + schema,
        "tensors": {"out": {"dtype": "int64", "shape": None}, **(extra or {})},
        "outputs": [],
        "kernels": [
            {
                "images": [0],
                "kernel": "echo",
                "args": [*scalars, ["pointer", "out"], ["pointer", "out"]],
                "grid": [1, 1, 1],
                "block": [1, 1, 1],
            }
        ],
    }
    return op_of(contract, files=(LAUNCH,))


KINDS = [
    "bool",
    "int8",
    "uint8",
    "int16",
    "uint16",
    "int32",
    "uint32",
    "float32",
    "int64",
    "float64",
]
CODES = "?bBhHiIfqd"
ZEROS = [["bool", False], *([kind, 0] for kind in KINDS[1:])]


@pytest.mark.parametrize("index", range(len(KINDS)), ids=KINDS)
def test_scalars(driver, index):
    kind, code = KINDS[index], CODES[index]
    type_ = {"b": "bool", "f": "float"}.get(kind[0], "int")
    scalars = list(ZEROS)
    scalars[index] = [kind, ["number", "v"]]
    op = echo(f"(Tensor(a!) out, {type_} v) -> ()", scalars)
    scalars[index] = ["number", ["number", "v"]]
    any_size = echo(f"(Tensor(a!) out, {type_} v) -> ()", scalars)
    out = tensors.empty(16, dtype=torch.int64)
    if type_ == "bool":
        values, wrong = [True, False], []
    elif type_ == "float":
        values = [0.0, -0.0, 1.5, float("inf"), float("-inf"), 1e-40]
        wrong = [1e39] if kind == "float32" else []
    else:
        bits, signed = int(kind.lstrip("uint")), kind[0] == "i"
        low, high = (-(1 << bits - 1), (1 << bits - 1) - 1) if signed else (0, (1 << bits) - 1)
        high = min(high, 2**63 - 1)
        values = [low, high, low // 2, 1]
        wrong = [x for x in (low - 1, high + 1) if -(2**63) <= x < 2**63]
    for value in values:
        driver.reset()
        op(out, value)
        any_size(out, value)
        want = struct.pack("<" + code, value).hex()
        assert [launch["params"][index] for launch in driver.launches()] == [want, want]
    for value in wrong:
        refused(op, out, value, match="out of range")


def test_a_number_of_any_size_takes_both_signs(driver):
    scalars = list(ZEROS)
    scalars[1] = ["number", ["number", "v"]]
    op = echo("(Tensor(a!) out, int v) -> ()", scalars)
    out = tensors.empty(16, dtype=torch.int64)
    for value, want in ((-128, "80"), (127, "7f"), (128, "80"), (255, "ff")):
        driver.reset()
        op(out, value)
        assert driver.launches()[0]["params"][1] == want
    for value in (-129, 256):
        refused(op, out, value, match="out of range")


def test_small_floats_are_rounded_as_torch_does(driver):
    """float16 and bfloat16, against Python's struct and torch."""
    halves, brains = list(ZEROS), list(ZEROS)
    halves[4] = ["float16", ["number", "v"]]
    brains[4] = ["bfloat16", ["number", "v"]]
    half = echo("(Tensor(a!) out, float v) -> ()", halves)
    brain = echo("(Tensor(a!) out, float v) -> ()", brains)
    out = tensors.empty(16, dtype=torch.int64)
    values = [0.0, -0.0, 1.0, 1 / 3, 65504.0, 65519.9, 2.0**-14, 2.0**-24, 2.0**-25, 3 * 2.0**-26]
    values += [1 + 2.0**-11, 1 + 3 * 2.0**-11, -2049.0, float("inf"), 6e-5, 1e-8, 2047.9999]
    for value in values:
        driver.reset()
        half(out, value)
        brain(out, value)
        got = [bytes.fromhex(launch["params"][4]) for launch in driver.launches()]
        assert got[0] == struct.pack("<e", value), value
        bits = torch.tensor(value, dtype=torch.float32).to(torch.bfloat16).view(torch.int16)
        assert got[1] == struct.pack("<h", bits.item()), value
    refused(half, out, 65520.0, match="a value of float16")
    refused(brain, out, 3.4e38, match="a value of bfloat16")


def test_optional_numbers(driver):
    contract_scalars = list(ZEROS)
    given = ["select", ["number", "v?"], ["number", "v"], -1]
    contract_scalars[5] = ["int32", given]
    op = echo("(Tensor(a!) out, int? v=None, bool? f=None, float? s=None) -> ()", contract_scalars)
    out = tensors.empty(16, dtype=torch.int64)
    for arguments, want in (((), -1), ((None,), -1), ((7, True, 2.5), 7)):
        driver.reset()
        op(out, *arguments)
        assert integer(driver.launches()[0], 5) == want
    contract_scalars[5] = ["int32", ["number", "v"]]
    op = echo("(Tensor(a!) out, int? v=None) -> ()", contract_scalars)
    op(out, 3)
    refused(op, out, match="reads a number that is None")


def test_strings_and_dtypes(driver):
    scalars = list(ZEROS)
    scalars[5] = [
        "int32",
        ["select", ["is", "mode", "relu"], 1, ["select", ["is", "d", "float16"], 2, 3]],
    ]
    op = echo("(Tensor(a!) out, str mode, ScalarType d) -> ()", scalars)
    out = tensors.empty(16, dtype=torch.int64)
    cases = [("relu", torch.float16, 1), ("gelu", torch.float16, 2), ("", torch.float32, 3)]
    cases += [("relu\0", torch.float32, 3), ("x" * 1000, torch.complex32, 3)]
    for mode, dtype, want in cases:
        driver.reset()
        op(out, mode, dtype)
        assert integer(driver.launches()[0], 5) == want, (mode, dtype)


def test_optional_tensors(driver):
    contract = contracts.vec_add()
    contract["schema"] = new_name() + "(Tensor x, Tensor? y=None) -> Tensor"
    contract["tensors"]["y"]["shape"] = ["*s"]
    contract["kernels"][0]["args"][3] = ["int32", ["select", ["defined", "y"], ["numel", "y"], -5]]
    op = op_of(contract)
    x = tensors.empty(8)
    op(x)
    op(x, None)
    op(x, x)
    first, second, third = driver.launches()
    assert pointer(first, 1) == pointer(second, 1) == 0
    assert integer(first, 3) == -5
    assert (pointer(third, 1), integer(third, 3)) == (x.data_ptr(), 8)
    refused(op, x, tensors.empty(9), match="argument 'y'")


def test_the_names_of_optional_tensors_are_their_own(driver):
    op = shapes_op(
        "(Tensor x, Tensor? y=None, Tensor? z=None) -> Tensor",
        {"x": ["m"], "y": ["k", "k", ["add", ["number", "k"], ["number", "m"]]], "z": ["k"],
         "out": ["m"]},
        ["out"],
    )  # fmt: skip
    op(tensors.empty(3), tensors.empty(2, 2, 5), tensors.empty(7))
    refused(op, tensors.empty(3), tensors.empty(2, 3, 5), match="2 (k)")
    refused(op, tensors.empty(3), tensors.empty(2, 2, 6), match="5 ((k + m))")


def test_only_optional_tensors(driver):
    op = shapes_op("(Tensor? x) -> Tensor", {"x": ["n"], "out": [3]}, ["out"])
    assert op(tensors.empty(5)).shape == (3,)


def test_lists(driver):
    contract = contracts.vec_add()
    contract["schema"] = new_name() + "(Tensor[] xs, Tensor out) -> ()"
    contract["outputs"] = []
    contract["tensors"] = {
        "xs": {"dtype": "float32", "shape": ["n", "n"]},
        "out": {"dtype": "float32", "shape": ["m"]},
    }
    contract["kernels"][0].update(
        args=[
            ["pointer", "xs", 0],
            ["pointer", "xs", 2],
            ["pointer", "out"],
            ["int32", ["add", ["number", "len(xs)"], ["mul", 100, ["size", "xs[2]", 1]]]],
        ],
        grid=[1, 1, 1],
    )
    op = op_of(contract)
    xs = [tensors.empty(i, i) for i in (2, 3, 4, 5)]
    out = tensors.empty(1)
    op(xs, out)
    (launch,) = driver.launches()
    assert [pointer(launch, i) for i in range(3)] == [
        *(xs[0].data_ptr(), xs[2].data_ptr(), out.data_ptr())
    ]
    assert integer(launch, 3) == 404
    refused(op, xs[:2], out, match="")
    refused(op, [], out, match="")
    refused(op, [*xs, tensors.empty(2, 3)], out, match="argument 'xs' item 4")
    op([xs[0], xs[1], tensors.empty(0, 0)], out)
    assert pointer(driver.launches()[-1], 1) == 0


def test_no_elements_and_empty_grids(driver):
    op = op_of(contracts.vec_add())
    empty = tensors.empty(0, 4)
    assert op(empty, empty).shape == (0, 4)
    assert driver.launches() == []
    op = op_of(changed(contracts.vec_add(), "kernels/0/grid", [["sub", ["numel", "x"], 4], 1, 1]))
    refused(op, tensors.empty(4), tensors.empty(4), match="empty grid")
    refused(op, tensors.empty(3), tensors.empty(3), match="grid (-1, 1, 1)", tag="launch")
    op = op_of(changed(contracts.vec_add(), "kernels/0/grid", [1, 1, 1]))
    op(empty, empty)
    (launch,) = driver.launches()
    assert [pointer(launch, i) for i in range(3)] == [0, 0, 0]


def test_mutated_tensors(driver):
    contract = contracts.vec_add()
    contract["schema"] = new_name() + "(Tensor x, Tensor(a!) out, Tensor(b!)? more=None) -> ()"
    contract["outputs"] = []
    contract["tensors"] = {name: dict(contracts.TENSOR) for name in ("x", "out", "more")}
    contract["kernels"][0]["args"][1] = ["pointer", "more"]
    op = op_of(contract)
    x, out, more = tensors.empty(8), tensors.empty(8), tensors.empty(8)
    assert op(x, out) is None
    assert [tensor._version for tensor in (x, out, more)] == [0, 1, 0]
    op(x, out, more)
    assert [tensor._version for tensor in (x, out, more)] == [0, 2, 1]
    with pytest.raises(RuntimeError):
        op(x, tensors.empty(9))
    empty = tensors.empty(0)
    op(empty, empty)
    assert len(driver.launches()) == 2
    contract["schema"] = contract["schema"].replace("test_contracts::op", "test_contracts::no")
    contract["kernels"][0]["grid"] = [0, 1, 1]
    op = op_of(contract)
    refused(op, x, out, match="empty grid")
    op(empty, empty)


def test_inference_tensors_are_not_changed_outside(driver):
    contract = contracts.vec_add()
    contract["schema"] = new_name() + "(Tensor x, Tensor(a!) out) -> ()"
    contract["outputs"] = []
    contract["tensors"] = {name: dict(contracts.TENSOR) for name in ("x", "out")}
    contract["kernels"][0]["args"][1] = ["pointer", "x"]
    op = op_of(contract)
    with torch.inference_mode():
        out = tensors.empty(8)
        op(tensors.empty(8), out)
    with pytest.raises(RuntimeError, match="[Ii]nference"):
        op(tensors.empty(8), out)
    assert len(driver.launches()) == 1


def test_no_derivative(driver):
    op = op_of(contracts.vec_add())
    x, y = tensors.empty(3), tensors.empty(3).requires_grad_()
    refused(op, x, y, match="argument 'y' requires grad, and the op has no derivative")
    with torch.no_grad():
        op(x, y)
    with torch.inference_mode():
        op(x, y)
    import torch.autograd.forward_ad as forward_ad

    with forward_ad.dual_level():
        refused(op, x, x, match="forward-mode level")
        with torch.no_grad():
            op(x, x)
    op(x, x)


def test_scratch(driver):
    contract = contracts.vec_add()
    contract["scratch"] = [{"name": "partial", "dtype": "float64", "shape": [["numel", "x"], 4]}]
    contract["kernels"][0]["args"][1] = ["pointer", "partial"]
    contract["kernels"][0]["args"][3] = ["int32", ["stride", "partial", 0]]
    op = op_of(contract)
    x = tensors.empty(8)
    out = op(x, x)
    (launch,) = driver.launches()
    addresses = [pointer(launch, i) for i in range(3)]
    assert addresses[0] == x.data_ptr()
    assert addresses[2] == out.data_ptr()
    assert addresses[1] % 256 == 0
    assert addresses[1] not in (0, addresses[0], addresses[2])
    assert integer(launch, 3) == 4


def test_structs_and_bytes(driver):
    contract = {
        "schema": new_name() + "(Tensor x, float f, int i) -> Tensor",
        "tensors": {"x": dict(contracts.TENSOR), "out": dict(contracts.TENSOR)},
        "outputs": ["out"],
        "kernels": [
            {
                "images": [0],
                "kernel": "scale",
                "args": [
                    ["struct", 24, [
                        [0, ["float32", ["number", "f"]]], [4, ["int32", ["number", "i"]]],
                        [8, ["float64", 0.5]], [16, ["int8", -1]],
                    ]],
                    ["pointer", "x"], ["pointer", "out"], ["bytes", "01020304"],
                ],
                "grid": [1, 1, 1], "block": [32, 1, 1],
            }
        ],
    }  # fmt: skip
    op = op_of(contract, files=(LAUNCH,))
    op(tensors.empty(4), 1.25, 7)
    (launch,) = driver.launches()
    want = struct.pack("<fidb7x", 1.25, 7, 0.5, -1)
    assert bytes.fromhex(launch["params"][0]) == want
    assert launch["params"][3] == "01020304"


def tma(schema="(Tensor x) -> Tensor", **fields):
    contract = {
        "schema": new_name() + schema,
        "tensors": {
            "x": {"dtype": "float32", "shape": None, "layout": "strided", "align": 4},
            "out": {"dtype": "float32", "shape": [64]},
        },
        "outputs": ["out"],
        "kernels": [
            {
                "images": [0],
                "kernel": "tma_box",
                "args": [
                    ["tensor_map", {"tensor": "x", "box": [8, 8], **fields}],
                    *(["int32", n] for n in (0, 0, 64)),
                    ["pointer", "out"],
                ],
                "grid": [1, 1, 1],
                "block": [32, 1, 1],
            }
        ],
    }
    return op_of(contract, files=(LAUNCH,))


def test_tensor_maps_are_those_of_python(driver):
    for fields in (
        {},
        {"swizzle": "32B", "l2_promotion": None, "oob_fill": "nan"},
        {"swizzle": None, "l2_promotion": "256B", "element_strides": [1, 2]},
    ):
        op = tma(**fields)
        for size, stride in (((16, 32), (32, 1)), ((300, 8), (64, 1))):
            driver.reset()
            x = tensors.strided(size, stride)
            op(x)
            assert driver.calls("cuTensorMapEncodeTiled") == 1
            got = bytes.fromhex(driver.launches()[0]["params"][0])
            want = torch_cubin.TensorMap(x, (8, 8), **fields)
            assert got == torch_cubin._lib.encode_tensor_map(want._spec), (fields, size)


def test_wrong_tensors_for_tensor_maps(driver):
    op = tma()
    refused(op, tensors.empty(16), match="number of dims")
    refused(op, tensors.empty(4, 0), match="1 to 2^32")
    refused(op, tensors.empty(16, 30), match="stride that the hardware")
    refused(op, tensors.strided((16, 32), (1, 16)), match="innermost dim has gaps")
    refused(op, tensors.strided((16, 32), (32, 1), offset=1), match="not aligned")
    refused(tma(box=[8, ["size", "x", 1]]), tensors.empty(16, 300), match="1 to 256")
    refused(tma(swizzle="32B", box=[8, 16]), tensors.empty(16, 32), match="wider than the swizzle")
    refused(tma(box=[8, 3]), tensors.empty(16, 32), match="multiple of 16 bytes")


def test_launch_attributes(driver):
    contract = {
        "schema": new_name() + "(Tensor x, int n) -> Tensor",
        "tensors": {"x": dict(contracts.TENSOR), "out": {"dtype": "int32", "shape": ["n"]}},
        "outputs": ["out"],
        "kernels": [
            {
                "images": [0],
                "kernel": "cluster_ranks",
                "args": [["pointer", "out"]],
                "grid": [["number", "n"], 1, 1],
                "block": [32, 1, 1],
                "shared_memory": ["mul", 1024, ["number", "n"]],
                "cluster": [["floordiv", ["number", "n"], 2], 1, 1],
                "cooperative": True,
                "programmatic_dependent_launch": True,
                "priority": -2,
            }
        ],
    }
    op = op_of(contract, files=(LAUNCH,))
    op(tensors.empty(1), 4)
    (launch,) = driver.launches()
    assert launch["grid"] == [4, 1, 1]
    assert launch["shared"] == 4096
    assert len(launch["attributes"]) == 4
    refused(op, tensors.empty(1), 3000, match="cluster", tag="launch")


def test_device_facts(driver):
    contract = changed(contracts.vec_add(), "kernels/0/grid", [["multiprocessors"], ["sm"], 1])
    op = op_of(contract)
    op(tensors.empty(3), tensors.empty(3))
    (launch,) = driver.launches()
    facts = torch_cubin._lib.device(0)
    assert launch["grid"] == [facts["multiprocessors"], facts["sm"], 1]


# --- failures give everything back ---


def test_nothing_leaks_when_a_call_fails(driver):
    """Every argument and output is released, wherever a call fails: by weak references."""
    schema = "(Tensor x, Tensor? y, Tensor[] zs, str s, int? n, float? f, ScalarType d) -> Tensor"
    contract = contracts.vec_add()
    contract["schema"] = new_name() + schema
    contract["tensors"] = {
        "x": {"dtype": "float32", "shape": ["m"]},
        "y": {"dtype": "float32", "shape": ["m"]},
        "zs": {"dtype": "float32", "shape": ["m"]},
        "out": {"dtype": "float32", "shape": [["floordiv", ["number", "m"], ["number", "n"]]]},
    }
    contract["scratch"] = [{"name": "more", "dtype": "float32", "shape": [3]}]
    contract["kernels"][0].update(
        args=[["pointer", "x"], ["pointer", "y"], ["pointer", "out"], ["int32", ["number", "n"]]],
        when=["is", "s", "relu"],
        grid=[1, 1, 1],
    )
    op = op_of(contract)

    def call(x=8, y=8, zs=(8, 8), s="relu", n=2, d=torch.float16) -> None:
        made = [tensors.empty(x), tensors.empty(y), *(tensors.empty(z) for z in zs)]
        alive = [weakref.ref(tensor.untyped_storage()) for tensor in made]
        counts = [torch._C._storage_Use_Count(t.untyped_storage()._cdata) for t in made]
        try:
            out = op(made[0], made[1], made[2:], s, n, 0.5, d)
            assert torch._C._storage_Use_Count(out.untyped_storage()._cdata) == 2
            failed = False
        except RuntimeError:
            failed = True
        after = [torch._C._storage_Use_Count(t.untyped_storage()._cdata) for t in made]
        assert after == counts
        del made
        gc.collect()
        assert not any(reference() for reference in alive)
        return failed

    assert call() is False
    for wrong in (
        {"x": 9}, {"y": 7}, {"zs": (8, 9)}, {"zs": ()}, {"s": "gelu"}, {"n": 0}, {"n": None},
        {"n": -1}, {"n": 2**40},
    ):  # fmt: skip
        expected = wrong != {"zs": ()}
        assert call(**wrong) is expected, wrong
    for name in ("cuLibraryLoadData", "cuLaunchKernelEx", "cuCtxGetCurrent"):
        driver.reset()
        contract["schema"] = new_name() + schema
        op = op_of(contract)
        driver.fail(name, 1)
        assert call() is True, name
        assert call() is False, name


def resident() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * 4096


def test_memory_does_not_grow(driver):
    """A hundred thousand calls, good and bad, with an argument of every type."""
    schema = "(Tensor x, Tensor? y, Tensor[] zs, str s, int? n, float? f, bool? b) -> Tensor"
    contract = contracts.vec_add()
    contract["schema"] = new_name() + schema
    contract["tensors"] = {
        name: {"dtype": "float32", "shape": ["m"]} for name in ("x", "y", "zs", "out")
    }
    contract["kernels"][0].update(when=["is", "s", "relu" * 50], grid=[1, 1, 1])
    op = op_of(contract)
    x, wrong = tensors.empty(8), tensors.empty(9)
    driver.quiet(True)
    try:

        def calls(count: int) -> None:
            for _ in range(count):
                op(x, x, [x, x], "relu" * 50, 3, 0.5, True)
                with pytest.raises(RuntimeError):
                    op(x, x, [x, wrong], "relu" * 50, 3, 0.5, True)

        calls(2000)
        before = resident()
        calls(20_000)
        assert resident() - before < 2 << 20  # the smallest leak would be 20,000 * 16 bytes
    finally:
        driver.quiet(False)


# --- redefinition, threads, preload ---


def test_a_swap_takes_effect(driver):
    contract = contracts.vec_add()
    op = op_of(contract)
    x = tensors.empty(300)
    op(x, x)
    (answer,) = define(contract)
    assert answer["state"] == "same"
    (answer,) = define(changed(contract, "kernels/0/block", [64, 1, 1]))
    assert answer["state"] == "swapped"
    op(x, x)
    assert [launch["block"][0] for launch in driver.launches()] == [256, 64]


def test_swaps_while_threads_call(driver):
    contract = contracts.vec_add()
    op = op_of(contract)
    x = tensors.empty(300)
    stop, problems, counts = threading.Event(), [], []

    def work() -> None:
        count = 0
        try:
            while not stop.is_set():
                op(x, x)
                count += 1
        except Exception as error:  # reported below
            problems.append(error)
        counts.append(count)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for index in range(50):
        define(changed(contract, "kernels/0/block", [32 * (1 + index % 4), 1, 1]))
    stop.set()
    for thread in threads:
        thread.join()
    assert problems == []
    assert all(counts)
    assert {launch["block"][0] for launch in driver.launches()} <= {32, 64, 96, 128, 256}


def test_preload(driver):
    contract = contracts.vec_add()
    op = op_of(contract)
    name = contract["schema"].split("(")[0]
    contracts.preload(name, 1)
    assert driver.calls("cuKernelGetFunction") == 1
    contracts.preload(name, 0)
    driver.reset()
    op(tensors.empty(4), tensors.empty(4))
    assert "cuLibraryLoadData" not in driver.journal()
    with pytest.raises(errors.InputError, match="not a declared op"):
        contracts.preload("nothing::here")
    with pytest.raises(errors.NoDeviceError):
        contracts.preload(name, 7)


def test_the_image_that_suits_the_device(driver):
    files = sorted(contracts.DATA.glob("vec_add.sm_*.cubin"))
    contract = changed(contracts.vec_add(), "kernels/0/images", list(range(len(files))))
    op = op_of(contract, files=files)
    for file in files:
        driver.declare(torch_cubin.load(file))
    op(tensors.empty(4), tensors.empty(4))
    assert len(driver.images()) == 1
    only = changed(contracts.vec_add(), "kernels/0/images", [0])
    op = op_of(only, files=[file for file in files if "sm_80" in file.name])
    refused(op, tensors.empty(4), tensors.empty(4), match="sm_80", tag="arch")
    with pytest.raises(errors.ArchError):
        contracts.preload(only["schema"].split("(")[0])


def test_driver_errors_have_their_tags(driver):
    op = op_of(contracts.vec_add())
    x = tensors.empty(4)
    for name, code, tag in (("cuLibraryLoadData", 2, "oom"), ("cuLaunchKernelEx", 700, "fault"),
                            ("cuLaunchKernelEx", 1, "launch")):  # fmt: skip
        driver.fail(name, code)
        with pytest.raises(RuntimeError, match=rf"torch_cubin \[{tag}\]"):
            op(x, x)
    op(x, x)


def test_a_failure_of_the_environment_meets_the_first_call(driver, tmp_path):
    """Of a process that never asks for it; the second call works."""
    good = contracts.write_package(tmp_path / "good", contracts.vec_add("env_good::add"))
    code = f"""
        import ctypes, sys, torch
        torch.ops.load_library({str(torch_cubin._lib.PATH)!r})
        ctypes.CDLL("libtorch_cuda.so", mode=ctypes.RTLD_GLOBAL)
        from fake_driver import tensors
        x = tensors.empty(0)
        try:
            torch.ops.env_good.add(x, x)
        except RuntimeError as error:
            print(error)
        print(torch.ops.env_good.add(x, x).shape)
    """
    environment = {
        **os.environ,
        "TORCH_CUBIN_PACKAGES": f"/nowhere:{good}",
        "PYTHONPATH": str(contracts.DATA.parent),
    }
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)],
        env=environment,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    first, second = done.stdout.splitlines()
    assert first.startswith("torch_cubin [file]: package '/nowhere' does not exist")
    assert second == "torch.Size([0])"
