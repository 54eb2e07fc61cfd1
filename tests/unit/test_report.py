"""docs/performance.md, the README's table and the plots say what benchmarks/results/ say."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
BENCHMARKS = ROOT / "benchmarks"
sys.path.append(str(BENCHMARKS))

import common  # noqa: E402
import report  # noqa: E402
import report_results  # noqa: E402
from report_sections import SECTIONS  # noqa: E402


def test_pages_and_plots_are_up_to_date() -> None:
    """`python benchmarks/report.py` writes them."""
    assert report.stale() == []


def test_the_page_is_a_few_screens() -> None:
    page = report.PAGE.read_text()
    assert len(page.encode()) <= 20 * 1024
    wide = [line for line in page.splitlines() if len(line) > 100]
    assert [line for line in wide if not line.startswith("|") and "](" not in line] == []


@pytest.mark.parametrize("section", SECTIONS, ids=lambda section: section.title)
def test_commands_are_in_the_tree(section) -> None:
    script, *options = section.command.split()
    path = ROOT / script
    if not path.exists() and not section.measured():
        pytest.skip(f"{script} is to come; the page shows nothing of it yet")
    text = path.read_text()
    assert [name for name in options if name.startswith("--") and f'"{name}"' not in text] == []


def test_a_plot_of_other_data_is_stale(tmp_path: Path) -> None:
    png = (ROOT / "docs" / "matmul.png").read_bytes()
    old = report.report_plots.digest_in(ROOT / "docs" / "matmul.png")
    assert old is not None
    assert re.fullmatch("[0-9a-f]{64}", old)
    changed = tmp_path / "plot.png"
    changed.write_bytes(png.replace(old.encode(), b"0" * 64))
    assert report.report_plots.digest_in(changed) == "0" * 64
    changed.write_bytes(png[:8])
    assert report.report_plots.digest_in(changed) is None


def write(folder: Path, name: str, *lines: tuple[str, float]) -> None:
    text = ", ".join(f'{{"group": "{group}", "case": "x", "value": {v}}}' for group, v in lines)
    (folder / name).write_text(f'{{"results": [{text}]}}')


def test_a_newer_file_replaces_the_groups_that_it_holds(tmp_path: Path) -> None:
    write(tmp_path, "2026-01-01_h200_models.json", ("a", 1.0), ("b", 1.0))
    write(tmp_path, "2026-01-02_h200_models.json", ("a", 2.0), ("a", 8.0))
    write(tmp_path, "2026-01-01_h100_models.json", ("a", 3.0))
    write(tmp_path, "2026-01-03_h100_other_models.json", ("a", 9.0))
    found = report_results.measured("models", report_results.listed, tmp_path)
    assert list(found) == ["H200", "H100"]
    assert {group: run.mean for group, run in found["H200"].items()} == {"a": 4.0, "b": 1.0}
    assert found["H200"]["a"].worst.value == 2.0
    assert found["H100"]["a"].mean == pytest.approx(3.0)


def test_rounding_shows_no_missed_goal_as_met() -> None:
    assert report.aims(report.Goal("", 1.2, 0.988)) == ["1.20", "0.988"]
    assert [report.reached(value, 0.988) for value in (0.984, 0.9879, 0.988)] == [
        *("0.98", "0.98", "0.99")
    ]
    assert [report.reached(value, 1.05) for value in (1.0449, 1.046, 1.05)] == [
        *("1.04", "1.04", "1.05")
    ]
    assert report.reached(0.9876, 0.988, 3) == "0.987"
    assert report.reached(1.046, None) == "1.05"


def test_an_unexplained_miss_is_refused(tmp_path: Path, monkeypatch) -> None:
    reasons = tmp_path / "misses.json"
    reasons.write_text('{"goals/nothing": "no such miss"}')
    monkeypatch.setattr(report, "MISSES", reasons)
    with pytest.raises(SystemExit, match=r"missing \[.*goals/middle.*no longer missed .*nothing"):
        report.misses_table()


@pytest.mark.parametrize(("count", "low", "high"), [(1, 1, 1), (8, 1, 8), (9, 2, 8), (20, 6, 15)])
def test_interval_of_a_median(count: int, low: int, high: int) -> None:
    """The ranks are those of the binomial distribution (a sign test at 5%)."""
    values = [float(x) for x in range(count, 0, -1)]
    assert common.median_interval(values) == (low, high)
    ratio = common.summarise([(x, 2.0) for x in values])
    assert (ratio.low, ratio.high) == (low / 2, high / 2)


def test_groups_have_the_name_of_their_kind() -> None:
    cases = {
        "dX 4 x 8192: N 4096, K 7168": "forward",
        "dW 4 x 8192: N 4096, K 7168": "dW",
        "fast dW 4 x 8192: 4096 x 7168": "dW, e4m3",
        "block 16 uneven, 4 empty: N 4096, K 7168": "block, few",
        "block 8 rows, 256 groups: N 2048, K 7168": "block, many",
        "exact 32 x 256: N 4096, K 7168": "exact, many",
        "DeepSeek-V3, 16 tokens": "layers",
    }
    results = [{"case": case, "us": {"ours": 2.0, "a": 3.0, "b": 5.0}} for case in cases]
    lines = list(report_results.groups({"results": results}))
    assert {line.case: line.group for line in lines} == cases
    assert {line.value for line in lines} == {1.5}
    alone = {"case": "block 16 uneven, 4 empty: N 4096, K 7168", "us": {"ours": 2.0}}
    assert list(report_results.groups({"results": [alone]})) == []


def test_a_section_of_several_benchmarks(tmp_path: Path) -> None:
    write(tmp_path, "2026-01-01_h200_grouped.json", ("a", 1.0))
    write(tmp_path, "2026-01-01_h200_grouped_fp8.json", ("b", 2.0))
    found = report_results.measured("grouped, moe", report_results.listed, tmp_path)
    assert list(found["H200"]) == ["a"]
    found = report_results.measured("grouped, grouped_fp8", report_results.listed, tmp_path)
    assert list(found["H200"]) == ["a", "b"]
