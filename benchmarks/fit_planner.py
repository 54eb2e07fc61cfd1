"""Fits the planner of products (csrc/ops/matmul/cost.h) to the sweeps of the tree. Needs no GPU.

    python benchmarks/fit_planner.py [--write]    # of an H200; minutes

The planner predicts each config on the tests' stand-in driver: the formula is asked, not copied,
and so are its derivatives by the terms of cost.h. Then numbers are moved one after another, up or
down, in smaller and smaller steps, as long as the loss falls: the regret (how much longer the
chosen config takes than the best one measured), by how much lines of the goals are under their
goals beside cuBLAS, and the same of a soft choice, so that choices are on no edge. With the terms
as they stand, this gives the GPU's lines of csrc/ops/matmul/cost_corrections.h, which `--write`
writes: the same sweeps give the same lines, whatever stands there. (Those of the H100, whose sweeps
lack younger kernels, stay.) They are at most 40 factors a GPU, of tiles and clusters (those of
weight gradients are added to these), splits of K, and one kernel with its tiles; none belongs to
one product. Those whose loss costs the least are dropped. Configs of the goals' lines that no
sweep has count as somewhat slower than the best one that one has.

"Held out" is the regret of products whose sizes took no part in the fit of terms and factors, in
five folds of sizes (which factors there are is chosen by all); the terms that a fit of all would
move are printed, for a person to enter.
"""

from __future__ import annotations

import argparse
import collections
import copy
import dataclasses
import json
import math
import random
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
LONG, MISSING = 2, 4  # so many times a regret's square and a shortfall of a goal count
SOFTNESS, OF_SOFT = 0.006, 0.5  # of a soft choice, in shares of time; its weight
SOFTER = (0.05, 0.035, 0.025, 0.015, 0.009)  # of soft choices that are fitted before, alone
PENALTY = 0.002  # of squared logarithms
NEAR = 0.06  # beyond the predicted choice, in shares of time: what a pass over the numbers may meet
LEAST_GAIN = 1e-8
LARGEST = 0.149  # factor, a logarithm
STEPS = 1000  # of 1: factors are multiples of a thousandth
FIRST, AGAIN = 32, 8  # steps at a time
KICKS, KICKED, KICK = 100, (2, 3, 5, 8), (8, 16, 32)  # fits from nearby: factors moved, how far
MOST_NUMBERS = 40


class Timings:
    """Configs of products that were measured: times, predictions, and what corrects which."""

    def __init__(self, found: dict[str, Any]) -> None:
        self.terms: dict[str, float] = found["terms"]
        self.names: dict[str, int] = {}  # of the factors: numbers
        sizes: dict[tuple[int, int, int], int] = {}
        products, rows, derivatives = [], [], []
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
        shuffled = numpy.random.default_rng(0).permutation(len(sizes)) % FOLDS
        self.fold = shuffled[numpy.array(of_product)]

    def only(self, kept: numpy.ndarray) -> Timings:
        """Those configs; of each product there has to be one."""
        x = copy.copy(self)
        for name in ("product", "fixed", "measured", "worse", "missing", "corrected"):
            setattr(x, name, getattr(self, name)[kept])
        x.derivatives = self.derivatives[kept]
        x.begins = numpy.flatnonzero(numpy.diff(x.product, prepend=-1))
        number = numpy.cumsum(kept) - 1
        x.configs = [number[configs[kept[configs]]] for configs in self.configs]
        return x

    def describe(self, what: str, regrets: numpy.ndarray) -> None:
        parts = [f"{regrets.mean():.2%} of {len(regrets)}"]
        for kind in planner_regret.KINDS:
            parts.append(f"{kind} {regrets[self.kinds == kind].mean():.2%}")
        print(f"{what}: regret {', '.join(parts)}", flush=True)


class Fit:
    """Factors, and what terms are multiplied by: numbers that move in steps, all 0 at first."""

    def __init__(self, x: Timings, weights: numpy.ndarray) -> None:
        self.x, self.weights = x, weights / weights.sum()
        self.softness, self.of_choice = SOFTNESS, 1
        self.steps = numpy.zeros(len(x.names) + len(x.terms), int)
        self.logarithm = numpy.zeros(len(x.product))  # of each config's factors
        self.by_terms = numpy.zeros(len(x.product))
        every = numpy.arange(len(x.product))
        self.all = every, x.begins, x.product
        # Of each factor its configs, and all those of their products: where they are, where each
        # product's begin, and which of them are the factor's.
        self.touched = [self.touched_by(configs) for configs in x.configs]
        worse = x.worse.clip(max=1)
        self.each = worse + LONG * worse**2 + MISSING * x.missing
        self.losses = self.losses_of(*self.all, self.logarithm, self.by_terms)

    def touched_by(self, configs: numpy.ndarray) -> tuple[numpy.ndarray, ...]:
        products = numpy.unique(self.x.product[configs])
        counts = numpy.append(self.x.begins[1:], len(self.x.product))[products]
        counts -= self.x.begins[products]
        begins = numpy.cumsum(counts) - counts
        which = numpy.repeat(numpy.arange(len(products)), counts)
        every = numpy.arange(counts.sum()) + (self.x.begins[products] - begins)[which]
        return products, every, begins, which, numpy.searchsorted(every, configs)

    def us(self, every: Any, logarithm: numpy.ndarray, by_terms: numpy.ndarray) -> numpy.ndarray:
        factor = 1 + logarithm + logarithm**2 / 2  # as cost.cpp
        us = self.x.corrected[every] * factor + self.x.fixed[every]
        return us * numpy.exp(by_terms) if by_terms.any() else us

    def losses_of(
        self, every: numpy.ndarray, begins: numpy.ndarray, which: numpy.ndarray, *by: numpy.ndarray
    ) -> numpy.ndarray:
        """Of each product."""
        us = self.us(every, *by)
        longer = us / numpy.minimum.reduceat(us, begins)[which] - 1
        each = self.each[every]
        chosen = numpy.maximum.reduceat(numpy.where(longer < 1e-9, each, 0), begins)
        soft = numpy.exp(-longer / self.softness)
        sums = numpy.add.reduceat(soft, begins)
        return self.of_choice * chosen + OF_SOFT * numpy.add.reduceat(soft * each, begins) / sums

    def regrets(self) -> numpy.ndarray:
        """Among the configs that were measured."""
        us = self.us(self.all[0], self.logarithm, self.by_terms)
        us = numpy.where(self.x.measured, us, math.inf)
        chosen = us <= numpy.minimum.reduceat(us, self.x.begins)[self.x.product] + 1e-9
        return numpy.maximum.reduceat(numpy.where(chosen, self.x.worse, 0), self.x.begins)

    def loss(self) -> float:
        return float(self.losses @ self.weights + PENALTY * ((self.steps / STEPS) ** 2).sum())

    def gain(self, number: int, by: int) -> tuple[float, numpy.ndarray]:
        """How much the loss falls, and products' losses, if a number is moved."""
        move, have = by / STEPS, self.steps[number] / STEPS
        penalty = PENALTY * ((have + move) ** 2 - have**2)
        if number < len(self.touched):
            products, every, begins, which, own = self.touched[number]
            logarithm = self.logarithm[every]
            logarithm[own] += move
            losses = self.losses_of(every, begins, which, logarithm, self.by_terms[every])
            fall = (self.losses[products] - losses) @ self.weights[products]
        else:
            by_terms = self.by_terms + self.x.derivatives[:, number - len(self.touched)] * move
            losses = self.losses_of(*self.all, self.logarithm, by_terms)
            fall = (self.losses - losses) @ self.weights
        return float(fall - penalty), losses

    def move(self, number: int, by: int) -> None:
        _, losses = self.gain(number, by)
        self.steps[number] += by
        if number < len(self.touched):
            self.logarithm[self.x.configs[number]] += by / STEPS
            self.losses[self.touched[number][0]] = losses
        else:
            self.by_terms += self.x.derivatives[:, number - len(self.touched)] * by / STEPS
            self.losses = losses

    def move_to(self, steps: numpy.ndarray) -> None:
        for number in numpy.flatnonzero(steps != self.steps):
            self.move(number, steps[number] - self.steps[number])

    def descend_softly(self, numbers: list[int]) -> None:
        """From a smooth loss to the sharp one, whose descent alone ends far from the least."""
        for first, softness in zip((FIRST, *[AGAIN] * len(SOFTER)), SOFTER, strict=False):
            self.set_loss(softness, of_choice=0)
            self.descend(numbers, first)
        self.set_loss(SOFTNESS, of_choice=1)
        self.descend(numbers, AGAIN)

    def set_loss(self, softness: float, of_choice: int) -> None:
        self.softness, self.of_choice = softness, of_choice
        self.losses = self.losses_of(*self.all, self.logarithm, self.by_terms)

    def descend(self, numbers: list[int], first: int) -> None:
        """Moves each where that lowers the loss, by half as much where it does no longer."""
        size = dict.fromkeys(numbers, first)
        moved = True
        while moved or max(size.values()) > 1:
            near = self.near()
            moved = False
            for number in numbers:
                gains = {
                    by: near.gain(number, by)[0]
                    for by in (size[number], -size[number])
                    if abs(near.steps[number] + by) <= LARGEST * STEPS
                }
                best = max(gains, key=gains.__getitem__, default=0)
                if gains and gains[best] > LEAST_GAIN:
                    near.move(number, best)
                    moved = True
                else:
                    size[number] = max(1, size[number] // 2)
            self.move_to(near.steps)

    def near(self) -> Fit:
        """The same with those configs alone that small moves can make the choice."""
        us = self.us(self.all[0], self.logarithm, self.by_terms)
        kept = us < (1 + NEAR + 8 * self.softness) * self.least(us)
        fit = Fit(self.x.only(kept), self.weights)
        fit.steps, fit.logarithm = self.steps.copy(), self.logarithm[kept]
        fit.by_terms = self.by_terms[kept]
        fit.set_loss(self.softness, self.of_choice)
        return fit

    def least(self, us: numpy.ndarray) -> numpy.ndarray:
        """Of each config's product."""
        return numpy.minimum.reduceat(us, self.x.begins)[self.x.product]

    def keep(self, most: int) -> None:
        """Drops factors without which the loss grows least, one after another; the others move
        on."""
        while len(own := self.moved()) > most:
            least = max(own, key=lambda number: self.gain(number, -self.steps[number])[0])
            self.move(least, -self.steps[least])
        self.descend(self.moved(), AGAIN)

    def moved(self) -> list[int]:
        """Factors that are not 0."""
        return [number for number in range(len(self.x.names)) if self.steps[number]]

    def kick(self, draw: random.Random, numbers: list[int]) -> None:
        """Moves some of the numbers, whatever that does to the loss."""
        count, far, most = draw.choice(KICKED), draw.choice(KICK), int(LARGEST * STEPS)
        for number in draw.sample(numbers, min(count, len(numbers))):
            to = self.steps[number] + draw.randint(-far, far)
            self.move(number, min(max(to, -most), most) - self.steps[number])

    def factors(self) -> dict[str, float]:
        own = {what: self.steps[number] / STEPS for what, number in self.x.names.items()}
        return {what: own[what] for what in sorted(own) if own[what]}


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


def fitted(x: Timings) -> Fit:
    """The factors of the table."""
    fit, every, draw = Fit(x, x.weights), list(range(len(x.names))), random.Random(0)
    fit.descend_softly(every)
    fit.keep(MOST_NUMBERS)
    for _ in range(KICKS):
        before, loss = fit.steps.copy(), fit.loss()
        fit.kick(draw, every)
        fit.descend(fit.moved(), AGAIN)
        fit.keep(MOST_NUMBERS)
        if fit.loss() >= loss:
            fit.move_to(before)
    return fit


def held_out(x: Timings, kept: list[int]) -> numpy.ndarray:
    regrets = numpy.zeros(len(x.weights))
    terms = list(range(len(x.names), len(x.names) + len(x.terms)))
    for fold in range(FOLDS):
        fit = Fit(x, x.weights * (x.fold != fold))
        fit.descend_softly(kept + terms)
        regrets[x.fold == fold] = fit.regrets()[x.fold == fold]
    return regrets


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
    fit = fitted(x)
    x.describe("with factors", fit.regrets())
    if options.write:
        every = read_table(TABLE.read_text())
        TABLE.write_text(table_of({**every, stand_in.NAMES[options.gpu]: fit.factors()}))
    x.describe("held out", held_out(x, fit.moved()))
    fit.descend(fit.moved() + list(range(len(x.names), len(fit.steps))), AGAIN)
    for (name, value), steps in zip(x.terms.items(), fit.steps[len(x.names) :], strict=True):
        print(f"  {name} {value:.4g}, better {value * math.exp(steps / STEPS):.4g}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
