"""Measures again those products of the tree's sweeps for which some tiles are near the best.

    python benchmarks/sweep_again.py h200 benchmarks/results/DATE_h200_sweep.jsonl --seconds 240
    python benchmarks/fit_planner.py --write

For tiles whose kernels have changed since: the planner would else be fitted to times that they no
longer take. The products are in a random order, so that any part of them is a sample; a file with
lines is continued. Sweeps of the tree count by their newest line of a product.
"""

from __future__ import annotations

import argparse
import random
import sys
from pathlib import Path
from typing import Any

import fit_planner
import planner_regret
from bench_models import SWEEP_EFFORT

from torch_cubin._tuning import sweep
from torch_cubin._tuning.products import Product

# The tiles of sm90.cu that two threads load since 2026-11-27.
TILES = "64x64,64x96,64x128,64x192,128x64,128x80,128x96,128x128 tn,128x160 tn"
NEAR = 1.3  # times the best config


def products(gpu: str, tiles: set[str]) -> list[Product]:
    lines = planner_regret.sweep_lines(gpu)
    found = [Product(**product) for product, times in lines if is_near(product, times, tiles)]
    random.Random(0).shuffle(found)
    return found


def is_near(product: dict[str, Any], times: dict[str, float], tiles: set[str]) -> bool:
    own = {
        config: us
        for config, us in times.items()
        if tiles.intersection(fit_planner.corrections_of(product, config))
    }
    return bool(own) and min(own.values()) < NEAR * min(times.values())


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("gpu", help="whose sweeps")
    parser.add_argument("lines", type=Path, help="append to this file")
    parser.add_argument("--tiles", default=TILES, help="as in cost_corrections.h")
    parser.add_argument(
        "--seconds", type=float, default=float("inf"), help="no product after these"
    )
    options = parser.parse_args()
    found = products(options.gpu, set(options.tiles.split(",")))
    print(f"{len(found)} products", flush=True)
    sweep.sweep(found, options.lines, SWEEP_EFFORT, options.seconds, show=False)
    return 0


if __name__ == "__main__":
    sys.exit(main())
