"""What kernels require of arguments, tuned tables and workspaces: which kernel a call takes."""

from __future__ import annotations

import copy

import contracts
import pytest
from contract_calls import integer, op_of, pointer, refused
from contracts import new_name
from fake_driver import tensors
from unit import elf_builder

pytestmark = pytest.mark.usefixtures("declared")


def op_with(*kernels: dict, **more):
    """vec_add by kernels that differ in their blocks: 32, 64, ..."""
    contract = contracts.vec_add() | more
    plain = contract["kernels"][0]
    contract["kernels"] = [
        {**copy.deepcopy(plain), "block": [32 * (i + 1), 1, 1], **kernel}
        for i, kernel in enumerate(kernels)
    ]
    return op_of(contract)


def chosen(driver, op, *arguments) -> int:
    """The number of the kernel that a call launches."""
    driver.reset()
    op(*arguments)
    (launch,) = driver.launches()
    return launch["block"][0] // 32 - 1


NUMEL = ["numel", "x"]
SIXTEENTHS = {"argument": "n_elements", "value": NUMEL, "multiple_of": 16}


def test_a_required_multiple_selects_the_kernel(driver):
    op = op_with({"requires": [SIXTEENTHS]})
    assert chosen(driver, op, tensors.empty(32), tensors.empty(32)) == 0
    short = tensors.empty(33)
    refused(op, short, short, match="argument 'n_elements' a multiple of 16, got 33")
    op = op_with({"requires": [SIXTEENTHS]}, {})
    assert chosen(driver, op, tensors.empty(32), tensors.empty(32)) == 0
    assert chosen(driver, op, short, short) == 1


def test_an_address(driver):
    """A pattern's align=4 beside a kernel that was compiled for 16."""
    requires = [{"argument": "x_ptr", "address_of": "x", "multiple_of": 16}]
    tensors_ = copy.deepcopy(contracts.vec_add()["tensors"])
    tensors_["x"]["align"] = 4
    op = op_with({"requires": requires}, tensors=tensors_)
    y = tensors.empty(8)
    assert chosen(driver, op, tensors.empty(8), y) == 0
    shifted = tensors.strided((8,), (1,), offset=1)
    refused(op, shifted, y, match="'x_ptr' at an address that is a multiple of 16, got an address")
    assert chosen(driver, op_with({"requires": requires}, {}, tensors=tensors_), shifted, y) == 1
    assert op(tensors.empty(0), tensors.empty(0)).shape == (0,)


def test_values(driver):
    cases = [
        ({"value": NUMEL, "equals": 8}, 8, 9),
        ({"value": ["lt", NUMEL, 9], "equals": True}, 8, 9),
        ({"value": ["truediv", NUMEL, 2], "equals": 4.0}, 8, 9),
        ({"value": ["truediv", NUMEL, 2], "equals": 4}, 8, 9),
        ({"value": NUMEL, "at_least": 5, "at_most": 8}, 8, 9),
        ({"value": NUMEL, "at_least": 9, "at_most": 20}, 9, 8),
    ]
    for requirement, right, wrong in cases:
        op = op_with({"requires": [{"argument": "stride", **requirement}]}, {})
        x = tensors.empty(right)
        assert chosen(driver, op, x, x) == 0, requirement
        x = tensors.empty(wrong)
        assert chosen(driver, op, x, x) == 1, requirement
        only = op_with({"requires": [{"argument": "stride", **requirement}]})
        refused(only, x, x, match="argument 'stride' ")


def test_of_many_kernels_the_first_few_are_named(driver):
    def requires(n):
        return {"requires": [{"argument": "n", "value": NUMEL, "equals": n}]}

    op = op_with(*(requires(100 + i) for i in range(9)))
    with pytest.raises(RuntimeError) as caught:
        op(tensors.empty(3), tensors.empty(3))
    assert "x.numel is 100 or " in str(caught.value)
    assert ", the nearest of 9 kernels, got 3." in str(caught.value)
    assert "108" not in str(caught.value)


def image(arch: int) -> bytes:
    info = b"".join(elf_builder.param(i, 8 * i, 4 if i == 3 else 8) for i in range(4))
    info += elf_builder.value(0x19, 28)
    kernel = elf_builder.Kernel("vec_add", info)
    return elf_builder.Cubin(kernels=[kernel], flags=0x06000004 | arch << 8).build()


def test_kernels_for_other_gpus_are_passed_over(driver):
    """The device is 9.0. A kernel without code for it is never chosen."""
    contract = contracts.vec_add()
    plain = contract["kernels"][0]
    contract["kernels"] = [
        {**plain, "images": [1], "block": [64, 1, 1]},
        {**plain, "images": [0], "block": [32, 1, 1]},
    ]
    files = (image(90), image(80))
    op = op_of(contract, files=files)
    import torch_cubin

    driver.declare(torch_cubin.load(list(files)))
    x = tensors.empty(8)
    assert chosen(driver, op, x, x) == 0
    contract = copy.deepcopy(contract) | {"schema": new_name() + "(Tensor x, Tensor y) -> Tensor"}
    contract["kernels"][1]["images"] = [0]
    elsewhere = op_of(contract, files=(image(100), image(80)))
    refused(elsewhere, x, x, match="compute capability 9.0", tag="arch")


def test_tuned_tables(driver):
    key = [["size", "x", 0], ["next_power_of_2", ["size", "x", 1]], ["dtype", "x"]]
    entries = [[[2, 8, "float32"], 1], [[2, 16, "float32"], 2], [[3, 8, "float32"], 3]]
    entries += [[[2, 8, "float64"], 0]]
    kernels = [{"group": 0}, {"group": 1, "requires": [SIXTEENTHS]}, {"group": 2}, {"group": 3}]
    kernels += [{"group": 1, "requires": [{"argument": "n", "value": NUMEL, "equals": 14}]}]
    op = op_with(*kernels, tuned={"key": key, "entries": entries, "otherwise": 0})
    for shape, want in (
        ((2, 8), 1),  # the first of the group that takes it
        ((2, 7), 4),  # the other of the group
        ((2, 5), 0),  # no kernel of the group: the group for unknown keys is used
        ((2, 16), 2),
        ((2, 9), 2),
        ((3, 5), 3),
        ((4, 8), 0),
        ((2, 17), 0),
    ):
        x = tensors.empty(*shape)
        assert chosen(driver, op, x, x) == want, shape


def test_a_large_tuned_table(driver):
    """Every key of 3,000 is found, and no other."""
    entries = [[[7 * n, -n], 1 + n % 40] for n in range(3000)]
    kernels = [{"group": group, "block": [32, 1, 1], "shared_memory": group} for group in range(41)]
    key = [["size", "x", 0], ["neg", ["size", "x", 1]]]
    op = op_with(*kernels, tuned={"key": key, "entries": entries, "otherwise": 0})
    for n in (1, 2, 77, 1500, 2999):
        for rows, group in ((7 * n, 1 + n % 40), (7 * n + 1, 0)):
            driver.reset()
            x = tensors.empty(rows, n)
            op(x, x)
            assert driver.launches()[0]["shared"] == group


def test_str_and_bool_keys_in_a_tuned_table(driver):
    contract = contracts.vec_add()
    contract["schema"] = new_name() + "(Tensor x, Tensor y, str mode, bool flag) -> Tensor"
    plain = contract["kernels"][0]
    contract["kernels"] = [{**plain, "group": i, "block": [32 * (i + 1), 1, 1]} for i in range(3)]
    contract["tuned"] = {
        "key": [["text", "mode"], ["number", "flag"], ["mul", 0.5, ["numel", "x"]]],
        "entries": [[["fast", True, 4.0], 1], [["fast", False, 4.0], 2]],
        "otherwise": 0,
    }
    op = op_of(contract)
    x = tensors.empty(8)
    for arguments, want in ((("fast", True), 1), (("fast", False), 2), (("slow", True), 0)):
        assert chosen(driver, op, x, x, *arguments) == want


def test_workspaces(driver):
    contract = contracts.vec_add()
    workspace = {"bytes_per_block": ["mul", 100, ["dim", "x"]], "align": 1024}
    contract["kernels"][0]["args"][1] = ["workspace", workspace]
    op = op_of(contract)
    x = tensors.empty(1000)
    op(x, x)
    (launch,) = driver.launches()
    assert launch["grid"] == [4, 1, 1]
    assert pointer(launch, 1) % 1024 == 0
    assert pointer(launch, 1) not in (0, pointer(launch, 0), pointer(launch, 2))
    assert integer(launch, 3) == 1000
    contract = contracts.vec_add()
    contract["kernels"][0]["args"][1] = ["workspace", {"bytes": ["sub", ["numel", "x"], 8]}]
    op = op_of(contract)
    driver.reset()
    op(tensors.empty(8), tensors.empty(8))
    assert pointer(driver.launches()[0], 1) == 0  # no bytes
    refused(op, tensors.empty(7), tensors.empty(7), match="a size out of range")
    contract = contracts.vec_add()
    contract["kernels"][0]["args"][1] = ["workspace", {"bytes_per_block": 2**62}]
    refused(op_of(contract), x, x, match="a size out of range")
