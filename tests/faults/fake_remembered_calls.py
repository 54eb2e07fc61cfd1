"""Calls of ops with several kernels, remembered by thread, launch what a fresh thread launches."""

from __future__ import annotations

import copy
import random
import threading
from typing import Any

import contracts
import pytest
import torch
from contract_calls import op_of, refused
from contracts import LAUNCH, new_name
from fake_driver import tensors

pytestmark = pytest.mark.usefixtures("declared")

ADDRESSES = 1 << 32  # no number of these tests is as large


def launch_of(driver, op: Any, call: tuple[Any, ...]) -> dict[str, Any]:
    driver.reset()
    op(*call)
    (launch,) = driver.launches()
    return launch


def fresh_launch_of(driver, op: Any, call: tuple[Any, ...]) -> dict[str, Any]:
    """By a thread that has made no call before, and so remembers none."""
    found: list[dict[str, Any]] = []
    thread = threading.Thread(target=lambda: found.append(launch_of(driver, op, call)))
    thread.start()
    thread.join()
    return found[0]


def words(launch: dict[str, Any]) -> list[int]:
    texts = [text[i : i + 16] for text in launch["params"] for i in range(0, len(text), 16)]
    return [int.from_bytes(bytes.fromhex(text), "little") for text in texts]


def assert_same(one: dict[str, Any], other: dict[str, Any], call: tuple[Any, ...]) -> None:
    """But for the addresses of what each call allocates."""
    for key in ("kernel", "grid", "block", "shared", "device", "attributes", "stream"):
        assert one[key] == other[key], (key, call)
    given = {each.data_ptr() for each in call if isinstance(each, torch.Tensor)}
    for a, b in zip(words(one), words(other), strict=True):
        allocated = min(a, b) > ADDRESSES and not {a, b} & given
        assert a == b or allocated, (hex(a), hex(b), call)


def several_kernels() -> dict[str, Any]:
    contract = contracts.vec_add()
    contract["schema"] = new_name("remembered") + (
        "(Tensor x, Tensor? y, int n, int? q, float f, bool b, str mode) -> Tensor"
    )
    contract["dtypes"] = {"T": ["float32", "float16"]}
    contract["tensors"] = {
        "x": {"dtype": "T", "shape": ["r", "c"], "layout": "strided", "align": 2},
        "y": {"dtype": "T", "shape": ["k"], "align": 2},
        "out": {"dtype": "T", "shape": ["c", ["add", "r", 1]]},
    }
    contract["tensors"]["out"]["shape"] = ["c", ["add", ["number", "r"], 1]]
    plain = contract["kernels"][0]
    rows = ["neg", ["floordiv", ["neg", ["number", "r"]], 2]]
    number = ["select", ["number", "q?"], ["number", "q"], ["stride", "x", 0]]
    first = {
        "when": ["and", ["number", "b"], ["is", "mode", "relu"]],
        "requires": [{"argument": "x_ptr", "address_of": "x", "multiple_of": 16}],
        "args": [["pointer", "x"], ["pointer", "y"], ["pointer", "out"], ["int32", number]],
        "grid": [["add", rows, 1], ["max", 1, ["number", "n"]], 1],
        "block": [32, 1, 1],
        "shared_memory": ["mul", 16, ["number", "n"]],
    }
    second = {
        "when": ["lt", ["number", "f"], ["float", 0]],
        "args": [
            ["pointer", "x"],
            ["workspace", {"bytes": ["mul", 4, ["number", "r"]]}],
            ["pointer", "out"],
            ["int32", ["itemsize", "x"]],
        ],
        "grid": [1, 1, 1],
        "block": [64, 1, 1],
    }
    third = {
        "args": [
            ["address", "x", ["stride", "x", 1]],
            ["pointer", "out"],
            ["pointer", "out"],
            ["float32", ["number", "f"]],
        ],
        "grid": [["number", "c"], 1, 1],
        "block": [["select", ["defined", "y"], 96, 128], 1, 1],
    }
    contract["kernels"] = [{**copy.deepcopy(plain), **more} for more in (first, second, third)]
    return contract


def random_call(r: random.Random) -> tuple[Any, ...]:
    size = r.choice([(2, 3), (3, 2), (4, 4), (2, 8)])
    stride = r.choice([(size[1], 1), (1, size[0]), (16, 2)])
    dtype = r.choice([torch.float32, torch.float16])
    x = tensors.strided(size, stride, dtype, offset=r.choice([0, 0, 1, 8]))
    y = r.choice([None, tensors.empty(r.choice([2, 3]), dtype=dtype)])
    return (
        *(x, y, r.choice([1, 2]), r.choice([None, 0, 5])),
        *(r.choice([0.0, -0.0, -1.0, 0.5]), r.random() < 0.5, r.choice(["relu", "gelu", "x" * 20])),
    )


@pytest.mark.parametrize("seed", range(4))
def test_repeated_calls_launch_the_same(driver, seed: int) -> None:
    """Few sizes and values, so that most calls were made before, between others."""
    op = op_of(several_kernels())
    r = random.Random(seed)
    kept: list[tuple[Any, ...]] = []
    blocks = set()
    for _ in range(150):
        call = r.choice(kept) if kept and r.random() < 0.3 else random_call(r)
        kept = [*kept[-30:], call]
        fresh = fresh_launch_of(driver, op, call)
        for _ in range(2):
            assert_same(launch_of(driver, op, call), fresh, call)
        blocks.add(fresh["block"][0])
    assert blocks == {32, 64, 96, 128}


def test_the_sign_of_a_zero_is_kept(driver) -> None:
    op = op_of(several_kernels())
    x = tensors.empty(2, 3)
    found = [
        launch_of(driver, op, (x, None, 1, None, zero, False, "relu"))["params"][3]
        for zero in (0.0, -0.0, 0.0)
    ]
    assert found == ["00000000", "00000080", "00000000"]


def test_an_address_chooses_among_equal_sizes(driver) -> None:
    op = op_of(several_kernels())
    blocks = []
    for offset in (0, 1, 0, 4, 2):
        x = tensors.strided((2, 3), (3, 1), offset=offset)
        launch = launch_of(driver, op, (x, None, 1, None, 0.5, True, "relu"))
        blocks.append(launch["block"][0])
        assert words(launch)[0] // 16 == x.data_ptr() // 16
    assert blocks == [32, 128, 32, 32, 128]


def test_a_wrong_call_after_a_right_one_is_refused(driver) -> None:
    """Patterns are compared at each call."""
    op = op_of(several_kernels())
    x = tensors.empty(4, 4)
    rest = (None, 1, None, 0.5, False, "relu")
    for _ in range(2):
        op(x, *rest)
        refused(op, tensors.empty(4, 4, dtype=torch.float64), *rest, match="wrong dtype")
        refused(op, tensors.empty(4), *rest, match="wrong number of dims")
        refused(op, x, tensors.empty(2, dtype=torch.float16), *rest[1:], match="another dtype")
        one = tensors.strided((4, 4), (4, 1), offset=-1)
        refused(op, one, *rest, match="has elements but no memory")


def test_a_cached_call_updates_its_tensor_maps(driver) -> None:
    """A remembered call has its own tensors' addresses in its tensor maps."""
    kernel = {
        "images": [0],
        "kernel": "tma_box",
        "args": [
            ["tensor_map", {"tensor": "x", "box": [8, 8], "swizzle": None}],
            ["struct", 4, [[0, ["int16", 1]], [2, ["int8", ["size", "x", 0]]]]],
            ["int32", ["number", "n"]],
            ["bytes", "01020304"],
            ["pointer", "out"],
        ],
        "grid": [1, 1, 1],
        "block": [32, 1, 1],
    }
    op = op_of(
        {
            "schema": new_name("maps") + "(Tensor x, int n) -> Tensor",
            "tensors": {
                "x": {"dtype": "float32", "shape": ["m", "k"]},
                "out": {"dtype": "float32", "shape": [64]},
            },
            "outputs": ["out"],
            "kernels": [{**kernel, "when": ["lt", ["number", "n"], 0]}, kernel],
        },
        files=(LAUNCH,),
    )
    for size in ((16, 8), (16, 8), (8, 16), (16, 8)):
        call = (tensors.empty(*size), 3)
        fresh = fresh_launch_of(driver, op, call)
        again = launch_of(driver, op, call)
        assert_same(again, fresh, call)
        assert words(again)[0] == call[0].data_ptr()
    refused(op, tensors.empty(16, 9), 3, match="stride that the hardware does not take")


def test_a_failed_launch_is_not_remembered(driver) -> None:
    op = op_of(several_kernels())
    call = (tensors.empty(2, 3), None, 1, None, 0.5, False, "relu")
    fresh = fresh_launch_of(driver, op, call)
    for _ in range(2):
        driver.fail("cuLaunchKernelEx", 1)
        with pytest.raises(RuntimeError, match="torch_cubin"):
            op(*call)
        assert_same(launch_of(driver, op, call), fresh, call)


def test_a_multiple_need_not_be_a_power_of_two(driver) -> None:
    """24 is not a power of two, so every bit of an address matters."""
    contract = several_kernels()
    contract["kernels"][0]["requires"][0]["multiple_of"] = 24
    op = op_of(contract)
    memory, blocks = tensors.strided((32,), (1,)), []
    for offset in range(24):  # of four bytes: every sixth address is a multiple, wherever it begins
        view = torch.empty(32, device="meta").as_strided((2, 3), (3, 1), offset)
        x = tensors.part(memory, view)
        launch = launch_of(driver, op, (x, None, 1, None, 0.5, True, "relu"))
        assert (launch["block"][0] == 32) == (x.data_ptr() % 24 == 0), offset
        blocks.append(launch["block"][0])
    assert len(set(blocks)) == 2
