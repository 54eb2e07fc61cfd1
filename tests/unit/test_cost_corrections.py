"""The planner of products on the tree's sweeps, and the table that corrects its predictions
(csrc/ops/matmul/cost_corrections.h)."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import numpy
import pytest

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT / "tools"), str(ROOT / "benchmarks")]

import fit_planner  # noqa: E402  (needs the path above)
import planner_numbers  # noqa: E402
import planner_regret  # noqa: E402

TABLE = ROOT / "csrc" / "ops" / "matmul" / "cost_corrections.h"
MOST_NUMBERS = 40


def table() -> dict[str, dict[str, float]]:
    return fit_planner.read_table(TABLE.read_text())


def test_the_table_has_the_form_that_the_command_writes() -> None:
    """Its first line, its form, and no factor twice; those of a GPU in order."""
    assert TABLE.read_text() == fit_planner.table_of(table())
    assert all(list(numbers) == sorted(numbers) for numbers in table().values())


def test_a_gpu_has_few_numbers_and_small_ones() -> None:
    assert set(table()) == {"NVIDIA H200", "NVIDIA H100 80GB HBM3"}
    for gpu, numbers in table().items():
        assert 20 < len(numbers) <= MOST_NUMBERS, gpu
        assert max(map(abs, numbers.values())) < 0.15, gpu


def test_no_number_belongs_to_one_product() -> None:
    """Of tiles, clusters, splits and kernels."""
    tile = r"\d+x\d+( tn|( ping_pong)? of one matrix)?"
    cluster = r" (share_a|share_b|split_k|share_both|four_a|four_b|2x4|4x2|eight_a|eight_b)"
    of_tn = " clusters tn| split_k tn| splits tn"
    others = (
        r" of one matrix| splits| read| swapped| ping_pong| streamed( evenly)?|mma( \d+x\d+x\d+)?"
    )
    pattern = rf"{tile}|{cluster}|{of_tn}|{others}"
    for numbers in table().values():
        assert not [what for what in numbers if not re.fullmatch(pattern, what)]


def test_fitted_numbers_are_few_and_stand_in_one_place() -> None:
    numbers = planner_numbers.fitted()
    assert len(numbers) <= planner_numbers.MOST_FITTED, numbers
    assert not [number for number in numbers if not number.startswith("cost.h: ")]
    assert planner_numbers.integers() == set(planner_numbers.INTEGERS)
    assert len(planner_numbers.ratios()) <= planner_numbers.MOST_RATIOS


@pytest.mark.parametrize(
    ("text", "counted"),
    [
        ("constexpr double kCycles = 2048;", ["2048"]),
        ("double a = 7, b = 0, c = 1;", ["7"]),
        ("if (x < 0.5 * y) return 1.0;  // 3.5", ["0.5"]),
        ('constexpr int64_t kLimit = int64_t{1} << 30; text = "2.5";', []),
        ("double Terms::* value; work.tiles = 2 * tiles;", []),
        ("double tolerance() { return 0x1p-26; }", []),
    ],
)
def test_what_counts_as_a_fitted_number(tmp_path, monkeypatch, text, counted) -> None:
    (tmp_path / "x.cpp").write_text(text + "\n")
    monkeypatch.setattr(planner_numbers, "FOLDER", tmp_path)
    assert planner_numbers.fitted() == [f"x.cpp: {number}" for number in counted]


def test_ratios_are_found(tmp_path, monkeypatch) -> None:
    (tmp_path / "x.cpp").write_text("x *= share(3, 4) + share(part, 4);  // share(1, 2)\n")
    monkeypatch.setattr(planner_numbers, "FOLDER", tmp_path)
    assert planner_numbers.ratios() == ["x.cpp: 3/4"]


def test_other_integers_are_found(tmp_path, monkeypatch) -> None:
    (tmp_path / "x.cpp").write_text("constexpr int64_t kShare = 137; int8_t y = 64 << 20, z = 9;")
    monkeypatch.setattr(planner_numbers, "FOLDER", tmp_path)
    assert planner_numbers.integers() == {("x.cpp", 137)}


def asked(goal: float = 0) -> dict[str, object]:
    """Products whose best config is predicted to be 3% longer than the other one."""
    size = {"m": 512, "n": 512, "a": "k_lines", "b": "k_lines"}

    def config(name: str, us: float, predicted: float) -> dict[str, object]:
        return {"name": name, "us": us, "predicted": predicted, "fixed": 1, "derivatives": [0.1]}

    lines = [
        {"product": {**size, "k": k}, "group": "large" if goal else "", "goal": goal, "torch": 11,
         "configs": [config("sm90 64x128", 11, 10), config("sm90 128x128", 10, 10.3)]}
        for k in range(64, 64 * 20, 64)
    ]  # fmt: skip
    return {"terms": {"launch": 1.0}, "products": lines}


def test_a_fit_lowers_the_regret_and_is_the_same_again() -> None:
    x = fit_planner.Timings(asked())
    assert fit_planner.Fit(x, x.weights).regrets().mean() == pytest.approx(0.1)
    fit, again = fit_planner.fitted(x), fit_planner.fitted(fit_planner.Timings(asked()))
    assert fit.regrets().max() == 0
    assert fit.factors()["64x128"] > fit.factors().get("128x128", 0)
    assert fit.factors() == again.factors()
    regrets, spread = fit_planner.held_out(x, seed=1)
    assert regrets.max() == 0
    assert 0 < spread < 0.01


def test_a_fit_begins_with_a_table_and_keeps_one_that_it_wrote() -> None:
    x = fit_planner.Timings(asked())
    table = {"64x128": 0.02}
    assert fit_planner.Fit(x, x.weights, table).regrets().min() > 0
    found = fit_planner.settled(x, table)
    assert found.regrets().max() == 0
    assert fit_planner.settled(x, found.factors()).factors() == found.factors() != table


def test_the_slope_of_the_loss_is_its_own() -> None:
    """By factors and by terms."""
    x = fit_planner.Timings(asked(goal=1.05))
    fit, softness, more = fit_planner.Fit(x, x.weights), 0.02, 1e-6
    at = numpy.array([0.03, -0.01, 0.02])
    loss, slope = fit.loss(at, softness)
    for number in range(len(at)):
        there = at.copy()
        there[number] += more
        assert (fit.loss(there, softness)[0] - loss) / more == pytest.approx(
            slope[number], rel=1e-3
        )


def test_lines_under_their_goal_cost_more() -> None:
    losses = [
        fit_planner.Fit(x, x.weights).loss(numpy.zeros(3), 0.001)[0]
        for x in (fit_planner.Timings(asked(goal)) for goal in (0, 0.9, 1.05))
    ]
    assert losses[0] == losses[1] < losses[2]


def test_only_so_many_factors_are_kept(monkeypatch) -> None:
    monkeypatch.setattr(fit_planner, "MOST_NUMBERS", 1)
    x = fit_planner.Timings(asked())
    fit = fit_planner.fitted(x)
    assert len(fit.factors()) == 1
    assert fit.regrets().max() == 0


def test_older_times_are_scaled_to_newer_ones(tmp_path) -> None:
    """Of configs that were not measured again; those of a day are averaged."""
    product = {"m": 1, "n": 1, "k": 64, "math": "16_bit", "a": "k_lines", "b": "k_lines"}
    files = {
        "1_h200_sweep.jsonl": {"torch.matmul": 4, "x": 6, "y": 2},
        "2_h200_sweep.jsonl": {"torch.matmul": 2, "x": 3, "z": 1},
        "2_h200_sweep_again.jsonl": {"torch.matmul": 4, "x": 24},
    }
    for (name, times), dtype in zip(
        files.items(), ("float16", "bfloat16", "bfloat16"), strict=True
    ):
        line = {"product": {**product, "dtype": dtype}, "microseconds": times}
        (tmp_path / name).write_text(json.dumps(line) + "\n")
    paths = [tmp_path / name for name in files]
    ((found, times),) = planner_regret.merged_lines("h200", paths[:2])
    assert found["dtype"] == "bfloat16"
    assert times == pytest.approx({"torch.matmul": 2, "x": 3, "y": 1, "z": 1})
    ((_, times),) = planner_regret.merged_lines("h200", paths)
    more = 4  # the mean of 2 and 8
    halves = {"torch.matmul": (4 * 2 * more) ** 0.5, "x": (24 * 3 * more) ** 0.5}
    assert times == pytest.approx({**halves, "y": more, "z": more})
    assert planner_regret.merged_lines("h100", paths) == []


@pytest.mark.parametrize(
    ("gpu", "most"),
    [
        ("h200", {"all": 1.8, "few rows": 2.5, "rows anywhere": 1.2, "others": 1.7}),
        ("h100", {"all": 4.1, "few rows": 5.5, "rows anywhere": 6.8, "others": 3.0}),
    ],
)
def test_the_choices_on_the_sweeps_in_the_tree(gpu: str, most: dict[str, float]) -> None:
    """Regret, in percent, a little above what `python benchmarks/planner_regret.py` prints."""
    torch = pytest.importorskip("torch")
    if torch.version.cuda is not None:
        pytest.skip("the stand-in driver needs a CPU build of torch")
    run = subprocess.run(
        [sys.executable, ROOT / "benchmarks" / "planner_regret.py", "--gpu", gpu],
        capture_output=True,
        text=True,
        check=True,
    )
    found = re.findall(rf"{gpu} ([\w ]+): \d+ products, regret ([\d.]+)%", run.stdout)
    assert {kind: float(regret) <= most[kind] for kind, regret in found} == dict.fromkeys(
        most, True
    )
