"""Writes docs/performance.md, the README's table and the plots of docs/ from benchmarks/results/.

    python benchmarks/report.py            # needs matplotlib (`make report` installs it), no GPU
    python benchmarks/report.py --check    # exits with 1 if page, table or plots are stale

Nothing on these pages is written by hand: groups are in report_sections.py, goals in goals.py, and
the reasons for missed goals in misses.json, which must explain every miss and nothing else.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
import textwrap
from collections.abc import Iterator, Sequence
from pathlib import Path

import report_plots
from goals import Goal
from report_results import Measured
from report_sections import README_ROWS, SECTIONS, Section

COLUMNS = 100
ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "performance.md"
README = ROOT / "README.md"
MISSES = Path(__file__).resolve().parent / "misses.json"
README_TABLE = re.compile(r"(?<=<!-- report.py: begin -->\n).*?(?=<!-- report.py: end -->)", re.S)
INTRODUCTION = """\
# Performance

Written by `python benchmarks/report.py` from the files of `benchmarks/results/`, which the commands
below made: edit those, not this page.

How it is measured: both contenders run in one process, one after the other, in an order that flips
every round; the median round counts. Inputs are random normal numbers that do not fit the L2 cache
together; clocks have settled before a block is measured, so that long calls run at the card's power
limit. Outputs are checked. Above 1 is faster. A mean is a geometric mean over a group's lines;
"worst" is one line. From run to run and card to card a line moves by up to 5%, a group by 1%.
All experiments, kept or not: [benchmarks/NOTES.md]({notes}).
"""


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    first, *rest = (f"| {' | '.join(cells)} |\n" for cells in (header, *rows))
    return first + "|---" * len(header) + "|\n" + "".join(rest)


def numbers(found: Measured | None) -> list[str]:
    return ["-", "-"] if found is None else [f"{found.mean:.2f}", f"{found.worst.value:.2f}"]


def group_table(section: Section) -> str:
    """One row per group; mean and worst line of each GPU."""
    found = section.measured()
    header = ["group", "lines"]
    for gpu in found:
        header += [f"{gpu} mean", "worst"]
    header += ["goal mean", "worst"] if section.goals else []
    rows = []
    for group, title in section.groups.items():
        runs = [groups.get(group) for groups in found.values()]
        sizes = [len(run.lines) for run in runs if run]
        if not sizes:
            continue
        row = [title, str(sizes[0])] + [cell for run in runs for cell in numbers(run)]
        if section.goals:
            goal = section.goals[group]
            row += [f"{goal.mean:.2f}", f"{goal.worst:.2f}"]
        rows.append(row)
    return table(header, rows)


def case_table(section: Section) -> str:
    """One row per case, one column per number; the GPUs' numbers next to each other."""
    found = section.measured()
    values: dict[tuple[str, str], dict[str, float]] = {}
    for gpu, groups in found.items():
        for line in (line for run in groups.values() for line in run.lines):
            values.setdefault((line.case, line.column), {})[gpu] = line.value
    cases = list(dict.fromkeys(case for case, _ in values))
    columns = list(dict.fromkeys(column for _, column in values))
    columns.sort(key=lambda column: column.startswith("backward"))  # stable: forward first

    def cell(case: str, column: str) -> str:
        have = values.get((case, column), {})
        return ", ".join(f"{have[gpu]:.2f}" if gpu in have else "-" for gpu in found)

    rows = [[case, *(cell(case, column) for column in columns)] for case in cases]
    return table([", ".join(found), *columns], rows)


def sources(section: Section) -> str:
    """Links to the files with the section's numbers."""
    links = {}
    for gpu, groups in section.measured().items():
        for run in groups.values():
            date = run.file.name.partition("_")[0]
            links[run.file] = f"[{gpu}, {date}](../benchmarks/results/{run.file.name})"
    return ",\n".join(links[path] for path in sorted(links, reverse=True))


def render_section(section: Section) -> Iterator[str]:
    yield f"## {section.title}\n"
    yield textwrap.fill(section.about, COLUMNS, break_long_words=False) + "\n"
    yield f"`python {section.command}`\n({sources(section)})\n"
    yield case_table(section) if section.by_case else group_table(section)
    if section.plot:
        yield f"![{section.title}: see the table]({section.plot}.png)\n"


def missed(section: Section) -> Iterator[tuple[str, dict[str, Measured]]]:
    """The groups that miss their goal on any GPU, with all GPUs' numbers."""
    found = section.measured()
    for group, goal in section.goals.items():
        runs = {gpu: groups[group] for gpu, groups in found.items() if group in groups}
        if any(is_missed(run, goal) for run in runs.values()):
            yield group, runs


def is_missed(run: Measured, goal: Goal) -> bool:
    return run.mean < goal.mean or run.worst.value < goal.worst


def misses_table() -> str:
    reasons = json.loads(MISSES.read_text())
    rows, seen = [], []
    for section in SECTIONS:
        for group, runs in missed(section):
            goal, key = section.goals[group], f"{section.results}/{group}"
            seen.append(key)
            how_far = "; ".join(
                f"{gpu} {run.mean:.3f}, {run.worst.value:.3f} ({run.worst.case})"
                for gpu, run in runs.items()
                if is_missed(run, goal)
            )
            aim = f"{goal.mean:.2f}, {goal.worst:.2f}"
            rows.append([goal.title, aim, how_far, reasons.get(key, "")])
    if set(seen) != set(reasons):
        unexplained, stale = set(seen) - set(reasons), set(reasons) - set(seen)
        raise SystemExit(
            f"{MISSES.name} must explain each missed goal in one sentence, and nothing else: "
            f"missing {sorted(unexplained)}, no longer missed {sorted(stale)}"
        )
    return table(["what", "goal: mean, worst", "reached", "why"], rows)


def page() -> str:
    parts = [INTRODUCTION.format(notes="../benchmarks/NOTES.md")]
    for section in SECTIONS:
        if section.measured():
            parts += render_section(section)
    parts += ["## Goals that are missed\n", misses_table()]
    return "\n".join(parts)


def readme_table() -> str:
    header = ["speed over cuBLAS, cuDNN or stock PyTorch"]
    gpus = ("H200", "H100")
    for gpu in gpus:
        header += [f"{gpu} mean", "worst"]
    by_results = {section.results: section for section in reversed(SECTIONS)}
    rows = []
    for title, results, group in README_ROWS:
        section = by_results[results]
        found = section.measured()
        cells = [numbers(found.get(gpu, {}).get(group)) for gpu in gpus]
        rows.append([title, *(cell for pair in cells for cell in pair)])
    return table(header, rows)


def readme() -> str:
    return README_TABLE.sub(lambda _: readme_table(), README.read_text())


def stale() -> list[str]:
    """The outputs that differ from the results."""
    found = [path.name for path, text in texts().items() if path.read_text() != text]
    for section in SECTIONS:
        if section.plot:
            path = plot_path(section)
            if report_plots.digest_in(path) != report_plots.digest(section.plot):
                found.append(path.name)
    return found


def texts() -> dict[Path, str]:
    return {PAGE: page(), README: readme()}


def plot_path(section: Section) -> Path:
    return PAGE.parent / f"{section.plot}.png"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true", help="write nothing")
    if parser.parse_args().check:
        sys.exit("\n".join(f"{name} is not up to date" for name in stale()) or None)
    for path, text in texts().items():
        path.write_text(text)
    for section in SECTIONS:
        if section.plot:
            report_plots.draw(section.plot, plot_path(section))


if __name__ == "__main__":
    main()
