"""The planner of products on the tree's sweeps, and the table that corrects its predictions
(csrc/ops/matmul/cost_corrections.h)."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "tools"))

import planner_numbers  # noqa: E402  (needs the path above)

TABLE = ROOT / "csrc" / "ops" / "matmul" / "cost_corrections.h"
MOST_NUMBERS = 40


def table() -> dict[str, dict[str, float]]:
    found: dict[str, dict[str, float]] = {}
    for gpu, what, number in re.findall(
        r'\{"([^"]+)", "([^"]+)", (-?[\d.]+)\},', TABLE.read_text()
    ):
        assert what not in found.setdefault(gpu, {}), what
        found[gpu][what] = float(number)
    return found


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


def test_other_integers_are_found(tmp_path, monkeypatch) -> None:
    (tmp_path / "x.cpp").write_text("constexpr int64_t kShare = 137; int8_t y = 64 << 20, z = 9;")
    monkeypatch.setattr(planner_numbers, "FOLDER", tmp_path)
    assert planner_numbers.integers() == {("x.cpp", 137)}


@pytest.mark.parametrize(
    ("gpu", "most"),
    [
        ("h200", {"all": 1.7, "few rows": 2.5, "rows anywhere": 0.8, "others": 1.7}),
        ("h100", {"all": 3.9, "few rows": 4.9, "rows anywhere": 6.1, "others": 3.1}),
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
