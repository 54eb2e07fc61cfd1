"""python -m torch_cubin tune --sweep: measures the configs of many products, writes a tuned table.

Lines are appended to a file as they are measured; an interrupted sweep continues at its end. The
table contains the products for which a config is quicker than the cost model's choice.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from torch_cubin import errors
from torch_cubin._native import library
from torch_cubin._tuning import measure, store
from torch_cubin._tuning.products import Operands, Product

TABLE_VERSION = 1
CUBES = (512, 768, 1024, 1536, 2048, 3072, 4096, 6144, 8192, 16384)
# (N, K) of the projections of an 8B and a 70B language model.
PROJECTIONS = (
    *((4096, 4096), (6144, 4096), (28672, 4096), (4096, 14336)),
    *((10240, 8192), (8192, 8192), (57344, 8192), (8192, 28672)),
)
ROWS = (1, 2, 4, 8, 16, 32, 64, 96, 128, 192, 256, 384, 512, 768, 1024, 2048, 4096, 8192)


def standard_products(layouts: Sequence[str] = ("nt", "nn")) -> Iterator[Product]:
    """Cubes and a language model's projections in bfloat16, the short ones first."""
    shapes = {(size, size, size) for size in CUBES}
    shapes |= {(m, n, k) for m in ROWS for n, k in PROJECTIONS}
    for m, n, k in sorted(shapes, key=lambda shape: shape[0] * shape[1] * shape[2]):
        for layout in layouts:
            yield Product.of_layout(m, n, k, layout, "bfloat16")


def run(options: argparse.Namespace) -> int:
    """The command: see torch_cubin/__main__.py for its arguments."""
    if not torch.cuda.is_available():
        raise errors.fault("no_device", "the sweep", "needs a CUDA device, and torch sees none")
    layouts = options.layouts.split(",")
    if options.sweep:
        products = list(standard_products(layouts))
    else:
        products = [
            Product.of_layout(m, n, k, layout, options.dtype)
            for m, n, k in map(shape_of, options.shapes.split(","))
            for layout in layouts
        ]
    lines = sweep(products, options.lines, measure.Effort(), options.seconds)
    for line in lines:
        print(summary_of(line))
    if options.table:
        store.write(table_of(lines), options.table)
        print(f"{options.table}: {errors.counted(len(table_of(lines)['products']), 'product')}")
    return 0


def shape_of(text: str) -> list[int]:
    """MxNxK"""
    sizes = text.split("x")
    if len(sizes) != 3 or not all(size.isdigit() and int(size) > 0 for size in sizes):
        raise errors.fault("input", "--shapes", "has no shape", expected="MxNxK", got=text)
    return [int(size) for size in sizes]


def summary_of(line: dict[str, Any]) -> str:
    product = Product(**line["product"])
    times = line["microseconds"]
    text = f"{product!s:<32} {times[line['best']]:>9.1f} us  {line['torch']:.3f} of torch's speed"
    if line["best"] != line["chosen"]:
        text += f"  '{line['best']}' is {line['gain']:.1%} quicker than '{line['chosen']}'"
    return text


def sweep(
    products: Sequence[Product],
    lines: Path,
    effort: measure.Effort,
    seconds: float = float("inf"),
    show: bool = True,
) -> list[dict[str, Any]]:
    """Measures the products that the file `lines` does not contain yet; returns all its lines."""
    done = read_lines(lines)
    known = {json.dumps(line["product"], sort_keys=True) for line in done}
    todo = [p for p in products if json.dumps(dataclasses.asdict(p), sort_keys=True) not in known]
    operands = Operands(torch.device("cuda", torch.cuda.current_device()))
    start = time.monotonic()
    if lines.exists() and not lines.read_bytes().endswith(b"\n"):
        # The last process ended within a line, to which new lines would be appended.
        whole = lines.with_name(lines.name + ".whole")
        whole.write_text("".join(json.dumps(line) + "\n" for line in done))
        whole.replace(lines)  # atomic: an interruption loses nothing
    with lines.open("a") as file:
        for index, product in enumerate(todo):
            if time.monotonic() - start > seconds:
                break
            times = measure.measure(product, operands, effort, beside_torch=True, seed=index)
            line = line_of(times)
            file.write(json.dumps(line) + "\n")
            file.flush()
            done.append(line)
            if show:
                _show_progress(index + 1, len(todo), start, product)
    if show and todo:
        print(file=sys.stderr)
    return done


def read_lines(path: Path) -> list[dict[str, Any]]:
    """The lines of a sweep's file, whose last line may be incomplete; [] without a file."""
    lines = []
    for number, text in enumerate(path.read_text().splitlines() if path.exists() else []):
        try:
            lines.append(json.loads(text))
        except ValueError:
            if number + 1 < len(path.read_text().splitlines()):
                raise errors.fault("input", f"sweep '{path}'", "is damaged", got=text) from None
    return lines


def line_of(times: measure.Times) -> dict[str, Any]:
    best = times.best()
    return {
        "product": dataclasses.asdict(times.product),
        "chosen": times.chosen,
        "best": best,
        "tuned": times.tuned,
        "gain": times.ratio(best, times.chosen) - 1,
        "torch": times.ratio(best, measure.TORCH),
        "microseconds": {name: round(times.median(name), 3) for name in times.rounds},
        "predicted": {n: round(t, 3) for n, t in times.predicted.items() if n in times.rounds},
    }


def table_of(lines: Sequence[dict[str, Any]], least_gain: float = 0.01) -> dict[str, Any]:
    """The tuned table of a sweep on this GPU (docs/tuning.md): configs that are quicker than the
    cost model's choice, or that a table already names and are still the quickest."""
    products = {}
    for line in lines:
        if line["gain"] > least_gain or line["best"] == line["tuned"]:
            product = Product(**line["product"])
            products[product] = {**product.line(), "way": line["best"]}
    return {"version": TABLE_VERSION, **measured_on(), "products": list(products.values())}


def measured_on() -> dict[str, Any]:
    """The GPU and the versions, for a table's head."""
    device = library.device(torch.cuda.current_device())
    query = ["nvidia-smi", "--query-gpu=clocks.sm,clocks.max.sm,power.draw,power.limit"]
    try:
        done = subprocess.run(
            [*query, "--format=csv,noheader", "-i", "0"], capture_output=True, text=True, timeout=20
        )
        clocks = done.stdout.strip()
    except (OSError, subprocess.SubprocessError):
        clocks = ""
    return {
        "gpu": device["name"],
        "multiprocessors": device["multiprocessors"],
        "driver": device["driver"],
        "torch": torch.__version__,
        "compiler": library.catalog().get("compiler", ""),
        "clocks_and_power": clocks,
        "date": time.strftime("%Y-%m-%d", time.gmtime()),
    }


def _show_progress(done: int, total: int, start: float, product: Product) -> None:
    filled = round(30 * done / total)
    left = (time.monotonic() - start) / done * (total - done)
    bar = "#" * filled + "-" * (30 - filled)
    text = f"[{bar}] {done}/{total}, {left:.0f} s left, {product}"
    end = "" if sys.stderr.isatty() else "\n"
    print(f"\r{text:<90}" if sys.stderr.isatty() else text, end=end, file=sys.stderr, flush=True)
