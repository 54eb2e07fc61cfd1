"""Fits the planner of products (csrc/ops/matmul/cost.h) to the sweeps of the tree. Needs no GPU.

    python benchmarks/fit_planner.py [--write]    # of an H200; minutes

The planner predicts each config on the tests' stand-in driver: the formula is asked, not copied,
and so are its derivatives by the terms of cost.h. The loss is what a soft choice among a product's
configs loses: the regret (how much longer the chosen config takes than the best one measured), and
by how much lines of the goals are under their goals beside cuBLAS. It is smooth, and factors follow
its slope, from those of the table as it stands, to which a penalty binds them: a sweep more moves
few choices. This is done again from what it gives, until a round would move no factor by more than
0.005, which is not taken: with the table that was written, the command gives the same one. With
the terms as they stand, these are the GPU's lines of csrc/ops/matmul/cost_corrections.h, which
`--write` writes. (Those of the H100, whose sweeps lack younger kernels, stay.) They are at most 40
factors a GPU, of tiles and clusters (those of weight gradients are added to these), splits of K,
and one kernel with its tiles; none belongs to one product. Those whose loss costs the least are
dropped, and a penalty holds the others near 1: the fit is held out the better for it. Configs of
the goals' lines that no sweep has count as somewhat slower than the best one that one has.

"Held out" is the regret of products whose sizes took no part in the fit of factors, in five folds
of sizes, from no factors at all (the table has seen them), a very soft choice first: a line for
each seed that draws the folds, with how much a factor differs from fold to fold. The terms that a
fit of all would move are printed, for a person to enter.
"""

from __future__ import annotations

import argparse
import collections
import dataclasses
import json
import math
import re
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tools"))
sys.path.insert(0, str(ROOT / "benchmarks"))
import planner_regret  # noqa: E402
import stand_in  # noqa: E402
from planner_regret import key_of  # noqa: E402

TABLE = ROOT / "csrc" / "ops" / "matmul" / "cost_corrections.h"
CLUSTERS = r"share_a|share_b|share_both|split_k|(?:four|eight)_[abk]|2x4|4x2"
CONFIG = re.compile(
    rf"sm90 (\d+x\d+)( ping_pong)?( swapped)?( (?:{CLUSTERS}))?( read)?"
    r"(?: \d+( splits))?( streamed(?: evenly)?)?"
)
SYMMETRIC = re.compile(
    r"sm90_symmetric (\d+x\d+)(?: ping_pong)?(?: in pairs| with thin rows| with extra squares)?"
    r"(?:( streamed)(?: in \d+)?)?"
)
CORRECTED_KERNELS = ("mma",)  # beside those of sm90.cu
OF_DEVICE = ("cycles_per_microsecond", "memory_bytes_per_microsecond")  # read, not fitted
OF_THE_GOALS = "h200"  # the GPU
FOLDS = 5
LAUNCHES = ("launch", "cluster_launch")  # us that no factor multiplies
DIFFERENCE = 0.05  # of a term's logarithm
FAR, TOO_FAR = 1.2, 1.5  # times the least prediction, of configs that no sweep has, and of all
UNKNOWN = 0.04  # by which configs that were not measured count as longer than the best one
OF_GOALS = 3  # weight of a line of the goals, in the mean of their groups
LONG, MISSING = 2, 8  # so many times a regret's square and a shortfall of a goal count
# Of soft choices, in shares of time: the last one is what the fit is of, the others lead there, all
# of them from no factors, and from a table the last.
SOFTNESS = (0.1, 0.06, 0.035, 0.02, 0.0125, 0.009, 0.006, 0.004, 0.0025, 0.0015)
FROM_A_TABLE = 3
PENALTY = 0.02  # of squared logarithms' distances from where a fit begins
SETTLED, MOST_ROUNDS = 0.005, 20  # how far a last round moves a factor
LARGEST = 0.149  # factor, a logarithm
DIGITS = 3  # of a factor
STEPS, AGAIN = 40, 15  # of a descent, and of one after factors were dropped
REMEMBERED = 8  # steps from which a descent knows how the slope changes
FARTHEST, LEAST_STEP, LEAST_GAIN = 0.05, 1e-3, 1e-7
SEEDS = (0, 1, 2)  # of folds
MOST_NUMBERS = 40


class Timings:
    """Configs of products that were measured: times, predictions, and what corrects which."""

    def __init__(self, found: dict[str, Any]) -> None:
        self.terms: dict[str, float] = found["terms"]
        self.names: dict[str, int] = {}  # of the factors: numbers
        sizes: dict[tuple[int, int, int], int] = {}
        products: list[tuple[int, str, str]] = []
        rows, derivatives = [], []
        configs: list[list[int]] = []  # of each factor
        for line in found["products"]:
            p = line["product"]
            best = min(config["us"] for config in line["configs"] if config["us"])
            far = TOO_FAR * min(config["predicted"] for config in line["configs"])
            for config in line["configs"]:
                if config["predicted"] > far:
                    continue  # no factors make it the choice
                measured = config["us"] is not None
                us = config["us"] or best * (1 + UNKNOWN)
                speed = line["torch"] / us if line["torch"] else math.inf
                us_of = config["predicted"], config["fixed"]
                missing = max(line["goal"] - speed, 0)
                rows.append((len(products), *us_of, measured, us / best - 1, missing))
                derivatives.append(config["derivatives"])
                for what in corrections_of(p, config["name"]):
                    number = self.names.setdefault(what, len(self.names))
                    configs.extend([] for _ in range(number + 1 - len(configs)))
                    configs[number].append(len(rows) - 1)
            size = sizes.setdefault((p["m"], p["n"], p["k"]), len(sizes))
            products.append((size, planner_regret.kind_of(p), line["group"]))
        product, predicted, self.fixed, known, self.worse, self.missing = numpy.array(rows).T
        self.product, self.measured = product.astype(int), known.astype(bool)
        self.begins = numpy.flatnonzero(numpy.diff(product, prepend=-1))  # each product's configs
        self.corrected = predicted - self.fixed
        self.derivatives = numpy.array(derivatives)
        self.configs = [numpy.array(each) for each in configs]
        of_product, kinds, groups = zip(*products, strict=True)
        self.kinds, self.weights = numpy.array(kinds), weights_of(groups)
        self.sizes = numpy.array(of_product)
        # Of each config the numbers of its factors; those that it has not are the last one.
        most = numpy.bincount(numpy.concatenate(self.configs)).max(initial=1)
        self.factors = numpy.full((len(rows), most), len(self.names))
        filled = numpy.zeros(len(rows), int)
        for number, own in enumerate(self.configs):
            self.factors[own, filled[own]] = number
            filled[own] += 1

    def folds(self, seed: int) -> numpy.ndarray:
        shuffled = numpy.random.default_rng(seed).permutation(self.sizes.max() + 1) % FOLDS
        return shuffled[self.sizes]

    def describe(self, what: str, regrets: numpy.ndarray) -> None:
        parts = [f"{regrets.mean():.2%} of {len(regrets)}"]
        for kind in planner_regret.KINDS:
            parts.append(f"{kind} {regrets[self.kinds == kind].mean():.2%}")
        print(f"{what}: regret {', '.join(parts)}", flush=True)


class Fit:
    """Factors and what terms are multiplied by, as logarithms: numbers, 0 or a table's at first."""

    def __init__(
        self, x: Timings, weights: numpy.ndarray, table: dict[str, float] | None = None
    ) -> None:
        self.x, self.weights = x, weights / weights.sum()
        self.start = numpy.zeros(len(x.names) + len(x.terms))
        for what, factor in (table or {}).items():
            if what in x.names:  # none of the sweeps' configs has others
                self.start[x.names[what]] = factor
        self.numbers = self.start.copy()
        worse = x.worse.clip(max=1)
        self.each = worse + LONG * worse**2 + MISSING * x.missing

    def us(self, numbers: numpy.ndarray) -> tuple[numpy.ndarray, ...]:
        """Of each config, and how it grows with its factor's logarithm, in shares."""
        count = len(self.x.names)
        logarithm = numpy.append(numbers[:count], 0)[self.x.factors].sum(axis=1)
        corrected = self.x.corrected * (1 + logarithm + logarithm**2 / 2)  # as cost.cpp
        us = corrected + self.x.fixed
        slope = self.x.corrected * (1 + logarithm) / us
        return us * numpy.exp(self.x.derivatives @ numbers[count:]), slope

    def loss(self, numbers: numpy.ndarray, softness: float) -> tuple[float, numpy.ndarray]:
        """And its slope."""
        x, (us, slope) = self.x, self.us(numbers)
        shares = (numpy.minimum.reduceat(us, x.begins)[x.product] / us) ** (1 / softness)
        shares /= numpy.add.reduceat(shares, x.begins)[x.product]
        losses = numpy.add.reduceat(shares * self.each, x.begins)
        by_us = self.weights[x.product] * shares * (losses[x.product] - self.each) / softness
        by_factor = numpy.repeat(by_us * slope, x.factors.shape[1])
        by_factor = numpy.bincount(x.factors.ravel(), by_factor, len(x.names) + 1)[:-1]
        by_number = numpy.append(by_factor, by_us @ x.derivatives)
        moved = numbers - self.start
        penalty = PENALTY * (moved**2).sum()
        return losses @ self.weights + penalty, by_number + 2 * PENALTY * moved

    def descend(self, own: list[int], softness: float, steps: int = STEPS) -> None:
        """Moves those numbers down the slope, as its last changes tell (L-BFGS)."""
        known: list[tuple[numpy.ndarray, numpy.ndarray]] = []
        loss, slope = self.slope_of(own, self.numbers, softness)
        for _ in range(steps):
            step = self.step_of(slope, known)
            while True:
                numbers = (self.numbers - step).clip(-LARGEST, LARGEST)
                new, slope_there = self.slope_of(own, numbers, softness)
                if new < loss or abs(step).max() < LEAST_STEP * FARTHEST:
                    break
                step /= 2
            if loss - new < LEAST_GAIN:
                return
            moved, change = numbers - self.numbers, slope_there - slope
            if moved @ change > 0:
                known = [*known, (moved, change)][-REMEMBERED:]
            self.numbers, loss, slope = numbers, new, slope_there

    def slope_of(
        self, own: list[int], numbers: numpy.ndarray, softness: float
    ) -> tuple[float, numpy.ndarray]:
        loss, slope = self.loss(numbers, softness)
        only = numpy.zeros_like(slope)
        only[own] = slope[own]
        return loss, only

    @staticmethod
    def step_of(
        slope: numpy.ndarray, known: list[tuple[numpy.ndarray, numpy.ndarray]]
    ) -> numpy.ndarray:
        step, shares = slope.copy(), []
        for moved, change in reversed(known):
            shares.append(moved @ step / (moved @ change))
            step -= shares[-1] * change
        if known:
            moved, change = known[-1]
            step *= moved @ change / (change @ change)
        else:
            step *= FARTHEST / max(abs(step).max(), 1e-12)
        for (moved, change), share in zip(known, reversed(shares), strict=True):
            step += moved * (share - change @ step / (moved @ change))
        return step * min(1, FARTHEST / max(abs(step).max(), 1e-12))

    def keep(self, most: int) -> None:
        """Drops factors without which the loss grows least; the others move on."""
        while len(own := self.moved()) > most:
            losses = []
            for number in own:
                without = self.numbers.copy()
                without[number] = 0
                losses.append(self.loss(without, SOFTNESS[-1])[0])
            least = numpy.argsort(losses)[: -(-(len(own) - most) // 3)]
            self.numbers[[own[i] for i in least]] = 0
            self.descend(self.moved(), SOFTNESS[-1], AGAIN)

    def moved(self) -> list[int]:
        """Factors that are not 0."""
        return [n for n in range(len(self.x.names)) if round(self.numbers[n], DIGITS)]

    def regrets(self) -> numpy.ndarray:
        """Among the configs that were measured, by the factors as the table has them."""
        us, _ = self.us(self.numbers.round(DIGITS))
        us = numpy.where(self.x.measured, us, math.inf)
        chosen = us <= numpy.minimum.reduceat(us, self.x.begins)[self.x.product] + 1e-9
        return numpy.maximum.reduceat(numpy.where(chosen, self.x.worse, 0), self.x.begins)

    def factors(self) -> dict[str, float]:
        own = {what: round(self.numbers[number], DIGITS) for what, number in self.x.names.items()}
        return {what: float(own[what]) for what in sorted(own) if own[what]}


def read_table(text: str) -> dict[str, dict[str, float]]:
    """Factors by GPU."""
    found: dict[str, dict[str, float]] = {}
    for gpu, what, factor in re.findall(r'\{"(.+)", "(.+)", (.+)\},', text):
        found.setdefault(gpu, {})[what] = float(factor)
    return found


def table_of(factors: dict[str, dict[str, float]]) -> str:
    lines = ["// Written by benchmarks/fit_planner.py --write.", "// clang-format off"]
    for gpu, own in factors.items():
        lines += [f'{{"{gpu}", "{what}", {factor:.3f}}},' for what, factor in own.items()]
    return "\n".join(lines) + "\n"


def weights_of(groups: Sequence[str]) -> numpy.ndarray:
    """Of products; each group of the goals counts as much as any other."""
    lines = collections.Counter(group for group in groups if group)
    mean = sum(lines.values()) / max(len(lines), 1)
    return numpy.array([OF_GOALS * mean / lines[g] if g else 1 for g in groups])


def fitted(
    x: Timings, weights: numpy.ndarray | None = None, table: dict[str, float] | None = None
) -> Fit:
    """One round."""
    fit = Fit(x, x.weights if weights is None else weights, table)
    for softness in SOFTNESS[-FROM_A_TABLE if table else 0 :]:
        fit.descend(list(range(len(x.names))), softness)
    fit.keep(MOST_NUMBERS)
    return fit


def settled(x: Timings, table: dict[str, float]) -> Fit:
    """The factors of the table."""
    for _ in range(MOST_ROUNDS):
        fit = fitted(x, table=table)
        if abs(fit.numbers - fit.start).max() <= SETTLED:
            break
        table = fit.factors()
    else:
        print(f"not settled after {MOST_ROUNDS} rounds")
    return Fit(x, x.weights, table)


def held_out(x: Timings, seed: int) -> tuple[numpy.ndarray, float]:
    """Regrets, and by how much a factor differs from fold to fold."""
    regrets, numbers, folds = numpy.zeros(len(x.weights)), [], x.folds(seed)
    for fold in range(FOLDS):
        fit = fitted(x, x.weights * (folds != fold))
        regrets[folds == fold] = fit.regrets()[folds == fold]
        numbers.append(fit.numbers)
    return regrets, float(numpy.std(numbers, axis=0)[: len(x.names)].mean())


def corrections_of(product: dict[str, Any], name: str) -> list[str]:
    """The names, in the table, of what a config has in common with others."""
    name = name.removeprefix("split/")
    kernel = name.split(" ")[0]
    # A symmetric tile whose K is in parts has none.
    if symmetric := SYMMETRIC.fullmatch(name):
        tile, streamed = symmetric.groups()
        evenly = " evenly" if "streamed in" in name else ""
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
    if product.get("symmetric") and not others[4] and not (gradient and tile.startswith("64x")):
        names.append(f"{tile}{others[0] or ''} of one matrix")
        names += [" of one matrix"] if others[2] not in (None, " split_k") else []
    return names


def goals_of_lines() -> dict[str, tuple[str, float]]:
    """Of the products that the goals have lines of: the group, and the least speed of one line
    beside cuBLAS."""
    import bench_goals
    import bench_symmetric
    import goals
    import model_products
    import models

    found = {
        key_of(dataclasses.asdict(model_products.shape_of(x, direction))): (direction, least)
        for direction in ("forward", "dX", "dW")
        for least in [goals.MODELS[f"models: {direction}, in context"].worst]
        for x in models.products()
    }
    for group, product in bench_goals.products():
        if group != "epilogues":
            found[key_of(dataclasses.asdict(product))] = group, goals.PRODUCTS[group].worst
    cases = [*bench_symmetric.products(), *bench_symmetric.any_size()]
    for case in [*cases, *bench_symmetric.random_products(200, 0)]:
        if case.product:
            symmetric = {**dataclasses.asdict(case.product), "symmetric": True}
            found[key_of(symmetric)] = "x x^T", goals.SYMMETRIC[case.group].worst
    return found


def asked(gpu: str) -> dict[str, Any]:
    """Of each config in a GPU's sweeps: time, prediction, its derivatives by the terms."""
    from torch_cubin._native import library

    terms = {k: v for k, v in library.planner_terms().items() if k not in OF_DEVICE}
    sweep = planner_regret.merged_lines(gpu)
    goals = goals_of_lines() if gpu == OF_THE_GOALS else {}
    at = planner_regret.predictions(sweep, every=True)
    other = {
        name: planner_regret.predictions(sweep, {name: us * math.exp(DIFFERENCE)}, every=True)
        for name, us in terms.items()
    }
    parts = planner_regret.predicted_parts([product for product, _ in sweep])
    products = []
    for i, (product, times) in enumerate(sweep):
        group, goal = goals.get(key_of(product), ("", 0))
        far = FAR * min(at[i].values(), default=0)
        # A split was measured by the config of its parts that was chosen then.
        parts_of = {"split": f"split/{min(parts[i], key=parts[i].__getitem__)}"} if parts[i] else {}
        configs = []
        for name, us in at[i].items():
            if name not in times and not (goal and us < far):
                continue
            changed = {term: found[i][name] for term, found in other.items()}
            more = sum(changed[launch] - us for launch in LAUNCHES)
            configs.append(
                {"name": parts_of.get(name, name), "us": times.get(name), "predicted": us,
                 "fixed": more / (math.exp(DIFFERENCE) - 1),
                 "derivatives": [math.log(u / us) / DIFFERENCE for u in changed.values()]}
            )  # fmt: skip
        if sum(config["us"] is not None for config in configs) > 1:
            torch_us = times.get("torch.matmul", 0)
            line = {"product": product, "group": group, "goal": goal, "torch": torch_us}
            products.append({**line, "configs": configs})
    return {"terms": terms, "products": products}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--gpu", choices=stand_in.MEMORY, default=OF_THE_GOALS)
    parser.add_argument("--write", action="store_true", help="write the table")
    parser.add_argument("--ask", metavar="FILE", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.ask:
        stand_in.driver()
        Path(options.ask).write_text(json.dumps(asked(options.gpu)))
        return 0
    with tempfile.NamedTemporaryFile() as file:
        # Named otherwise, so that no table of the library's takes part.
        if status := stand_in.run_again(options.gpu, "--ask", file.name, name="a GPU"):
            return status
        x = Timings(json.loads(Path(file.name).read_text()))
    x.describe("without factors", Fit(x, x.weights).regrets())
    every = read_table(TABLE.read_text())
    fit = settled(x, every[stand_in.NAMES[options.gpu]])
    x.describe("with factors", fit.regrets())
    if options.write:
        TABLE.write_text(table_of({**every, stand_in.NAMES[options.gpu]: fit.factors()}))
    for seed in SEEDS:
        regrets, spread = held_out(x, seed)
        x.describe(f"held out, seed {seed} (a factor differs by {spread:.3f})", regrets)
    terms = range(len(x.names), len(fit.numbers))
    fit.descend([*fit.moved(), *terms], SOFTNESS[-1])
    for (name, value), number in zip(x.terms.items(), fit.numbers[len(x.names) :], strict=True):
        print(f"  {name} {value:.4g}, better {value * math.exp(number):.4g}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
