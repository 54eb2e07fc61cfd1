"""Calls of declared ops: what their kernels get, and how they are launched."""

from __future__ import annotations

import struct

import contracts
import pytest
import torch
from contract_calls import integer, op_of, pointer, refused
from contracts import LAUNCH, changed, new_name
from fake_driver import tensors

import torch_cubin

pytestmark = pytest.mark.usefixtures("declared")


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


def test_a_value_out_of_range_is_named_by_its_expression_and_kernel(driver):
    """Not by its place in the contract (kernels[0].args[3]), which a user never wrote."""
    out = tensors.empty(16, dtype=torch.int64)
    for index, kind, tree, text in (
        (1, "int8", ["number", "v"], "v"),
        (2, "uint8", ["add", ["number", "v"], 1], "(v + 1)"),
        (3, "int16", ["mul", ["numel", "out"], ["number", "v"]], "(out.numel * v)"),
    ):
        scalars = list(ZEROS)
        scalars[index] = [kind, tree]
        op = echo("(Tensor(a!) out, int v) -> ()", scalars)
        wanted = f": '{text}', argument {index} of kernel 'echo', is out of range: expected"
        refused(op, out, 1 << 20, match=wanted)


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


def test_lists(driver):
    contract = contracts.vec_add()
    contract["schema"] = new_name() + "(Tensor[] xs, Tensor(a!) out) -> ()"
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
    refused(op, xs[:2], out, match="'xs[2]', argument 1 of kernel")
    refused(op, [], out, match="'xs[0]', argument 0 of kernel")
    refused(op, [*xs, tensors.empty(2, 3)], out, match="argument 'xs' item 4")
    op([xs[0], xs[1], tensors.empty(0, 0)], out)
    assert pointer(driver.launches()[-1], 1) == 0


def test_absent_items_of_lists(driver):
    """An item is absent before lists are read and where the list is short, whatever ran before."""
    contract = contracts.vec_add()
    contract["schema"] = new_name() + "(Tensor x, Tensor[] xs) -> Tensor"
    given = ["select", ["defined", "xs[1]"], ["numel", "xs[1]"], -1]
    contract["tensors"] = {
        "x": {"dtype": "float32", "shape": None},
        "xs": {"dtype": "float32", "shape": None},
        "out": {"dtype": "float32", "shape": [2]},
    }
    contract["kernels"][0].update(
        args=[["pointer", "x"], ["pointer", "x"], ["pointer", "out"], ["int32", given]],
        grid=[1, 1, 1],
    )
    op = op_of(contract)
    early = changed(contract, "schema", contract["schema"].replace("::op_", "::early_"))
    early["tensors"]["x"]["shape"] = [["add", 2, given]]  # checked before lists are read
    early = op_of(early)
    x = tensors.empty(1)
    for count, want in ((3, 5), (1, -1), (2, 5), (0, -1)):
        driver.reset()
        items = [tensors.empty(5) for _ in range(count)]
        op(x, items)
        assert integer(driver.launches()[0], 3) == want
        early(x, items)


def test_a_grid_of_scratch(driver):
    contract = contracts.vec_add()
    contract["scratch"] = [{"name": "partial", "dtype": "float64", "shape": [["numel", "x"], 4]}]
    contract["kernels"][0]["args"][1] = ["pointer", "partial"]
    contract["kernels"][0]["grid"] = [["numel", "partial"], ["size", "out", 0], 1]
    op = op_of(contract)
    for n in (8, 3):
        op(tensors.empty(n), tensors.empty(n))
        assert driver.launches()[-1]["grid"] == [4 * n, n, 1]


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


def test_tensor_maps_are_those_of_direct_launches(driver):
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
            got = bytes.fromhex(driver.launches()[0]["params"][0])
            want = torch_cubin.TensorMap(x, (8, 8), **fields)
            assert got == want.encoded(), (fields, size)


def test_cached_tensor_maps_follow_the_memory_they_describe(driver):
    op, wide = tma(), tma(box=[4, 16])

    def encoded(op, x, box=(8, 8)) -> int:
        """How often the driver was asked for the map of a call, which must be x's."""
        driver.reset()
        op(x)
        got = bytes.fromhex(driver.launches()[0]["params"][0])
        words = struct.unpack("<16Q", got)
        assert words[0] == x.data_ptr()
        assert words[2:4] == (x.size(1), x.size(0))
        assert words[7] == x.stride(0) * 4
        assert struct.unpack("<2H", got[88:92]) == box
        return driver.calls("cuTensorMapEncodeTiled")

    x = tensors.strided((64, 72), (80, 1))
    assert encoded(op, x) == 1
    assert encoded(op, x) == 0
    assert encoded(wide, x, (16, 4)) == 1
    assert encoded(op, x) == 0
    # The memory is given out again, to tensors of other sizes and strides.
    address = x.data_ptr()
    for size, stride in (((64, 76), (80, 1)), ((60, 72), (80, 1)), ((64, 72), (76, 1))) * 2:
        del x
        x = tensors.strided(size, stride)
        calls = encoded(op, x)
        assert x.data_ptr() == address or calls <= 1
        assert encoded(op, x) == 0


def test_tensor_maps_of_dims_of_size_1(driver):
    """Their strides say nothing, and PyTorch makes any: x[:, None], or a slice of one row."""
    op = tma(box=[1, 8])
    encoded = []
    for stride in (32, 4, 3, 33):
        driver.reset()
        x = tensors.strided((1, 32), (stride, 1))
        op(x)
        encoded.append(bytes.fromhex(driver.launches()[0]["params"][0])[8:])
    assert encoded[1] == encoded[2] == encoded[3]  # 4 elements are 16 bytes
    refused(op, tensors.strided((2, 32), (33, 1)), match="stride that the hardware")


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
    facts = torch_cubin._native.library.device(0)
    assert launch["grid"] == [facts["multiprocessors"], facts["sm"], 1]
