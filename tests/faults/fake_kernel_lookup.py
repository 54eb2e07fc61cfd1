"""Ops of many kernels: which one a call takes, what it costs, and what the error says."""

from __future__ import annotations

import copy
import random
import time
from collections.abc import Callable
from typing import Any

import contracts
import pytest
from contract_calls import op_of
from contracts import new_name
from fake_driver import tensors

pytestmark = pytest.mark.usefixtures("declared")

SCHEMA = "(Tensor x, Tensor? y, int head, str mode, bool causal) -> Tensor"
MOST_BLOCKS = 1024  # kernels differ in their blocks


def op_with(conditions: list[Any], schema: str = SCHEMA) -> Any:
    """One kernel a condition, with blocks of 1, 2, 3, ... threads."""
    contract = contracts.vec_add()
    contract["schema"] = new_name() + schema
    contract["tensors"] = {
        "x": {"dtype": "float32", "shape": None, "align": 4},
        "y": {"dtype": "float32", "shape": None, "align": 4},
        "out": {"dtype": "float32", "shape": [1]},
    }
    pointers = [["pointer", "x"], ["pointer", "x"], ["pointer", "out"]]
    plain = contract["kernels"][0] | {"args": [*pointers, ["int32", 0]]}
    plain["grid"] = [1, 1, 1]
    contract["kernels"] = [
        {**copy.deepcopy(plain), "block": [1 + i % MOST_BLOCKS, 1, 1], "when": when}
        for i, when in enumerate(conditions)
    ]
    return op_of(contract)


Call = tuple[Any, Any, int, str, bool]
# A part of a condition, and whether it holds; None if it has no value.
Part = tuple[Any, Callable[[Call], "bool | None"]]


def size(dim: int) -> Callable[[Call], int | None]:
    return lambda call: call[0].shape[dim] if call[0].dim() > dim else None


def part(random_: random.Random) -> Part:
    n = random_.choice([1, 2, 3])
    mode = random_.choice(["a", "b", "c"])
    dim = random_.choice([0, 0, 1])

    def sized(compare: Callable[[int], bool]) -> Callable[[Call], bool | None]:
        return lambda call: None if size(dim)(call) is None else compare(size(dim)(call))

    return random_.choice([
        (["eq", ["number", "head"], n], lambda call: call[2] == n),
        (["eq", n, ["number", "head"]], lambda call: call[2] == n),
        (["eq", ["mod", ["number", "head"], 2], n % 2], lambda call: call[2] % 2 == n % 2),
        (["eq", ["size", "x", dim], n], sized(lambda found: found == n)),
        (["lt", ["size", "x", dim], n], sized(lambda found: found < n)),
        (["is", "mode", mode], lambda call: call[3] == mode),
        (["not", ["is", "mode", mode]], lambda call: call[3] != mode),
        (["number", "causal"], lambda call: call[4]),
        (["not", ["number", "causal"]], lambda call: not call[4]),
        (["defined", "y"], lambda call: call[1] is not None),
        (["not", ["defined", "y"]], lambda call: call[1] is None),
        (["eq", ["size", "y", 0], n],
         lambda call: None if call[1] is None else call[1].shape[0] == n),
        (["is_dtype", "x", "float32"], lambda call: True),
        (["is_dtype", "x", "float16"], lambda call: False),
        (["eq", ["dim", "x"], n], lambda call: call[0].dim() == n),
        (["eq", ["sm"], 90], lambda call: True),
        (["eq", ["truediv", ["number", "head"], 1], 2], lambda call: call[2] == 2),
        (["or", ["eq", ["number", "head"], n], ["number", "causal"]],
         lambda call: call[2] == n or call[4]),
    ])  # fmt: skip


def condition(random_: random.Random) -> tuple[Any, list[Part]]:
    parts = [part(random_) for _ in range(random_.choice([0, 1, 2, 2, 3, 4]))]
    if not parts:
        return None, []
    tree = parts[0][0]
    for other, _ in parts[1:]:
        tree = ["and", tree, other]
    return tree, parts


def first_taken(listed: list[list[Part]], call: Call) -> int | str:
    """Lookup by asking each kernel; "error" if a condition reads an absent argument."""
    for index, parts in enumerate(listed):
        for _, holds in parts:
            found = holds(call)
            if found is None:
                return "error"
            if not found:
                break
        else:
            return index
    return "none"


def taken(driver, op: Any, call: Call) -> int | str:
    driver.reset()
    try:
        op(*call)
    except RuntimeError as error:
        if "[input]" not in str(error):
            raise
        return "none" if "has no kernel for these arguments" in str(error) else "error"
    (launch,) = driver.launches()
    return launch["block"][0] - 1


@pytest.mark.parametrize("seed", range(12))
def test_a_call_takes_the_first_kernel_whose_condition_holds(driver, seed: int):
    """As if each were asked, however many compare the same things with constants."""
    random_ = random.Random(seed)
    made = [condition(random_) for _ in range(random_.choice([5, 12, 60]))]
    if seed % 2:  # a kernel without a condition takes everything
        made = [one for one in made if one[0] is not None]
    op = op_with([tree for tree, _ in made])
    one, two = tensors.empty(2), tensors.empty(1, 3)
    for _ in range(60):
        call = (
            random_.choice([one, two, tensors.empty(3)]), random_.choice([None, one]),
            random_.choice([1, 2, 3, 4]), random_.choice("abcd"), random_.random() < 0.5,
        )  # fmt: skip
        wanted = first_taken([parts for _, parts in made], call)
        found = taken(driver, op, call)
        # A kernel that cannot fit need not be asked, and so may not have raised.
        assert found == wanted or wanted == "error", (seed, call, found, wanted)


def rows(count: int) -> list[Any]:
    return [
        ["and", ["and", ["eq", ["number", "head"], i // 4], ["is", "mode", "ab"[i % 2]]],
         ["number", "causal"] if i & 2 else ["not", ["number", "causal"]]]
        for i in range(count)
    ]  # fmt: skip


def microseconds(op: Any, *arguments: Any) -> float:
    best = float("inf")
    for _ in range(10):
        begun = time.perf_counter()
        for _ in range(50):
            op(*arguments)
        best = min(best, (time.perf_counter() - begun) / 50)
    return best * 1e6


def test_many_kernels_cost_what_few_cost(driver):
    """The last of 800 kernels: asking each of them took tens of microseconds."""
    x = tensors.empty(2)
    calls = {}
    for count in (2, 84, 800):
        last = count - 1
        calls[count] = op_with(rows(count)), x, None, last // 4, "ab"[last % 2], bool(last & 2)
        assert taken(driver, calls[count][0], calls[count][1:]) == last
    costs = dict.fromkeys(calls, float("inf"))
    for _ in range(20):  # until the machine was quiet for each of them
        for count, call in calls.items():
            costs[count] = min(costs[count], microseconds(*call))
            driver.reset()
        if max(costs.values()) < 1.25 * min(costs.values()):
            return
    raise AssertionError(costs)


OPTIONAL = "(Tensor x, Tensor? y, int? window, int head) -> Tensor"


def test_an_absent_argument_costs_the_same_as_a_given_one(driver):
    """Its number has no value: raising that for the key took more than asking all kernels."""

    def both(a: Any, b: Any) -> list:
        return ["and", a, b]

    def of_window(i: int) -> list:
        return both(["number", "window?"], ["eq", ["number", "window"], i])

    def of_y(i: int) -> list:
        return both(["defined", "y"], ["eq", ["size", "y", 0], i])

    x, most = tensors.empty(2), 700
    for given, absent, of in (
        ((None, 5), (None, None), of_window),
        ((tensors.empty(5), None), (None, None), of_y),
    ):
        conditions = [both(of(i), ["eq", ["number", "head"], i]) for i in range(most)]
        op = op_with([*conditions, ["eq", ["number", "head"], 5]], OPTIONAL)
        assert taken(driver, op, (x, *given, 5)) == 5
        assert taken(driver, op, (x, *absent, 5)) == most
        for _ in range(20):  # until the machine was quiet for both
            quick, slow = microseconds(op, x, *given, 5), microseconds(op, x, *absent, 5)
            driver.reset()
            if slow < 2 * quick:
                break
        else:
            raise AssertionError((quick, slow))


def test_a_key_whose_presence_is_not_checked_has_no_value(driver):
    """Nothing asks whether the window is given: what reads it says so."""
    rows_ = [["eq", ["number", "window"], i] for i in range(20)]
    op = op_with(rows_, OPTIONAL)
    assert taken(driver, op, (tensors.empty(2), None, 7, 0)) == 7
    assert taken(driver, op, (tensors.empty(2), None, None, 0)) == "error"


def test_the_nearest_kernels_are_named(driver):
    op = op_with(rows(84))
    with pytest.raises(RuntimeError) as caught:
        op(tensors.empty(2), None, 500, "a", True)
    said = str(caught.value)
    assert said.startswith("torch_cubin [input]: op ")
    assert "has no kernel for these arguments: expected (head == 0) for kernel 'vec_add'" in said
    assert "the nearest of 84 kernels, got head = 500." in said
    with pytest.raises(RuntimeError) as caught:
        op(tensors.empty(2), None, 20, "c", False)
    assert "expected (mode == 'a') for kernel 'vec_add' or (mode == 'b')" in str(caught.value)
    assert "got mode = 'c'" in str(caught.value)
