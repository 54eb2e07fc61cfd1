"""torch_cubin compared with torch on the shapes of public models (models.py): products, whole
blocks, and whole models in PyTorch's own modes.

    python benchmarks/bench_models.py --products --json result.json    # about four minutes
    python benchmarks/bench_models.py --blocks --json result.json      # about two minutes
    python benchmarks/bench_models.py --products --every 3 --json result.json    # a third of them
    python benchmarks/bench_models.py --models --json result.json      # about six minutes
    python benchmarks/bench_models.py --models --device cpu --small    # to try the script
    python benchmarks/bench_models.py --sweep lines.jsonl --seconds 300

Products and blocks are CUDA graphs in one process, interleaved in a random order in short rounds,
after the clocks have settled. A ratio above 1 means that torch_cubin is faster. `--sweep` times
every config that the planner could choose for each product, so that a loss can be attributed to the
choice or to the kernel; its lines have the format of `python -m torch_cubin tune --sweep`.

The file is written after each product, block or cell (a model, what it does, a mode), so that a run
that ends early keeps what it measured; directions take turns, so that it has some of each.
`--models` skips the cells that the file has: a run with `--seconds` is continued by the same
command. Compiling takes most of the time of `--models`; so that models compile at the same time
and are measured one after the other, run a process for each, with one file and one empty folder:

    for model in "infer 8 x" "train 4 x" BERT; do
      python benchmarks/bench_models.py --models --only "$model" --turns FOLDER 3 --json FILE &
    done
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import os
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import bench_goals
import common
import model_blocks
import model_products
import models
import served_calls
import torch
import whole_model_cases
import whole_models
from goals import MODELS as GOALS
from turns import Turns

from torch_cubin._tuning import measure, sweep

SWEEP_EFFORT = measure.Effort(settle_ms=10, rounds=6, near=1.6, most_configs=16)


def product_lines(
    only: Sequence[str], directions: Sequence[str], every: int
) -> Iterator[tuple[str, Callable]]:
    of_directions = []
    for first, direction in enumerate(directions):
        every_one = model_products.distinct(models.products(), direction)
        chosen = [x for x in every_one[first % every :: every] if matches(x.model, only)]
        of_directions.append([(direction, x) for x in chosen])
    for together in itertools.zip_longest(*of_directions):
        for direction, x in filter(None, together):
            yield (
                f"{direction} {x}",
                lambda s, x=x, d=direction: model_products.measured(x, d, s),
            )


def block_lines(only: Sequence[str], every: int) -> Iterator[tuple[str, Callable]]:
    for model in models.MODELS[::every]:
        if not matches(model.name, only):
            continue
        for direction in model_blocks.DIRECTIONS:
            name = f"{direction} {model.name}"
            yield name, lambda s, m=model, d=direction: model_blocks.measured(m, d, s)


def whole(options: argparse.Namespace, only: Sequence[str]) -> tuple[list[Any], list[str]]:
    device, modes = torch.device(options.device), options.modes.split(",")
    contenders = options.contenders.split(",")
    cells, failures = cells_in(options.json), []
    have = {(cell.model, cell.what, cell.mode) for cell in cells}
    end = time.monotonic() + options.seconds

    def wanted() -> Iterator[tuple[whole_model_cases.Case, list[str]]]:
        for case in whole_model_cases.cases(options.small):
            key = case.model, f"{case.what} {case.batch} x {case.length}"
            left = [mode for mode in case.modes if mode in modes and (*key, mode) not in have]
            if matches(str(case), only) and left and time.monotonic() <= end:
                yield case, left

    def processes_of(case: whole_model_cases.Case) -> whole_models.Processes:
        return whole_models.Processes(case, device, options.small, contenders)

    if options.calls:
        for case, _ in wanted():
            runner = whole_models.Runner(case, device)
            served_calls.print_lines(str(case), served_calls.lines_of(runner.run))
        return cells, failures
    turns = None
    prepared: dict[str, tuple[whole_models.Processes, list[str]]] = {}

    def prepare(processes: whole_models.Processes, modes: list[str]) -> list[str]:
        """Those of the modes in which it succeeded."""
        succeeded = []
        for mode in modes:
            try:
                processes.prepare(mode)
                succeeded.append(mode)
            except Exception as error:  # the other cells have their numbers
                failures.append(f"{processes.case}, {mode}: {type(error).__name__}: {error}")
        return succeeded

    if options.turns:
        folder, number = options.turns
        turns = Turns(Path(folder), int(number))
        for case, left in wanted():
            processes = processes_of(case)
            prepared[str(case)] = processes, prepare(processes, left)
        turns.wait_for_others(str(os.getpid()))
    for case, left in wanted():
        if str(case) in prepared:
            processes, left = prepared.pop(str(case))
        else:
            processes = processes_of(case)
            left = prepare(processes, left)
        for mode in left:
            if time.monotonic() > end:
                break
            with turns.turn() if turns else contextlib.nullcontext():
                begin = time.monotonic()
                try:
                    found = list(processes.measured(mode, options.kernels))
                except Exception as error:
                    failures.append(f"{case}, {mode}: {type(error).__name__}: {error}")
                    continue
                cells += found
                print(
                    f"{case}, {mode}: {time.monotonic() - begin:.1f} s, of stock "
                    + ", ".join(
                        f"{cell.contender} {cell.ratio:.3f} ({cell.low:.2f}-{cell.high:.2f})"
                        for cell in found
                    ),
                    flush=True,
                )
                in_file = cells_in(options.json) + found if turns else cells
                common.write_json(options.json, [asdict(cell) for cell in in_file])
        processes.close()
    return cells, failures


def cells_in(path: str | None) -> list[whole_models.Cell]:
    if path is None or not Path(path).exists():
        return []
    content = json.loads(Path(path).read_text())
    if content["machine"] != common.machine():
        raise SystemExit(f"{path} is of another machine: {content['machine']}")
    return [whole_models.Cell(**cell) for cell in content["results"]]


def matches(name: str, only: Sequence[str]) -> bool:
    return not only or any(part in name for part in only)


def run(
    work: Iterator[tuple[str, Callable]],
    lines: list[Any],
    options: argparse.Namespace,
) -> list[str]:
    """Adds to `lines`, which are written as they come; returns the failures."""
    failures = []
    end = time.monotonic() + options.seconds
    for number, (name, measured) in enumerate(work):
        if time.monotonic() > end:
            print(f"--seconds: {name} and what follows are not measured", flush=True)
            break
        try:
            for line in measured(number):
                lines.append(line)
                common.write_json(options.json, [asdict(line) for line in lines])
                if options.lines:
                    print(
                        f"{line.value:6.3f} ({line.low:.3f}-{line.high:.3f}) "
                        f"{line.cubin_us:9.1f} us  {line.group:32} {line.case}  "
                        f"{getattr(line, 'config', '')}",
                        flush=True,
                    )
        except Exception as error:  # keep the numbers of the other lines
            failures.append(f"{name}: {type(error).__name__}: {error}")
        torch.cuda.empty_cache()
    return failures


def print_summary(lines: Sequence[Any], markdown: bool) -> None:
    rows = []
    for group, goal in GOALS.items():
        members = [line for line in lines if line.group == group]
        if not members:
            continue
        worst = min(members, key=lambda line: line.value)
        mean = common.geometric_mean([line.value for line in members])
        under = sum(line.value < goal.worst for line in members)
        surely = sum(line.high < goal.worst for line in members)
        rows.append(
            [
                *(group, str(len(members)), f"{mean:.3f}", f"{goal.mean:.2f}"),
                *(f"{worst.value:.3f}", f"{goal.worst:.2f}", f"{under} ({surely})", worst.case),
            ]
        )
    headers = ["group", "lines", "mean", "goal", "worst", "goal", "under it (surely)", "worst line"]
    common.print_table(headers, rows, markdown)


def main() -> None:
    parser = common.parser(__doc__, markdown=True)
    parser.add_argument("--products", action="store_true")
    parser.add_argument("--blocks", action="store_true")
    parser.add_argument("--models", action="store_true", help="whole models, by transformers")
    modes = ",".join(whole_model_cases.MODES)
    parser.add_argument("--modes", default=modes, help=f"of --models: some of '{modes}'")
    contenders = ",".join(whole_models.CONTENDERS)
    parser.add_argument(
        "--contenders", default="stock,drop_in,install", help=f"some of '{contenders}'"
    )
    parser.add_argument("--device", default="cuda", help="of --models")
    parser.add_argument(
        "--calls", action="store_true", help="of --models: time their products and attentions"
    )
    parser.add_argument(
        "--kernels", action="store_true", help="of --models: also print the time of kernels"
    )
    parser.add_argument(
        "--turns",
        nargs=2,
        metavar=("FOLDER", "N"),
        help="of --models: one of N processes, which prepare together and measure in turns",
    )
    parser.add_argument("--small", action="store_true", help="of --models: tiny ones")
    parser.add_argument("--answer", metavar="CASE", help=argparse.SUPPRESS)
    parser.add_argument("--sweep", metavar="FILE", type=Path, help="append to these lines")
    parser.add_argument(
        "--seconds",
        type=float,
        default=float("inf"),
        help="no new product, block, cell or line of --sweep after these, for each of the options",
    )
    parser.add_argument(
        "--every",
        type=int,
        default=1,
        metavar="N",
        help="only every N-th product of a direction, or every N-th block: always the same ones",
    )
    parser.add_argument("--only", metavar="MODEL,...", default="", help="parts of models' names")
    directions = ";".join(model_products.DIRECTIONS)
    parser.add_argument("--directions", default=directions, help=f"some of '{directions}'")
    parser.add_argument("--lines", action="store_true", help="print every line")
    options = parser.parse_args()
    torch.manual_seed(0)
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
    if options.answer:
        cases = whole_model_cases.cases(options.small)
        case = next(case for case in cases if str(case) == options.answer)
        return whole_models.answer(case, torch.device(options.device))
    if options.device == "cuda":
        common.require_gpu()
        common.print_machine("torch_cubin beside torch on the shapes of models (GPU time, graphs)")
    only = [part for part in options.only.split(",") if part]
    wanted_directions = options.directions.split(";")
    lines: list[Any] = []
    failures: list[str] = []
    for wanted, work in (
        (options.products, product_lines(only, wanted_directions, options.every)),
        (options.blocks, block_lines(only, options.every)),
    ):
        if wanted:
            failures += run(work, lines, options)
    if lines:
        print_summary(lines, options.markdown)
    if options.models:
        cells, more_failures = whole(options, only)
        whole_models.print_cells(cells, options.markdown)
        lines += cells
        failures += more_failures
    if options.device == "cuda":
        print(f"clocks and power at the end: {bench_goals.clocks()}")
    if not options.turns:  # the others have written to the same file
        common.write_json(options.json, [asdict(line) for line in lines])
    if options.sweep:
        found = [x for x in models.products() if matches(x.model, only)]
        work = model_products.sweep_products(found, wanted_directions)
        sweep.sweep(work, options.sweep, SWEEP_EFFORT, options.seconds, show=False)
    common.end_with(failures)


if __name__ == "__main__":
    main()
