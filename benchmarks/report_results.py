"""Reads benchmarks/results/ for the page of results: one reader per format, the newest run per
group.

A file is named DATE_GPU_NAME.json, for example `2026-11-30_h200_goals.json`; NAME identifies the
benchmark that wrote it, and a section may have several ("grouped, moe"). A later file replaces the
groups that it contains, separately for each GPU, and leaves the others.
"""

from __future__ import annotations

import json
import re
import statistics
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).resolve().parent / "results"
MOST_FEW = 16  # groups, which then are large
FILE_NAME = re.compile(r"(?P<date>\d{4}-\d\d-\d\d)_(?P<gpu>[a-z]+\d+)_(?P<name>\w+)\.json")


@dataclass(frozen=True)
class Line:
    """One measured number. `column` is set if a table has more than one number per case."""

    group: str
    case: str
    value: float
    column: str = ""
    rate: float | None = None  # our TFLOP/s


Reader = Callable[[Any], Iterable[Line]]


@dataclass(frozen=True)
class Measured:
    """A group's lines on one GPU, from the newest file that has any."""

    lines: tuple[Line, ...]
    file: Path

    @property
    def mean(self) -> float:
        return statistics.geometric_mean(line.value for line in self.lines)

    @property
    def worst(self) -> Line:
        return min(self.lines, key=lambda line: line.value)


def measured(name: str, read: Reader, folder: Path = RESULTS) -> dict[str, dict[str, Measured]]:
    """Maps GPU ("H200" before "H100") and group to results."""
    found: dict[str, dict[str, Measured]] = {}
    for path in sorted(folder.glob("*.json")):
        match = FILE_NAME.fullmatch(path.name)
        if match is None or match["name"] not in name.split(", "):
            continue
        groups: dict[str, list[Line]] = {}
        for line in read(json.loads(path.read_text())):
            groups.setdefault(line.group, []).append(line)
        gpu = found.setdefault(match["gpu"].upper(), {})
        gpu |= {group: Measured(tuple(lines), path) for group, lines in groups.items()}
    return {gpu: found[gpu] for gpu in sorted(found, reverse=True)}


def listed(content: Any) -> Iterator[Line]:
    """`results` is a list of {"group", "case", "value"}, the format for new benchmarks."""
    for line in content["results"]:
        yield Line(line["group"], line["case"], line["value"], rate=line.get("rate"))


def products(content: Any) -> Iterator[Line]:
    """bench_goals.py"""
    for line in content["results"]["lines"]:
        yield Line(line["group"], f"{line['product']} {line['what']}".strip(), line["ratio"])


def scaled(content: Any) -> Iterator[Line]:
    """bench_fp8.py"""
    for line in content["results"]:
        if "recipe" in line:
            few = ", few rows" if int(line["case"].split()[1]) <= 128 else ""
            if line["of"]:
                yield Line(line["recipe"] + few, line["case"], line["ratio"])
        else:
            case = line["case"].removeprefix("quantize ")
            for what, value in line["of a copy"].items():
                if what != "copy" and "compiled" not in what:
                    yield Line("quantize", f"{case} {what}", value)
            gate = "silu * up, 1x128"
            if f"{gate}, compiled" in line["us"]:
                ratio = line["us"][f"{gate}, compiled"] / line["us"][gate]
                yield Line("quantize, gate", f"{case} {gate}", ratio)


def groups(content: Any) -> Iterator[Line]:
    """bench_grouped.py and bench_grouped_fp8.py: the best other one's time over ours."""
    for line in content["results"]:
        case, us = line["case"], line["us"]
        what = case.split()[0]
        others = {who: time for who, time in us.items() if who != "ours"}
        if case.endswith("tokens"):
            what = "layers"
        elif " dW " in case:
            what = "dW, e4m3"
        elif what in ("fast", "exact", "block"):
            count = re.match(r"\w+ (\d+) (x|uneven)", case)
            what += ", few" if count and int(count[1]) <= MOST_FEW else ", many"
        elif what == "dX":
            what = "forward"
        if others:
            yield Line(what, case, min(others.values()) / us["ours"])


def options(content: Any) -> Iterator[Line]:
    """The lines of bench_attention_goals.py that are fractions of our own dense rate."""
    for line in content["results"]:
        if line["group"] in ("windows, packed, GQA", "boolean masks"):
            direction, head_dim, case = line["case"].split(" ", 2)
            column = f"{direction} {head_dim.removeprefix('d')}"
            yield Line(line["group"], case, line["value"], column)


def scores(content: Any) -> Iterator[Line]:
    """bench_attention_options.py"""
    for line in content["results"]:
        if line["share"] is not None:
            column = f"{line['direction']} {line['head_dim']}"
            yield Line("scores", line["case"], line["share"], column)


def added_masks(content: Any) -> Iterator[Line]:
    """bench_added_masks.py: cuDNN's time over ours."""
    for line in content["results"]:
        for direction in ("forward", "backward"):
            peer = line.get(f"cuDNN's {direction}")
            if peer is not None:
                column = f"{direction} {line['head_dim']}"
                yield Line("added masks", line["mask"], peer / line[direction], column)


def float8(content: Any) -> Iterator[Line]:
    """The time of our bfloat16 (bench_attention.py --only forward_e4m3) or of cuDNN's float8
    (bench_attention_fp8.py) over ours of float8."""
    for line in content["results"]:
        case = f"head_dim {line['head_dim']}{', causal' if line['causal'] else ''}"
        yield Line("float8", case, line["ratio"], f"{line['length']} rows")


def whole_models(content: Any) -> Iterator[Line]:
    """bench_models.py --models: stock's time over that under install()."""
    for line in content["results"]:
        if line["contender"] == "install":
            action, _, size = line["what"].partition(" ")
            short = size.startswith("1 x")
            mode = {"eager": "eager", "graph": "CUDA graph"}.get(line["mode"], "compiled")
            group = "decode" if action == "decode" else "short" if short else "long"
            yield Line(f"{mode}, {group}", f"{line['model']}, {line['what']}", line["ratio"])


def triton(content: Any) -> Iterator[Line]:
    """bench_triton_launch.py: the host's time with Triton's launcher over that with our op."""
    times = content["microseconds"]
    for name in times:
        case, _, who = name.rpartition(", ")
        if who == "Triton":
            ours = times[f"{case}, op"]["median"]
            yield Line("launch", case, times[name]["median"] / ours)
