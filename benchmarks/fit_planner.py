"""Fits the planner of products (csrc/ops/matmul/cost.h) to the sweeps of the tree. Needs no GPU.

    python benchmarks/fit_planner.py [--write]

The planner predicts each config that was measured, on the tests' stand-in driver: the formula is
asked, not copied, and so are its derivatives by the terms of cost.h. Two things are fitted so that
the regret is least (smoothed: how much longer the chosen config takes than the best one measured):
the terms, which all GPUs have in common and which are printed, for a person to enter; and, with the
terms as they stand, csrc/ops/matmul/cost_corrections.h, which `--write` writes. It has at most 40
factors a GPU, of tiles and clusters (those of weight gradients are added to these), splits of K,
and one kernel with its tiles; none belongs to one product. Those whose loss costs the least are
dropped. GPUs share the factors of a matrix times its own transpose, which were measured on one
alone. "Held out" is the regret of products whose sizes took no part in the fit of terms and
factors, in five folds of sizes.
"""

from __future__ import annotations

import argparse
import json
import math
import re
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy
import torch

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tools"))
sys.path.insert(0, str(ROOT / "benchmarks"))
import planner_regret  # noqa: E402
import stand_in  # noqa: E402

TABLE = ROOT / "csrc" / "ops" / "matmul" / "cost_corrections.h"
CLUSTERS = r"share_a|share_b|share_both|split_k|(?:four|eight)_[abk]|2x4|4x2"
CONFIG = re.compile(
    rf"sm90 (\d+x\d+)( ping_pong)?( swapped)?( (?:{CLUSTERS}))?( read)?"
    r"(?: \d+( splits))?( streamed(?: evenly)?)?"
)
SYMMETRIC = re.compile(
    r"sm90_symmetric (\d+x\d+)(?: ping_pong)?(?: in pairs| with thin rows| with extra squares)?"
    r"(?: split in \d+)?(?:( streamed)(?: in \d+)?)?"
)
CORRECTED_KERNELS = ("mma",)  # beside those of sm90.cu
OF_DEVICE = ("cycles_per_microsecond", "memory_bytes_per_microsecond")  # read, not fitted
FOLDS, STEPS, RATE = 5, 200, 0.02
DIFFERENCE = 0.05  # of a term's logarithm
PENALTY, PENALTY_OF_TERMS = 0.01, 0.002  # of squared logarithms
LARGEST = 0.149  # factor, a logarithm
SOFTNESS, LEAST_SOFTNESS = 0.03, 0.015  # of a choice, in logarithms of time
MOST_NUMBERS = 40
LONG = 4  # so many times the square of a regret counts beside it
OF_ALL = "all"  # the GPUs, of a factor


class Timings:
    """Configs of products that were measured: times, predictions, and what corrects which."""

    def __init__(self, found: dict[str, dict[str, Any]]) -> None:
        self.gpus = list(found)
        self.terms = next(iter(found.values()))["terms"]
        self.names: dict[tuple[str, str], int] = {}  # of the corrections: GPU, what
        rows, entries, derivatives, sizes, kinds = [], [], [], [], []
        for gpu, columns in found.items():
            for product in columns["products"]:
                for config in product["configs"]:
                    rows.append((len(sizes), config["us"], config["predicted"]))
                    derivatives.append(config["derivatives"])
                    for what in corrections_of(product["product"], config["name"]):
                        of = OF_ALL if what.endswith("of one matrix") else gpu
                        number = self.names.setdefault((of, what), len(self.names))
                        entries.append((len(rows) - 1, number))
                p = product["product"]
                sizes.append((p["m"], p["n"], p["k"]))
                kinds.append(f"{gpu} {planner_regret.kind_of(p)}")
        columns = torch.tensor(rows, dtype=torch.float64)
        self.product, self.us, self.predicted = columns[:, 0].long(), columns[:, 1], columns[:, 2]
        # Factors are of what follows the launch.
        self.share = 1 - self.terms["launch"] / self.predicted
        self.predicted = self.predicted.log()
        self.derivatives = torch.tensor(derivatives, dtype=torch.float64)
        self.entry = torch.tensor(entries).T
        self.kinds = numpy.array(kinds)
        self.products = len(sizes)
        self.worse = self.us / self.least(self.us)[self.product] - 1
        self.near = torch.exp(-6 * self.worse)
        _, size = numpy.unique(numpy.array(sizes), axis=0, return_inverse=True)
        shuffled = numpy.random.default_rng(0).permutation(size.max() + 1) % FOLDS
        self.fold = torch.tensor(shuffled[size.reshape(-1)])

    def least(self, values: torch.Tensor) -> torch.Tensor:
        start = torch.full((self.products,), math.inf, dtype=torch.float64)
        return start.scatter_reduce(0, self.product, values, "amin")

    def sums(self, values: torch.Tensor) -> torch.Tensor:
        return torch.zeros(self.products, dtype=torch.float64).index_add(0, self.product, values)

    def corrected(self, terms: torch.Tensor, factors: torch.Tensor) -> torch.Tensor:
        by_terms = self.predicted + self.derivatives @ terms
        row, number = self.entry
        return by_terms.index_add(0, row, factors[number] * self.share[row])

    def regrets(self, predicted: torch.Tensor) -> torch.Tensor:
        chosen = (predicted <= self.least(predicted)[self.product] + 1e-9).double()
        return self.sums(self.worse * chosen) / self.sums(chosen)

    def loss(self, predicted: torch.Tensor, softness: float, weights: torch.Tensor) -> torch.Tensor:
        """The regret of a soft choice, and the errors of a product's configs near the best."""
        least = self.least(predicted).detach()[self.product]
        chosen = torch.exp((least - predicted) / softness)
        worse = self.worse.clamp(max=0.6)
        regret = self.sums(chosen * (worse + LONG * worse**2)) / self.sums(chosen)
        error, near = predicted - self.us.log(), self.sums(self.near)
        mean = self.sums(error * self.near) / near
        own = self.sums(self.near * (error - mean[self.product]) ** 2) / near
        return ((regret + 0.5 * own + 0.3 * mean**2) * weights).sum() / weights.sum()

    def fit(
        self, weights: torch.Tensor, kept: torch.Tensor, moves: bool
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Logarithms: of what the terms are to be multiplied by, where they move; of factors, 0 of
        those that are not kept."""
        terms = torch.zeros(self.derivatives.shape[1], dtype=torch.float64, requires_grad=moves)
        factors = torch.zeros(len(self.names), dtype=torch.float64, requires_grad=True)
        optimizer = torch.optim.Adam([terms, factors] if moves else [factors], lr=RATE)
        for step in range(STEPS):
            optimizer.zero_grad()
            softness = SOFTNESS * 0.25 ** (step / STEPS)
            loss = self.loss(self.corrected(terms, factors * kept), softness, weights)
            penalty = PENALTY * (factors**2).sum() + PENALTY_OF_TERMS * (terms**2).sum()
            (loss + penalty).backward()
            optimizer.step()
            optimizer.param_groups[0]["lr"] = RATE * (1 - 0.9 * step / STEPS)
        return terms.detach(), factors.detach().clamp(-LARGEST, LARGEST) * kept

    def numbers_of(self, gpu: str, kept: torch.Tensor) -> dict[str, int]:
        return {what: i for (of, what), i in self.names.items() if of in (gpu, OF_ALL) and kept[i]}

    def most_useful(self, terms: torch.Tensor, factors: torch.Tensor) -> torch.Tensor:
        """1 for each factor that stays: one after another those go without which the loss grows
        least, until no GPU has more than MOST_NUMBERS."""
        kept = torch.ones_like(factors)
        weights = torch.ones(self.products, dtype=torch.float64)

        def loss_without(number: int) -> float:
            left = factors * kept
            left[number] = 0
            return self.loss(self.corrected(terms, left), LEAST_SOFTNESS, weights).item()

        for gpu in self.gpus:
            while len(own := self.numbers_of(gpu, kept)) > MOST_NUMBERS:
                kept[min(own.values(), key=loss_without)] = 0
        return kept

    def describe(self, what: str, regrets: torch.Tensor) -> None:
        for gpu in self.gpus:
            of_gpu = numpy.char.startswith(self.kinds, gpu)
            parts = [f"{regrets[of_gpu].mean():.2%} of {of_gpu.sum()}"]
            for kind in planner_regret.KINDS:
                parts.append(f"{kind} {regrets[self.kinds == f'{gpu} {kind}'].mean():.2%}")
            print(f"{gpu} {what}: regret {', '.join(parts)}", flush=True)

    def table(self, factors: torch.Tensor) -> str:
        lines = ["// Written by benchmarks/fit_planner.py --write.", "// clang-format off"]
        for gpu in self.gpus:
            own = self.numbers_of(gpu, factors != 0)
            lines += [
                f'{{"{stand_in.NAMES[gpu]}", "{what}", {factors[own[what]]:.3f}}},'
                for what in sorted(own)
            ]
        return "\n".join(lines) + "\n"


def corrections_of(product: dict[str, Any], name: str) -> list[str]:
    """The names, in the table, of what a config has in common with others."""
    name = name.removeprefix("split/")
    kernel = name.split(" ")[0]
    if symmetric := SYMMETRIC.fullmatch(name):
        tile, streamed = symmetric.groups()
        evenly = " evenly" if " in " in name else ""
        return [tile, *([streamed + evenly] if streamed else [])]
    found = CONFIG.fullmatch(name)
    if not found:
        own = name.removesuffix(" swapped")
        return [kernel, own] if kernel in CORRECTED_KERNELS else []
    tile, *others = found.groups()
    if others[2] in (" four_k", " eight_k"):
        others[2] = " split_k"
    gradient = product["a"][0] == product["b"][0] == "o"
    names = [tile, *(other for other in others if other)]
    if gradient:
        names.append(f"{tile} tn")
        if others[2] == " split_k":
            names.append(" split_k tn")
        elif others[2] and not others[5]:
            names.append(" clusters tn")
        if others[4]:
            names.append(" splits tn")
    if product.get("symmetric"):
        names.append(f"{tile}{others[0] or ''} of one matrix")
        names += [" of one matrix"] if others[2] else []
    return names


def asked(gpu: str) -> dict[str, Any]:
    """Of each config in a GPU's sweeps: time, prediction, its derivatives by the terms."""
    from torch_cubin._native import library

    terms = {k: v for k, v in library.planner_terms().items() if k not in OF_DEVICE}
    lines = planner_regret.sweep_lines(gpu)
    at = planner_regret.predictions(lines)
    other = [
        planner_regret.predictions(lines, {name: terms[name] * math.exp(DIFFERENCE)})
        for name in terms
    ]
    parts = planner_regret.predicted_parts([product for product, _ in lines])
    products = []
    for i, (product, times) in enumerate(lines):
        # A split was measured by the config of its parts that was chosen then.
        parts_of = {"split": f"split/{min(parts[i], key=parts[i].__getitem__)}"} if parts[i] else {}
        configs = [
            {"name": parts_of.get(name, name), "us": times[name], "predicted": us,
             "derivatives": [math.log(o[i][name] / us) / DIFFERENCE for o in other]}
            for name, us in at[i].items()
        ]  # fmt: skip
        if len(configs) > 1:
            products.append({"product": product, "configs": configs})
    return {"terms": terms, "products": products}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--write", action="store_true", help="write the table")
    parser.add_argument("--ask", nargs=2, metavar=("GPU", "FILE"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.ask:
        stand_in.driver()
        Path(options.ask[1]).write_text(json.dumps(asked(options.ask[0])))
        return 0
    found = {}
    with tempfile.TemporaryDirectory() as folder:
        for gpu in stand_in.MEMORY:
            file = Path(folder) / gpu
            # Named otherwise, so that no table of the library's takes part.
            if status := stand_in.run_again(gpu, "--ask", gpu, str(file), name="a GPU"):
                return status
            found[gpu] = json.loads(file.read_text())
    x = Timings(found)
    everything = torch.ones(x.products, dtype=torch.float64)
    x.describe("without factors", x.regrets(x.predicted))
    stay, factors = x.fit(everything, torch.ones(len(x.names)), moves=False)
    kept = x.most_useful(stay, factors)
    stay, factors = x.fit(everything, kept, moves=False)
    x.describe("with factors", x.regrets(x.corrected(stay, factors)))
    if options.write:
        TABLE.write_text(x.table(factors))
    held_out = torch.zeros(x.products, dtype=torch.float64)
    for fold in range(FOLDS):
        others = x.fit(everything * (x.fold != fold), kept, moves=True)
        held_out[x.fold == fold] = x.regrets(x.corrected(*others))[x.fold == fold]
    x.describe("held out", held_out)
    moved, _ = x.fit(everything, kept, moves=True)
    for (name, value), log in zip(x.terms.items(), moved.tolist(), strict=True):
        print(f"  {name} {value:.4g}, better {value * math.exp(log):.4g}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
