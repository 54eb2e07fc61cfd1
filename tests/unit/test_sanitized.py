"""The record of every kernel under compute-sanitizer: tests/gpu/sanitized.py."""

from __future__ import annotations

import json
import re
import signal
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tests"))

from gpu import answers, sanitized  # noqa: E402

RUN = {"date": "2026-11-30 15:00 UTC", "gpu": "G"}
LATER = {"date": "2026-12-01 09:00 UTC", "gpu": "G"}


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    (tmp_path / "tests" / "gpu").mkdir(parents=True)
    (tmp_path / "torch_cubin" / "cubins").mkdir(parents=True)
    build(tmp_path, sum="1", finish_matmul_f32="2", gone="3")
    return tmp_path


def build(tree: Path, **hashes: str) -> None:
    kernels = [{"name": k, "arch": "sm_90a", "sha256": v * 64} for k, v in hashes.items()]
    text = json.dumps({"kernels": [*kernels, {"name": "old", "arch": "sm_80", "sha256": "4"}]})
    (tree / "torch_cubin/cubins/manifest.json").write_text(text)


def add(tree: Path, run: dict, tool: str, *names: str, **reports: str) -> None:
    record, kernels = sanitized.read(tree), sanitized.built(tree)
    sanitized.join(record, run, tool, {name: kernels[name] for name in names}, reports)
    sanitized.write(tree, record, kernels)


def test_a_result_holds_as_long_as_the_cubin_is_the_same(tree: Path) -> None:
    assert "no record" in sanitized.describe(tree)
    add(tree, RUN, "memcheck", "sum", "gone")
    add(tree, RUN, "initcheck", "sum", "finish_matmul_f32")
    assert "memcheck 2 of 3 (0 with reports)" in sanitized.describe(tree)
    # It reads what the TMA wrote, which initcheck cannot follow.
    assert "initcheck 1 of 2 (0 with reports)" in sanitized.describe(tree)
    build(tree, sum="5", finish_matmul_f32="2", gone="3")
    record, kernels = sanitized.read(tree), sanitized.built(tree)
    assert sanitized.missing(record, kernels, "memcheck") == ["finish_matmul_f32", "sum"]
    add(tree, LATER, "racecheck", "sum")
    record = sanitized.read(tree)
    assert record["runs"] == [RUN, LATER]
    assert record["kernels"]["sum"] == {"cubin": "5" * 16, "racecheck": 1}
    build(tree, sum="5", finish_matmul_f32="2")
    add(tree, LATER, "racecheck", "finish_matmul_f32")
    record = sanitized.read(tree)
    assert record["runs"] == [LATER], "nothing is left of the other"
    assert set(record["kernels"]) == {"sum", "finish_matmul_f32"}


def test_reports_stay_until_the_kernel_is_clean_or_another_one(tree: Path) -> None:
    add(tree, RUN, "memcheck", "sum", "gone", sum="Invalid read", gone="Invalid write")
    assert "memcheck 2 of 3 (2 with reports)" in sanitized.describe(tree)
    add(tree, RUN, "racecheck", "sum")
    assert sanitized.read(tree)["reports"] == {
        "memcheck": {"sum": "Invalid read", "gone": "Invalid write"}
    }
    add(tree, LATER, "memcheck", "gone")
    assert sanitized.read(tree)["reports"] == {"memcheck": {"sum": "Invalid read"}}
    add(tree, LATER, "memcheck", "gone", gone="Invalid write")
    build(tree, sum="1", finish_matmul_f32="2")
    add(tree, LATER, "racecheck", "sum")
    assert sanitized.read(tree)["reports"] == {"memcheck": {"sum": "Invalid read"}}
    build(tree, sum="6", gone="3")
    add(tree, LATER, "racecheck", "sum")
    assert sanitized.read(tree)["reports"] == {}


def test_records_of_other_trees_are_joined_where_the_cubin_is_the_same(tree: Path) -> None:
    add(tree, RUN, "memcheck", "sum")
    other = {
        "runs": [{"date": "other"}, LATER],
        "reports": {"memcheck": {"gone": "Invalid read"}, "racecheck": {"sum": "Race"}},
        "kernels": {
            "sum": {"cubin": "1" * 16, "memcheck": 0, "racecheck": 1},
            "finish_matmul_f32": {"cubin": "7" * 16, "memcheck": 1},
            "gone": {"cubin": "3" * 16, "memcheck": 1},
            "only there": {"cubin": "3" * 16, "memcheck": 1},
        },
    }
    record, kernels = sanitized.read(tree), sanitized.built(tree)
    sanitized.merge(record, other, kernels)
    sanitized.write(tree, record, kernels)
    record = sanitized.read(tree)
    assert record["runs"] == [RUN, LATER]
    assert record["kernels"] == {
        "gone": {"cubin": "3" * 16, "memcheck": 1},
        "sum": {"cubin": "1" * 16, "memcheck": 0, "racecheck": 1},
    }
    assert record["reports"] == other["reports"]


@pytest.mark.parametrize("content", ["", "{}", "[]", '{"runs": 1}'])
def test_a_record_that_cannot_be_read_says_so(tree: Path, content: str) -> None:
    (tree / sanitized.RECORD).write_text(content)
    assert "cannot be read" in sanitized.describe(tree)


def test_kernels_that_a_tool_names() -> None:
    output = """
{"wrong": [], "of": "sum"}
========= Error: Race reported between Write access at sum+0x10 in sum.cu:3
=========     and Read access at sum+0x20 [4 hazards]
========= RACECHECK SUMMARY: 1 hazard displayed (1 error, 0 warnings)
"""
    named = sanitized.named_in(output, {"sum": "1", "gone": "2"})
    assert named == {"sum": "Error: Race reported between Write access at sum+0x10 in sum.cu:3"}


def test_every_built_kernel_has_a_scenario() -> None:
    kernels = sanitized.built(ROOT)
    if not kernels:
        pytest.skip("the kernels are not built for sm_90a")
    patterns = [scenario.kernels for scenario in sanitized.SCENARIOS]
    assert [k for k in kernels if not any(re.search(p, k) for p in patterns)] == []
    for parts in sanitized.UNTRACKED.values():
        assert [part for part in parts if not any(part in name for name in kernels)] == []


def test_a_summary_says_whether_reports_were_cut_off() -> None:
    assert not sanitized.is_cut_off("========= ERROR SUMMARY: 99999 errors")
    assert sanitized.is_cut_off("========= ERROR SUMMARY: 204800 errors")
    assert sanitized.is_cut_off("========= RACECHECK SUMMARY: 100000 hazards displayed")


def test_a_scenario_ends_when_its_time_is_up(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    def endless(seconds: str) -> dict:
        while True:
            time.sleep(float(seconds))

    waits = []
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: waits.append(1))
    before = signal.getsignal(signal.SIGALRM)
    monkeypatch.setenv(answers.ENDS, str(time.time() + 60))
    try:
        assert answers.in_time(lambda *given: {"given": given}, "a", "b") == {"given": ("a", "b")}
        monkeypatch.setenv(answers.ENDS, str(time.time() + 0.2))
        assert answers.in_time(endless, "0.01") == {"wrong": [], "was_ended": True}
        assert waits == [1]
        assert signal.getitimer(signal.ITIMER_REAL) == (0, 0)
    finally:
        signal.signal(signal.SIGALRM, before)


def test_calls_of_a_run_that_may_be_ended_come_in_another_order(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def shuffled() -> list[int]:
        calls = [*range(50)]
        answers.shuffle(calls)
        return calls

    monkeypatch.delenv(answers.ENDS, raising=False)
    assert shuffled() == shuffled()
    orders = []
    for ends in ("1000.5", "2000.5"):
        monkeypatch.setenv(answers.ENDS, ends)
        orders.append(shuffled())
        assert shuffled() == orders[-1]
    assert orders[0] != orders[1]
