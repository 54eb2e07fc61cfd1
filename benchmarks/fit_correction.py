"""Fits csrc/ops/matmul/sm90_correction_table.h to the sweeps of the tree. Needs no GPU.

    python benchmarks/fit_correction.py [--write]

The planner's model of time (csrc/ops/matmul/sm90_cost.cpp) predicts each config that was measured,
on the tests' stand-in driver. A table of factors for a GPU, by tile (weight gradients apart), by
cluster and by how K is split, corrects it: at most 40 numbers, none of which belongs to one
product. They minimise the regret, smoothed, of 16-bit products of more than 64 rows and columns:
how much longer the chosen config takes than the best one measured. "Held out" is the regret of
products whose sizes took no part in the fit, in five folds of sizes.
"""

from __future__ import annotations

import argparse
import json
import math
import re
import sys
from pathlib import Path
from typing import Any

import numpy
import torch

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tools"))
sys.path.insert(0, str(ROOT / "benchmarks"))
import planner_regret  # noqa: E402
import stand_in  # noqa: E402

TABLE = ROOT / "csrc" / "ops" / "matmul" / "sm90_correction_table.h"
CLUSTERS = (
    *("", "share_a", "share_b", "split_k", "share_both", "four_a"),
    *("four_b", "2x4", "4x2", "eight_a", "eight_b"),
)  # in the order of kSm90Clusters
SPLITS = ("", "streamed", "streamed evenly")
CONFIG = re.compile(
    rf"sm90 (\d+)x(\d+)(?: ({'|'.join(CLUSTERS[1:])}))?(?: (streamed(?: evenly)?))?"
)
FEW_ROWS = 64
FOLDS, STEPS, RATE = 5, 300, 0.01
PENALTY = 0.05  # of a factor's squared logarithm
MOST_NUMBERS = 40

Tile = tuple[int, int, bool]  # M, N, whether of weight gradients


class Timings:
    """Configs of products that were measured on one GPU."""

    def __init__(self, gpu: str) -> None:
        self.tiles: dict[Tile, int] = {}
        rows: list[tuple[float, ...]] = []
        sizes: list[tuple[int, ...]] = []
        for path in sorted(planner_regret.RESULTS.glob(f"*_{gpu}_*sweep*.jsonl")):
            for product, configs in planned(path):
                if len(configs) < 2:
                    continue
                rows += [(len(sizes), *self.row(product, *config)) for config in configs]
                sizes.append((product["m"], product["n"], product["k"]))
        columns = torch.tensor(rows, dtype=torch.float64)
        self.product, self.tile, self.cluster, self.split = columns[:, [0, 3, 4, 5]].long().T
        self.us, self.predicted, self.own = columns[:, 1], columns[:, 2].log(), columns[:, 6]
        self.products = len(sizes)
        self.best = self.least(self.us)
        self.worse = self.us / self.best[self.product] - 1
        _, size = numpy.unique(numpy.array(sizes), axis=0, return_inverse=True)
        shuffled = numpy.random.default_rng(0).permutation(size.max() + 1) % FOLDS
        self.fold = torch.tensor(shuffled[size.reshape(-1)])

    def row(self, product: dict[str, Any], name: str, us: float, predicted: float) -> tuple:
        found = CONFIG.fullmatch(name)
        if not found:
            return us, predicted, 0, 0, 0, 0.0
        gradient = product["a"][0] == product["b"][0] == "o"
        tile = (int(found[1]), int(found[2]), gradient)
        number = self.tiles.setdefault(tile, len(self.tiles))
        cluster, split = CLUSTERS.index(found[3] or ""), SPLITS.index(found[4] or "")
        return us, predicted, number, cluster, split, 1.0

    def zeros(self) -> list[torch.Tensor]:
        counts = (len(self.tiles), len(CLUSTERS), len(SPLITS))
        return [torch.zeros(count, dtype=torch.float64, requires_grad=True) for count in counts]

    def least(self, values: torch.Tensor) -> torch.Tensor:
        start = torch.full((self.products,), math.inf, dtype=torch.float64)
        return start.scatter_reduce(0, self.product, values, "amin")

    def sums(self, values: torch.Tensor) -> torch.Tensor:
        return torch.zeros(self.products, dtype=torch.float64).index_add(0, self.product, values)

    def corrected(self, logs: list[torch.Tensor]) -> torch.Tensor:
        of_tile, of_cluster, of_split = logs
        sum_ = of_tile[self.tile] + of_cluster[self.cluster] + of_split[self.split]
        return self.predicted + self.own * sum_

    def regrets(self, predicted: torch.Tensor) -> torch.Tensor:
        chosen = (predicted <= self.least(predicted)[self.product] + 1e-9).double()
        return self.sums(self.worse * chosen) / self.sums(chosen)

    def loss(self, predicted: torch.Tensor, softness: float, weights: torch.Tensor) -> torch.Tensor:
        """The regret of a soft choice, and the errors among a product's configs near the best."""
        least = self.least(predicted).detach()[self.product]
        chosen = torch.exp((least - predicted) / softness)
        regret = self.sums(chosen * self.worse.clamp(max=0.6)) / self.sums(chosen)
        near, error = torch.exp(-6 * self.worse), predicted - self.us.log()
        mean = self.sums(error * near) / self.sums(near)
        own = self.sums(near * (error - mean[self.product]) ** 2) / self.sums(near)
        return ((regret + 0.5 * own) * weights).sum() / weights.sum()

    def fit(self, weights: torch.Tensor) -> list[torch.Tensor]:
        logs = self.zeros()
        optimizer = torch.optim.Adam(logs, lr=RATE)
        for step in range(STEPS):
            optimizer.zero_grad()
            loss = self.loss(self.corrected(logs), 0.06 * 0.25 ** (step / STEPS), weights)
            (loss + PENALTY * sum((log**2).sum() for log in logs)).backward()
            optimizer.step()
            optimizer.param_groups[0]["lr"] = RATE * (1 - 0.9 * step / STEPS)
        return [log.detach() for log in logs]


def planned(path: Path) -> list[tuple[dict[str, Any], list[tuple[str, float, float]]]]:
    """Products of a sweep, with name, measured and predicted microseconds of each config."""
    from torch_cubin._native import library

    lines = [json.loads(text) for text in path.read_text().splitlines()]
    lines = [line for line in lines if counts(line["product"])]
    products = [planner_regret.with_lines(line["product"]) for line in lines]
    out = []
    for product, line, plan in zip(products, lines, library.planned(products, True), strict=True):
        us = {planner_regret.this_name(name): t for name, t in line["microseconds"].items()}
        configs = [(c["name"], c["microseconds"]) for c in plan["configs"] if c["name"] in us]
        out.append((product, [(name, us[name], predicted) for name, predicted in configs]))
    return out


def counts(product: dict[str, Any]) -> bool:
    anywhere = "elements" in product["a"] + product["b"]
    few = min(product["m"], product["n"]) <= FEW_ROWS
    return product["math"] == "16_bit" and not few and not anywhere


def table_of(gpu: str, x: Timings, logs: list[torch.Tensor]) -> str:
    of_tile, of_cluster, of_split = ([round(value, 3) for value in log.tolist()] for log in logs)
    numbers = len(of_tile) + len(of_cluster) + len(of_split)
    if numbers > MOST_NUMBERS:
        raise SystemExit(f"{gpu}: {numbers} numbers, more than {MOST_NUMBERS}")

    def line(m: int, n: int) -> str:
        pair = (x.tiles.get((m, n, gradient)) for gradient in (False, True))
        return ", ".join(str(of_tile[at] if at is not None else 0) for at in pair)

    tiles = ",\n  ".join(f"{{{m}, {n}, {line(m, n)}}}" for m, n in sorted({t[:2] for t in x.tiles}))
    clusters, splits = (", ".join(map(str, each)) for each in (of_cluster, of_split))
    return f'{{"{stand_in.NAMES[gpu]}",\n {{{clusters}}},\n {splits},\n {{{tiles}}}}},\n'


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--write", action="store_true", help="write the table")
    parser.add_argument("--gpu", choices=stand_in.MEMORY, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if not stand_in.is_there():
        if options.write:
            TABLE.write_text(
                "// Written by benchmarks/fit_correction.py --write. clang-format off\n"
            )
        # Named otherwise, so that no table of the library's takes part.
        return max(stand_in.run_again(g, "--gpu", g, name="a GPU") for g in stand_in.MEMORY)
    stand_in.driver()
    x = Timings(options.gpu)
    everything = torch.ones(x.products, dtype=torch.float64)
    logs = x.fit(everything)
    held_out = torch.zeros(x.products, dtype=torch.float64)
    for fold in range(FOLDS):
        others = x.fit(everything * (x.fold != fold))
        held_out[x.fold == fold] = x.regrets(x.corrected(others))[x.fold == fold]
    before, after = x.regrets(x.predicted), x.regrets(x.corrected(logs))
    print(
        f"{options.gpu}: {x.products} products, regret {before.mean():.2%} without the table, "
        f"{after.mean():.2%} with it, held out {held_out.mean():.2%}"
    )
    if options.write:
        with TABLE.open("a") as file:
            file.write(table_of(options.gpu, x, logs))
    return 0


if __name__ == "__main__":
    sys.exit(main())
