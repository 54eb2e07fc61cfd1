"""What torch_cubin.tune keeps of a declared op: which calls it serves, where it lies, its cost.

Longer than files should be: all of it shares the ops and tables that are made at the top.
"""

from __future__ import annotations

import copy
import json
import math
import random
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import contracts
import pytest
import torch
from contract_calls import declare, op_of, refused
from contracts import new_name
from fake_driver import tensors

import torch_cubin
from torch_cubin import errors
from torch_cubin._native import library
from torch_cubin._tuning import op_calls, store

SCHEMA = "(Tensor x, Tensor? y, int head, str mode, float scale) -> Tensor"


@pytest.fixture(autouse=True)
def cache(driver, clean, tmp_path, monkeypatch) -> Path:
    declare(driver)
    monkeypatch.setenv("TORCH_CUBIN_CACHE", str(tmp_path))
    return tmp_path


def contract_with(conditions: list[Any], groups: list[int] | None = None) -> dict[str, Any]:
    """One kernel a condition, with blocks of 1, 2, 3, ... threads."""
    contract = contracts.vec_add()
    contract["schema"] = new_name() + SCHEMA
    contract["tensors"] = {
        "x": {"dtype": "T", "shape": None, "align": 4},
        "y": {"dtype": "float32", "shape": None, "align": 4},
        "out": {"dtype": "float32", "shape": [1]},
    }
    contract["dtypes"] = {"T": ["float32", "float16"]}
    pointers = [["pointer", "x"], ["pointer", "x"], ["pointer", "out"]]
    plain = contract["kernels"][0] | {"args": [*pointers, ["int32", 0]]}
    plain["grid"] = [1, 1, 1]
    contract["kernels"] = [
        {**copy.deepcopy(plain), "block": [1 + i, 1, 1], "when": when}
        for i, when in enumerate(conditions)
    ]
    for kernel, group in zip(contract["kernels"], groups or (), strict=bool(groups)):
        kernel["group"] = group
    return contract


def taken(driver, op: Any, *call: Any) -> int:
    driver.reset()
    op(*call)
    (launch,) = driver.launches()
    return launch["block"][0] - 1


def name_of(op: Any) -> str:
    return op.name()


def watched(op: Any, *call: Any) -> dict[str, Any]:
    library.watch_op(name_of(op))
    try:
        op(*call)
        return library.watched_calls()[-1]
    finally:
        library.watch_op(None)


def table_of(op: Any, kernel: int, /, *call: Any, **changes: Any) -> dict[str, Any]:
    file = library.tuned_file(name_of(op), 0)
    entry = {"op": name_of(op), "hash": file["hash"]}
    seen = watched(op, *call)
    entry["calls"] = [{"key": seen["key"], "kernel": kernel, "instead_of": seen["chosen"]}]
    head = {"version": 1, "gpu": file["gpu"], "driver": file["driver"]}
    return {**head, "ops": [entry | {k: v for k, v in changes.items() if k in entry}]} | {
        k: v for k, v in changes.items() if k in head
    }


@pytest.mark.parametrize("count", [2, 3, 40])
def test_a_tuned_call_takes_its_kernel_and_other_calls_take_theirs(driver, count: int) -> None:
    op = op_of(contract_with([None] * count))
    x = tensors.empty(4, 6)
    calls = [
        (x, None, 1, "a", 0.5),
        (tensors.empty(4, 7), None, 1, "a", 0.5),
        (tensors.empty(6, 4), None, 1, "a", 0.5),
        (tensors.empty(24), None, 1, "a", 0.5),
        (tensors.empty(4, 6, dtype=torch.float16), None, 1, "a", 0.5),
        (x, x, 1, "a", 0.5),
        (x, None, 2, "a", 0.5),
        (x, None, 1, "b", 0.5),
    ]
    assert {taken(driver, op, *call) for call in calls} == {0}
    library.add_tuned_table(table_of(op, count - 1, *calls[0]))
    assert [taken(driver, op, *call) for call in calls] == [count - 1] + [0] * (len(calls) - 1)
    # Floats vary from step to step: they do not distinguish calls unless a condition reads them.
    assert taken(driver, op, x, None, 1, "a", 0.25) == count - 1
    # A second table adds to the first, and replaces what it says again.
    library.add_tuned_table(table_of(op, 1, *calls[5]))
    library.add_tuned_table(table_of(op, 0, *calls[0]))
    assert [taken(driver, op, *calls[i]) for i in (0, 5, 6)] == [0, 1, 0]


def test_every_part_of_a_random_key_counts(driver) -> None:
    """Each call has a kernel of its own, found among the others'."""
    op = op_of(contract_with([None] * 64))
    calls = [
        (tensors.empty(*shape, dtype=dtype), y, head, mode, 1.0)
        for shape in [(), (1,), (2,), (1, 2), (2, 1), (0, 3)]
        for dtype in (torch.float32, torch.float16)
        for y in (None, tensors.empty(1))
        for head in (-1, 1 << 40)
        for mode in ("", "a")
    ][:63]
    table = table_of(op, 1, *calls[0])
    table["ops"][0]["calls"] = [
        {"key": watched(op, *call)["key"], "kernel": 1 + i, "instead_of": 0}
        for i, call in enumerate(calls)
    ]
    library.add_tuned_table(json.loads(json.dumps(table)))
    assert [taken(driver, op, *call) for call in calls] == list(range(1, 64))


def test_a_kernel_that_does_not_fit_is_never_taken(driver) -> None:
    """The table is a proposal: conditions and requirements are asked as before."""
    small = ["lt", ["number", "scale"], ["truediv", 1, 2]]
    op = op_of(contract_with([["le", ["truediv", 1, 2], ["number", "scale"]], small, None]))
    x = tensors.empty(4)
    call = watched(op, x, None, 1, "a", 0.25)
    assert (call["chosen"], call["fits"], call["same"]) == (1, [1, 2], [1])
    assert call["key"]["scale"] == 0.25  # a condition reads it
    table = table_of(op, 0, x, None, 1, "a", 0.25)  # of a kernel whose condition does not hold
    library.add_tuned_table(table)
    assert taken(driver, op, x, None, 1, "a", 0.25) == 1
    library.add_tuned_table(table_of(op, 2, x, None, 1, "a", 0.75))
    assert [taken(driver, op, x, None, 1, "a", s) for s in (0.25, 0.5, 0.75)] == [1, 0, 2]


def test_strides_count_where_a_condition_reads_them(driver) -> None:
    contract = contract_with([["contiguous", "x"], None])
    contract["tensors"]["x"] = {"dtype": "float32", "shape": None, "layout": "strided", "align": 4}
    del contract["dtypes"]
    op = op_of(contract)
    plain, turned = tensors.empty(4, 4), tensors.strided((4, 4), (1, 4))
    library.add_tuned_table(table_of(op, 1, plain, None, 1, "a", 1.0))
    assert taken(driver, op, plain, None, 1, "a", 1.0) == 1
    assert watched(op, turned, None, 1, "a", 1.0)["key"]["x"] == ["float32", [4, 4], [1, 4]]


def test_a_tuned_table_overrides_the_autotuner_for_its_call_only(driver) -> None:
    contract = contract_with([None] * 3, groups=[0, 1, 2])
    contract["tuned"] = {"key": [["number", "head"]], "entries": [[[7], 1]], "otherwise": 0}
    op = op_of(contract)
    x = tensors.empty(4)
    assert [taken(driver, op, x, None, head, "a", 1.0) for head in (7, 8)] == [1, 0]
    assert watched(op, x, None, 7, "a", 1.0)["same"] == [0, 1, 2]
    library.add_tuned_table(table_of(op, 2, x, None, 7, "a", 1.0))
    assert [taken(driver, op, x, None, head, "a", 1.0) for head in (7, 8)] == [2, 0]


def test_kernels_are_forced_in_the_thread_that_watches(driver) -> None:
    op, other = op_of(contract_with([None] * 3)), op_of(contract_with([None] * 3))
    arguments = tensors.empty(4), None, 1, "a", 1.0
    found = []
    library.watch_op(name_of(op))
    try:
        for kernel in (2, 1, -1):
            library.force_kernel(kernel)
            found.append(taken(driver, op, *arguments))
        library.force_kernel(2)
        found.append(taken(driver, other, *arguments))
        driver.reset()
        thread = threading.Thread(target=lambda: op(*arguments))
        thread.start()
        thread.join()
        found.append(driver.launches()[0]["block"][0] - 1)
        for wrong in (3, -2):
            with pytest.raises(errors.InputError, match="is none of an op that is watched"):
                library.force_kernel(wrong)
    finally:
        library.watch_op(None)
    found.append(taken(driver, op, *arguments))
    assert found == [2, 1, 0, 0, 0, 0]
    with pytest.raises(errors.InputError, match="is none of an op that is watched"):
        library.force_kernel(0)
    never = op_of(contract_with([["eq", ["number", "head"], i] for i in range(2)]))
    library.watch_op(name_of(never))
    try:
        library.force_kernel(1)
        refused(never, tensors.empty(4), None, 0, "a", 1.0, match="has no kernel for these")
    finally:
        library.watch_op(None)


SIXTEENTHS = {"argument": "x_ptr", "address_of": "x", "multiple_of": 16}


def test_a_table_serves_only_calls_that_would_take_the_same_kernel(driver) -> None:
    """Alignment is not part of a key: the kernel of a misaligned call is not used for aligned ones,
    nor the reverse, for any condition of the second kernel."""
    for condition in (None, ["le", 0, ["number", "head"]]):
        contract = contract_with([None, condition, None])
        contract["kernels"][0]["requires"] = [SIXTEENTHS]
        op = op_of(contract)
        aligned = tensors.empty(8), None, 1, "a", 1.0
        shifted = tensors.strided((8,), (1,), offset=1), None, 1, "a", 1.0
        assert [watched(op, *call)["chosen"] for call in (aligned, shifted)] == [0, 1]
        library.add_tuned_table(table_of(op, 2, *shifted))
        assert [taken(driver, op, *call) for call in (aligned, shifted)] == [0, 2]
        library.add_tuned_table(table_of(op, 1, *aligned))
        assert [taken(driver, op, *call) for call in (aligned, shifted)] == [1, 2]


def test_a_kernel_with_more_shared_memory_than_a_block_may_have_does_not_fit(driver) -> None:
    contract = contract_with([None] * 3)
    contract["kernels"][1]["shared_memory"] = ["mul", 1 << 18, ["number", "head"]]
    call = watched(op_of(contract), tensors.empty(8), None, 1, "a", 1.0)
    assert (call["fits"], call["same"]) == ([0, 2], [0, 2])


def kept_file(op: Any) -> Path:
    return Path(library.tuned_file(name_of(op), 0)["path"])


def test_a_file_is_found_at_the_first_call(driver, cache) -> None:
    """This simulates a later process: an op with the same content has another name."""
    contract = contract_with([None] * 3)
    op = op_of(contract)
    call = tensors.empty(5), None, 1, "a", 1.0
    table = table_of(op, 2, *call)
    path = kept_file(op)
    assert path.parent == cache / "tuned"
    # The op is known by what it does: here, another op's file under this one's name.
    second = op_of({**contract, "schema": new_name() + SCHEMA})
    assert kept_file(second) != path
    table["ops"][0] |= {
        "op": name_of(second),
        "hash": library.tuned_file(name_of(second), 0)["hash"],
    }
    store.keep(table, kept_file(second))
    assert taken(driver, second, *call) == 2
    assert taken(driver, op, *call) == 0


@pytest.mark.parametrize(
    "damage",
    [
        {"gpu": "Some other GPU"},
        {"driver": "1.0"},
        {"hash": "0" * 64},
        {"version": 2},
        {"calls": [{"key": {}, "kernel": 0}]},
        {"calls": 5},
        {"op": "another::op"},
        "{",
        "[]",
        '{"version": 1}',
        "[" * 100_000,
    ],
    ids=lambda damage: str(damage)[:20],
)
def test_a_damaged_stored_file_is_not_used(driver, damage) -> None:
    op = op_of(contract_with([None] * 3))
    call = tensors.empty(5), None, 1, "a", 1.0
    path = kept_file(op)
    path.parent.mkdir(parents=True)
    # Described by an op of the same content, whose calls asked for a file of their own.
    contract = contract_with([None] * 3)
    table = table_of(op_of(contract), 2, *call)
    table["ops"][0] |= {"op": name_of(op), "hash": library.tuned_file(name_of(op), 0)["hash"]}
    if isinstance(damage, str):
        path.write_text(damage)
    else:
        table |= {k: v for k, v in damage.items() if k in table}
        table["ops"][0] |= {k: v for k, v in damage.items() if k in table["ops"][0]}
        path.write_text(json.dumps(table))
    assert taken(driver, op, *call) == 0


@pytest.mark.parametrize(
    "bad",
    [{"key": {}, "kernel": 0, "instead_of": 0}, {"key": {"x": 1}}, 5, {"key": 5, "kernel": 99}],
    ids=str,
)
def test_a_bad_line_of_a_file_is_skipped(driver, bad) -> None:
    contract = contract_with([None] * 3)
    call = tensors.empty(5), None, 1, "a", 1.0
    table = table_of(op_of(contract), 2, *call)
    op = op_of(contract_with([None] * 3))
    table["ops"][0] |= {"op": name_of(op), "hash": library.tuned_file(name_of(op), 0)["hash"]}
    bad_table = copy.deepcopy(table)
    bad_table["ops"][0]["calls"] = [bad]
    store.write(bad_table, kept_file(op))
    assert store.keep(table, kept_file(op)) == ""
    assert taken(driver, op, *call) == 2


def test_the_user_s_home_is_found_without_its_variable(driver, monkeypatch) -> None:
    for name in ("TORCH_CUBIN_CACHE", "XDG_CACHE_HOME", "HOME"):
        monkeypatch.delenv(name, raising=False)
    path = kept_file(op_of(contract_with([None] * 3)))
    assert path.parent == Path.home() / ".cache" / "torch_cubin" / "tuned"


@pytest.mark.parametrize(
    ("table", "message"),
    [
        ([], "a tuned table cannot be used"),
        ({"version": 1}, "a tuned table cannot be used"),
        ({"version": 1, "gpu": "Fake GPU", "products": 5}, "no list of products"),
        ({"version": 1, "gpu": "Fake GPU", "products": [5]}, "got the line 5"),
        (
            {"version": 1, "gpu": "Fake GPU", "driver": "1", "ops": 5},
            "expected 'ops', a list, got 5",
        ),
    ],
    ids=str,
)
def test_a_malformed_table_is_refused_with_a_readable_message(
    driver, tmp_path, table, message
) -> None:
    (tmp_path / "table.json").write_text(json.dumps(table))
    with pytest.raises(errors.InputError, match=message) as caught:
        torch_cubin.load_tuned(tmp_path / "table.json")
    assert "json.exception" not in str(caught.value)


def test_without_a_cache_folder_nothing_is_read(driver, monkeypatch) -> None:
    monkeypatch.setenv("TORCH_CUBIN_CACHE", "0")
    op = op_of(contract_with([None] * 3))
    assert library.tuned_file(name_of(op), 0)["path"] is None
    assert taken(driver, op, tensors.empty(5), None, 1, "a", 1.0) == 0


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"gpu": "H999"}, "GPU that this process does not have: expected Fake GPU, got H999"),
        ({"driver": "1.0"}, "measured with another driver"),
        ({"hash": "0" * 64}, "measured with other kernels of op"),
        ({"version": 2}, "cannot be used: expected version 1"),
        ({"op": "no::such"}, "is not a declared op of this process"),
        ({"calls": [{"key": {}, "kernel": 0, "instead_of": 0}]}, "values by name"),
        ({"calls": [{"key": {}, "kernel": 0}]}, "that of the one it stands in for"),
        ({"calls": [{"key": {"x": 1}}]}, "a key, the number of a kernel"),
    ],
)
def test_a_loaded_table_for_another_gpu_or_op_is_refused(driver, tmp_path, change, message) -> None:
    op = op_of(contract_with([None] * 3))
    call = tensors.empty(5), None, 1, "a", 1.0
    store.write(table_of(op, 2, *call, **change), tmp_path / "table.json")
    with pytest.raises(errors.Error, match=message):
        torch_cubin.load_tuned(tmp_path / "table.json")
    assert taken(driver, op, *call) == 0
    store.write(table_of(op, 2, *call), tmp_path / "table.json")
    assert torch_cubin.load_tuned(tmp_path / "table.json") == 1
    assert taken(driver, op, *call) == 2


def test_a_kernel_number_past_the_last_is_refused(driver) -> None:
    op = op_of(contract_with([None] * 3))
    call = tensors.empty(5), None, 1, "a", 1.0
    for number in (3, -1, 1.0, True, None, 1 << 70):
        table = table_of(op, number, *call)
        refused(lambda t=table: library.add_tuned_table(t), match="number of a kernel")


def test_damage_anywhere_in_a_table_is_an_error_or_nothing(driver) -> None:
    """Values of every kind in every place: a call takes a kernel that fits, whatever is loaded."""
    op = op_of(contract_with([None] * 3))
    call = tensors.empty(5), tensors.empty(2), 1, "a", 1.0
    good = json.dumps(table_of(op, 2, *call))
    random_ = random.Random(3)
    values = [None, True, -1, 1 << 70, 1.5, "", "float32", [], [1], {}, [[[]]], "x" * 300, {"x": 1}]

    def damage(tree: Any, depth: int = 0) -> Any:
        if random_.random() < 0.08 and depth:
            return copy.deepcopy(random_.choice(values))
        if isinstance(tree, dict):
            return {k: damage(v, depth + 1) for k, v in tree.items() if random_.random() > 0.02}
        if isinstance(tree, list):
            return [damage(v, depth + 1) for v in tree for _ in range(random_.choice([1, 1, 1, 2]))]
        return tree

    taken_over = 0
    for _ in range(600):
        try:
            library.add_tuned_table(damage(json.loads(good)))
            taken_over += 1
        except errors.Error as error:
            assert error.tag == "input", error  # noqa: PT017
        assert taken(driver, op, *call) in (0, 1, 2)
    assert 0 < taken_over < 600


def best_of(function: Callable[[], object], count: int = 200) -> float:
    begun = time.perf_counter()
    for _ in range(count):
        function()
    return (time.perf_counter() - begun) / count * 1e6


def test_the_look_up_costs_less_than_a_tenth_of_a_microsecond(driver) -> None:
    """Beside the same op without a table, interleaved, among a thousand other calls."""
    plain, tuned = op_of(contract_with([None] * 3)), op_of(contract_with([None] * 3))
    call = tensors.empty(4, 8, 16), tensors.empty(4), 1, "a", 1.0
    table = table_of(tuned, 0, *call)
    key = table["ops"][0]["calls"][0]["key"]
    table["ops"][0]["calls"] += [
        {"key": key | {"head": i, "mode": "bc"[i % 2]}, "kernel": 1, "instead_of": 0}
        for i in range(1000)
    ]
    library.add_tuned_table(table)
    costs = {plain: math.inf, tuned: math.inf}
    for _ in range(200):  # until the machine was quiet for both
        for op in costs:
            costs[op] = min(costs[op], best_of(lambda op=op: op(*call)))
            driver.reset()
        if costs[tuned] - costs[plain] < 0.1 and min(costs.values()) < math.inf:
            break
    assert costs[tuned] - costs[plain] < 0.1, costs
    print(f"without a table {costs[plain]:.3f} us, with one {costs[tuned]:.3f} us")


def test_measured_candidates_of_a_call(driver, monkeypatch) -> None:
    """The rounds are given here: nothing can be timed on this driver, nor computed."""
    contract = contract_with([None, None, ["eq", ["number", "head"], 1], None])
    raw = op_of(contract)
    op = (
        op_calls.find(name_of(raw))
        or torch_cubin._declared.op._adopt(library.defined_ops())[name_of(raw)]
    )
    monkeypatch.setattr(op_calls, "_copied", lambda args, kwargs: (args, kwargs))
    monkeypatch.setattr(op_calls, "_spoil", lambda tensors: None)
    far = {1: "its results differ"}
    forced = []

    def difference(found, wanted):
        forced.append(driver.launches()[-1]["block"][0] - 1)
        return far.get(forced[-1], "")

    monkeypatch.setattr(op_calls, "_difference", difference)

    def timer(op, args, kwargs, kernels, effort):
        return {kernel: [10.0 - kernel, 11.0 - kernel] for kernel in kernels}

    call = tensors.empty(4), None, 1, "a", 1.0
    times = op_calls.measure_call(op, call, {}, timer=timer)
    assert (times.chosen, sorted(times.rounds), times.differ) == (0, [0, 3], far)
    assert (times.elsewhere, times.best, forced) == ([2], 3, [1, 3])
    times = op_calls.measure_call(op, call, {}, timer=timer, any_condition=True)
    assert (sorted(times.rounds), times.elsewhere) == ([0, 2, 3], [])
    library.add_tuned_table(op_calls.table_of(op, 0, [times]))
    assert taken(driver, raw, *call) == 3


def adopted(contract: dict[str, Any]) -> Any:
    name = name_of(op_of(contract))
    return torch_cubin._declared.op._adopt(library.defined_ops())[name]


def test_a_kernel_that_cannot_be_launched_is_skipped(driver, monkeypatch) -> None:
    contract = contract_with([None] * 3)
    contract["kernels"][1]["block"] = [["mul", 4096, ["number", "head"]], 1, 1]
    op = adopted(contract)
    monkeypatch.setattr(op_calls, "_copied", lambda args, kwargs: (args, kwargs))
    monkeypatch.setattr(op_calls, "_spoil", lambda tensors: None)
    monkeypatch.setattr(op_calls, "_difference", lambda found, wanted: "")
    call = tensors.empty(4), None, 1, "a", 1.0
    times = op_calls.measure_call(op, call, {}, timer=lambda *a: {k: [1.0] for k in a[3]})
    assert sorted(times.rounds) == [0, 2]
    assert "does not run" in times.differ[1]


def test_a_call_that_one_kernel_fits_has_no_line(driver, monkeypatch) -> None:
    contract = contract_with([None] * 2)
    contract["kernels"][0]["requires"] = [SIXTEENTHS]
    op = adopted(contract)
    monkeypatch.setattr(op_calls, "_copied", lambda args, kwargs: (args, kwargs))
    monkeypatch.setattr(op_calls, "_spoil", lambda tensors: None)
    monkeypatch.setattr(op_calls, "_difference", lambda found, wanted: "")
    shifted = tensors.strided((8,), (1,), device=1, offset=1), None, 1, "a", 1.0
    times = op_calls.measure_call(op, shifted, {}, timer=lambda *a: {k: [1.0] for k in a[3]})
    assert (times.chosen, list(times.rounds), times.device) == (1, [1], 1)
    assert op_calls.table_of(op, 1, [times])["ops"][0]["calls"] == []


def test_an_op_with_one_kernel_is_refused(driver) -> None:
    with pytest.raises(errors.InputError, match="the op has one kernel"):
        op_calls.measure_call(adopted(contract_with([None])), (tensors.empty(4),), {})
