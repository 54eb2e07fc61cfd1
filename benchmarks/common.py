"""Shared by the benchmarks: description of the machine, alternating timing, tables.

How a ratio is measured: both contenders run in one process, one block after the other, in an order
that flips every round. Each block first runs unmeasured until the clocks have settled; without
this, a slow contender leaves power budget to the next one (a false 1.16x was seen on an H200). A
round gives one ratio; the median over the rounds and its interval are reported.

After some milliseconds, large products run at the card's power limit, where a kernel that uses more
energy per product loses more clock. `rest_ms` measures the other regime: a few milliseconds of work
after a rest, at full clocks, like a product between lighter work.
"""

from __future__ import annotations

import argparse
import functools
import json
import math
import platform
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parents[1]
# For the checkout's torch_cubin, unless one is installed, tests/numerics.py, and the examples.
sys.path += [str(ROOT), str(ROOT / "tests"), str(ROOT / "examples")]


@functools.cache
def machine() -> dict[str, str]:
    """GPU, driver and versions, printed above every table."""
    import torch_cubin

    query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        driver = subprocess.run(
            query, capture_output=True, text=True, timeout=30, check=True
        ).stdout
    except (OSError, subprocess.SubprocessError):
        driver = "unknown\n"
    gpu = "none"
    if torch.cuda.is_available():
        found = torch.cuda.get_device_properties(0)
        gpu = f"{found.name}, {found.multi_processor_count} multiprocessors"
    return {
        "GPU": gpu,
        "driver": driver.splitlines()[0],
        "torch": torch.__version__,
        "torch_cubin": getattr(torch_cubin, "__version__", "unknown"),
        "python": platform.python_version(),
    }


def print_machine(title: str) -> None:
    print(title)
    print(", ".join(f"{name} {value}" for name, value in machine().items()))
    print(f"command: python {' '.join(sys.argv)}\n", flush=True)


def parser(description: str | None, markdown: bool = False) -> argparse.ArgumentParser:
    """One with --json, whose file write_json() writes, and where tables are printed --markdown."""
    made = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    made.add_argument("--json", metavar="FILE", help="write all numbers")
    if markdown:
        made.add_argument("--markdown", action="store_true", help="print tables in Markdown")
    return made


def begin(title: str) -> None:
    """Ends the process where there is no GPU, else prints what the numbers below are of."""
    require_gpu()
    print_machine(title)


def require_gpu() -> None:
    if not torch.cuda.is_available():
        sys.exit("This benchmark needs a CUDA device; torch sees none.")


def graph_of(
    calls: Sequence[Callable[[], torch.Tensor]], alive: int = 1
) -> tuple[torch.cuda.CUDAGraph, torch.Tensor]:
    """Returns a CUDA graph of the calls in order, and the output of the last one.

    The outputs of the last `alive` calls are kept while the next one runs, so that outputs rotate
    over that many blocks of memory.
    """
    calls[0]()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        outputs: list[torch.Tensor] = []
        for call in calls:
            outputs = [*outputs[-alive:], call()]
    return graph, outputs[-1]


def milliseconds(run: Callable[[], object], count: int) -> float:
    """GPU time of `count` runs together."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    for _ in range(count):
        run()
    end.record()
    end.synchronize()
    return start.elapsed_time(end)


def interleaved(
    runs: Mapping[str, Callable[[], object]],
    block_ms: float,
    rounds: int = 5,
    settle_ms: float = 0,
) -> dict[str, float]:
    """Median microseconds of each contender, interleaved in blocks of block_ms, in another order
    each round. Each block begins with settle_ms of unmeasured runs, in which the clocks settle."""
    counts = {}
    for name, run in runs.items():
        milliseconds(run, 3)
        counts[name] = max(2, int(block_ms * 2 / milliseconds(run, 2)))
    times: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(rounds):
        for name, run in random.sample(list(runs.items()), len(runs)):
            for _ in range(max(1, int(counts[name] * settle_ms / block_ms))):
                run()
            times[name].append(milliseconds(run, counts[name]) / counts[name] * 1e3)
    return {name: statistics.median(x) for name, x in times.items()}


@dataclass(frozen=True)
class Ratio:
    """Microseconds per call of both contenders, and first / second (above 1: second is faster),
    with the interval of that median."""

    first_us: float
    second_us: float
    ratio: float
    low: float
    high: float


def summarise(rounds: Sequence[tuple[float, float]]) -> Ratio:
    """Medians of (first, second) microseconds, one pair per round, and of their ratios."""
    ratios = [first / second for first, second in rounds]
    low, high = median_interval(ratios)
    return Ratio(
        first_us=statistics.median(first for first, _ in rounds),
        second_us=statistics.median(second for _, second in rounds),
        ratio=statistics.median(ratios),
        low=low,
        high=high,
    )


def median_interval(values: Sequence[float]) -> tuple[float, float]:
    """Two of the values, between which lies the median of what they were drawn from, in 95% of all
    cases: of up to 8 values the least and the largest, of 20 the sixth and the fifteenth."""
    count = len(values)
    rank, tail = 0, 2.0**-count  # the probability that at most `rank` of them are below the median
    while (more := tail + math.comb(count, rank + 1) * 2.0**-count) <= 0.025:
        rank, tail = rank + 1, more
    ordered = sorted(values)
    return ordered[rank], ordered[count - 1 - rank]


def alternate(
    first: Callable[[], object],
    second: Callable[[], object],
    calls_per_run: int,
    budget_ms: float,
    rounds: int = 6,
    rest_ms: float = 0,
) -> Ratio:
    """Medians of alternated()."""
    return summarise(alternated(first, second, calls_per_run, budget_ms, rounds, rest_ms))


def alternated(
    first: Callable[[], object],
    second: Callable[[], object],
    calls_per_run: int,
    budget_ms: float,
    rounds: int = 6,
    rest_ms: float = 0,
) -> list[tuple[float, float]]:
    """Microseconds of two functions on the GPU in each round, alternating; the first half of each
    block is not measured.

    With `rest_ms`, each block is a rest of that long, one unmeasured run and 3 ms measured.
    """
    contenders = (first, second)
    if rest_ms:
        budget_ms = 3 * 4 * rounds
    counts = []
    for run in contenders:
        once = min(milliseconds(run, 1) for _ in range(2))
        counts.append(max(1, round(budget_ms / rounds / 4 / max(once, 1e-3))))
    results = []
    for number in range(rounds):
        order = (0, 1) if number % 2 == 0 else (1, 0)
        times = [0.0, 0.0]
        for index in order:
            run, count = contenders[index], counts[index]
            if rest_ms:
                torch.cuda.synchronize()
                time.sleep(rest_ms / 1e3)
            for _ in range(1 if rest_ms else count):
                run()
            times[index] = milliseconds(run, count) / count / calls_per_run * 1e3
        results.append((times[0], times[1]))
    return results


def geometric_mean(values: Sequence[float]) -> float:
    return math.exp(sum(map(math.log, values)) / len(values))


def print_times(
    what: str,
    times: dict[str, list[float]],
    columns: dict[str, Callable[[str, float], str]],
    markdown: bool,
) -> None:
    """Prints one row per contender: its median and quartiles in microseconds, and one column for
    each function of `columns`, called with the name and the median."""
    rows = []
    for name, values in times.items():
        low, middle, high = statistics.quantiles(values, n=4)
        more = [column(name, middle) for column in columns.values()]
        rows.append([name, f"{middle:.2f}", f"{low:.2f}-{high:.2f}", *more])
    print_table([what, "us", "quartiles", *columns], rows, markdown)


def print_target(what: str, value: float, target: float, shown: str = "{:.2f}") -> None:
    """Prints whether a measured value is at most its target."""
    verdict = "met" if value <= target else "MISSED"
    print(f"{what}: {shown.format(value)} (target {target}: {verdict})")


def print_table(headers: Sequence[str], rows: Sequence[Sequence[str]], markdown: bool) -> None:
    """Prints the table, aligned for a terminal or as Markdown."""
    if markdown:
        print("| " + " | ".join(headers) + " |")
        print("|" + "---|" * len(headers))
        for row in rows:
            print("| " + " | ".join(row) + " |")
        return
    widths = [max(len(row[i]) for row in (headers, *rows)) for i in range(len(headers))]
    for row in (headers, *rows):
        print("  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)))
    sys.stdout.flush()


def end_with(failures: Sequence[str]) -> None:
    """Prints the lines that failed, and exits with status 1 if there are any."""
    for failure in failures:
        print(f"FAILED {failure}")
    if failures:
        raise SystemExit(1)


def write_json(path: str | None, results: object) -> None:
    if path:
        content = {"machine": machine(), "command": sys.argv, "results": results}
        Path(path).write_text(json.dumps(content, indent=1) + "\n")
