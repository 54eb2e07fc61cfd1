"""Compares the predictions of csrc/ops/matmul/sm90_cost.cpp with sweeps, and fits its constants.

    python benchmarks/sm90/fit_cost.py [LINES.jsonl ...] [--fit 9000]      # needs numpy, no GPU

LINES are files of `python -m torch_cubin tune --sweep --lines`, by default all sweeps of the H200
and the H100. The file's name must name the GPU, whose memory bandwidth the model uses. The regret
of a product is the time of the config that the model chooses, relative to the best measured config.
`--fit` cross-validates: the sizes are distributed over five folds, and each fold is predicted with
constants fitted to the other four. Split-K and products whose rows are read by threads are skipped:
their constants are not fitted here.
"""

from __future__ import annotations

import argparse
import json
import math
import multiprocessing
from collections.abc import Iterator
from pathlib import Path

import numpy as np

SWEEPS = sorted((Path(__file__).parents[1] / "results").glob("*_sweep*.jsonl"))
MULTIPROCESSORS = 132
# Peak memory bandwidth in bytes per microsecond (clock and bus width), by the GPU in a file's name.
MEMORY = {"h200": 4.917e6, "h100": 3.352e6}
# Named as in sm90_cost.cpp. The first ones are not fitted: they describe long products, which reach
# the power limit only in runs longer than a sweep's.
CONSTANTS = {
    "kFlopsPerMicrosecond": 750e6, "kSm90MemoryShare": 0.773, "kEnergyOfShared": 0.2,
    "kCyclesPerMicrosecond": 1950, "kL2BytesPerCycle": 80, "kFixed": 1.5, "kTileCycles": 490,
    "kExchangeBytesPerCycle": 13.7, "kExchangeFixed": 0.58, "kStreamFixed": 12,
    "kStreamBytesPerCycle": 15.2, "kShareCycles": 1.03, "kShareFixed": 0.11, "kSplitLines": 2.3,
    "kOutside": 1.13, "kOneWarpgroup": 1.085, "kFourFixed": 0.25,
    "kFourCrowded": 1.12, "kCrowdedRows": 0.011, "kCrowdedFrom": 24, "kStoreAnywhereBytes": 10,
    "kStoreNarrowBytes": 7, "kReadAgain": 0.2,
}  # fmt: skip
FIXED = 3
FOLDS = 5
# FOURS is the fraction of the multiprocessors that clusters of four and eight can use; the others
# are kLeastShared, kFoursSure and kLeastStreamBlocks.
FOURS, LEAST_SHARED, FOURS_SURE, LEAST_STREAM = 10 / 11, 0.03, 28, 8
# kSm90Clusters: the numbers of blocks that share A's tile, and B's.
CLUSTERS = {
    "": (1, 1), "share_a": (2, 1), "share_b": (1, 2), "split_k": (1, 1), "share_both": (2, 2),
    "four_a": (4, 1), "four_b": (1, 4), "2x4": (4, 2), "4x2": (2, 4), "eight_a": (8, 1),
    "eight_b": (1, 8),
}  # fmt: skip

Columns = dict[str, np.ndarray]
Constants = dict[str, float]


def read(paths: list[Path]) -> Columns:
    """One column per property of the configs of sm90.cu; the configs of a product are adjacent."""
    lines = ((path, line) for path in paths for line in path.read_text().splitlines())
    rows = [
        row | {"memory": memory_of(path)}
        for number, (path, line) in enumerate(lines)
        for row in configs(number, json.loads(line))
    ]
    return {key: np.array([row[key] for row in rows], float) for key in rows[0]}


def memory_of(path: Path) -> float:
    for gpu, rate in MEMORY.items():
        if f"_{gpu}_" in path.name:
            return rate
    raise SystemExit(f"{path}: expected a name that has _{'_ or _'.join(MEMORY)}_ in it")


def configs(number: int, line: dict) -> Iterator[dict[str, float]]:
    p = line["product"]
    if "elements" in p["a"] + p["b"]:
        return
    m, n, k, size = p["m"], p["n"], p["k"], 4 if p["math"] == "tf32" else 2
    a_mn, b_mn = p["a"].startswith("own"), p["b"].startswith("own")
    for name, microseconds in line["microseconds"].items():
        kind, _, rest = name.partition(" ")
        words = rest.split(" ")
        if kind != "sm90" or "read" in words or "splits" in words:
            continue
        tile_m, tile_n = map(int, words[0].split("x"))
        cluster = next((word for word in words[1:] if word in CLUSTERS), "")
        of_a, of_b = CLUSTERS[cluster]
        yield {
            "product": number, "us": microseconds, "m": m, "n": n, "k": k, "batch": p["batch"],
            "size": size, "tile_m": tile_m, "tile_n": tile_n, "of_a": of_a, "of_b": of_b,
            "split": cluster == "split_k", "stream": "streamed" in words,
            "a_mn": a_mn, "b_mn": b_mn,
            # NOTE: derived from the sizes: the first sweeps labelled all aligned rows as vectors.
            "a_split": (m if a_mn else k) * size % 128 != 0,
            "b_split": (n if b_mn else k) * size % 128 != 0,
        }  # fmt: skip


def k_block_cycles(x: Columns, c: Constants) -> np.ndarray:
    """Cycles of one block per 128 bytes of K."""
    tile_m, tile_n, sharers = x["tile_m"], x["tile_n"], x["of_a"] * x["of_b"]
    rows_a, rows_b = loaded(tile_m, x["a_mn"]), loaded(tile_n, x["b_mn"])
    lines = rows_a / x["of_a"] * np.where(x["a_split"], c["kSplitLines"], 1)
    lines += rows_b / x["of_b"] * np.where(x["b_split"], c["kSplitLines"], 1)
    bounds = (tile_m * tile_n / 32, shared_cycles(x), lines * 128 / c["kL2BytesPerCycle"])
    waits = np.where(sharers > 1, c["kShareCycles"], 1)
    return smooth_max(*bounds) * waits * np.where(tile_m == 64, c["kOneWarpgroup"], 1)


def loaded(tile: np.ndarray, mn_major: np.ndarray) -> np.ndarray:
    return np.where(mn_major, np.ceil(tile / 64) * 64, tile)


def shared_cycles(x: Columns) -> np.ndarray:
    rows = loaded(x["tile_m"], x["a_mn"]) + loaded(x["tile_n"], x["b_mn"])
    return rows + x["tile_m"] / 64 * (64 + x["tile_n"])


def smooth_max(*bounds: np.ndarray) -> np.ndarray:
    return sum(bound**4 for bound in bounds) ** 0.25


def predict(x: Columns, c: Constants) -> np.ndarray:
    """Predicted microseconds: the model of `Chooser` in sm90_cost.cpp."""
    m, n, tile_m, tile_n = x["m"], x["n"], x["tile_m"], x["tile_n"]
    clock, k_blocks = c["kCyclesPerMicrosecond"], np.ceil(x["k"] * x["size"] / 128)
    tiles_m, tiles_n = np.ceil(m / tile_m), np.ceil(n / tile_n)
    size = np.where(x["split"], 2, x["of_a"] * x["of_b"])
    capacity = np.where(size >= 4, MULTIPROCESSORS * FOURS, MULTIPROCESSORS)
    slots = np.floor(capacity / size + 1e-9)
    tiles = x["batch"] * np.ceil(tiles_m / x["of_b"]) * np.ceil(tiles_n / x["of_a"])
    waves = np.maximum(1, tiles / slots)

    inside = m / (tiles_m * tile_m) * n / (tiles_n * tile_n)
    outside = 8 * x["batch"] * tiles_m * tiles_n < 7 * tiles * size
    crowded = (size == 4) & outside & (tiles > FOURS_SURE) & (tiles <= slots)
    k_block = k_block_cycles(x, c) * (1 + c["kOutside"] * (1 - inside))
    k_block *= np.where(crowded, c["kFourCrowded"], 1)
    tile = k_blocks * k_block

    def readers(split: np.ndarray, blocks: np.ndarray, rows: np.ndarray) -> np.ndarray:
        many = np.minimum(np.floor(blocks), MULTIPROCESSORS) * rows / 64 - c["kCrowdedFrom"]
        return np.where(split, np.maximum(many, 0), 0)

    of_a = readers(x["a_split"], tiles_n / x["of_a"], tile_m)
    of_b = readers(x["b_split"], tiles_m / x["of_b"], tile_n)
    shares = np.where(size >= 4, c["kFourFixed"], np.where(size == 2, c["kShareFixed"], 0))
    extra = shares + c["kCrowdedRows"] * np.maximum(of_a, of_b)

    bandwidth = np.where(tile_n % 64 == 0, c["kStoreAnywhereBytes"], c["kStoreNarrowBytes"])
    stored = tile_m * tile_n * x["size"] / bandwidth
    hidden = np.where(tile_m == 64, 0, tile / 2)
    stores = (waves - 1) * np.maximum(0, stored - hidden) + np.maximum(0, stored - tile)
    stores = np.where(n * x["size"] % 16 == 0, 0, stores / clock)

    sums = tile_m * tile_n * 4 / clock
    exchange = sums / c["kExchangeBytesPerCycle"] + c["kExchangeFixed"]
    whole = np.floor(tiles / slots)
    rest = np.maximum(tiles - whole * slots, 1)
    share = np.maximum(rest, np.minimum(slots, np.floor(rest * k_blocks / LEAST_STREAM))) / rest
    streamed = c["kStreamFixed"] + sums * share / c["kStreamBytesPerCycle"] + stores
    kinds = [x["split"] > 0, x["stream"] > 0]
    halves = np.ceil(k_blocks / 2) * k_block
    waves_cycles = np.ceil(tiles / slots) * tile
    cycles = np.select(kinds, [halves, (whole + 1 / share) * tile], waves_cycles)
    extra = np.select(kinds, [exchange, streamed], extra + stores)
    compute = (cycles + waves * c["kTileCycles"]) / clock + extra

    moved = shared_cycles(x) / (tile_m * tile_n) / LEAST_SHARED
    power = 2 * x["batch"] * m * n * x["k"] * x["size"] / 2 / c["kFlopsPerMicrosecond"]
    power *= 1 + c["kEnergyOfShared"] * (moved - 1)

    def again(clusters: np.ndarray) -> np.ndarray:
        return 1 + c["kReadAgain"] * (np.ceil(clusters) > 1)

    memory = m * x["k"] * again(tiles_n / x["of_a"]) + x["k"] * n * again(tiles_m / x["of_b"])
    memory = x["batch"] * x["size"] * (memory + m * n)
    memory /= c["kSm90MemoryShare"] * x["memory"]
    return smooth_max(compute, power, memory) + c["kFixed"]


def regrets(x: Columns, predicted: np.ndarray) -> np.ndarray:
    """The regret of each product; the average over configs with equal predictions."""
    begin, predicted = starts(x), predicted.round(6)
    least = np.minimum.reduceat(predicted, begin)
    is_chosen = predicted == np.repeat(least, np.diff(begin, append=len(predicted)))
    chosen = np.add.reduceat(x["us"] * is_chosen, begin) / np.add.reduceat(is_chosen * 1, begin)
    return chosen / np.minimum.reduceat(x["us"], begin) - 1


def starts(x: Columns) -> np.ndarray:
    return np.flatnonzero(np.diff(x["product"], prepend=-1))


def spread(x: Columns, predicted: np.ndarray) -> tuple[float, float]:
    """Mean square of the error, and of its part that differs between the configs of a product."""
    error, begin = np.log(predicted / x["us"]), starts(x)
    counts = np.diff(begin, append=len(error))
    own = error - np.repeat(np.add.reduceat(error, begin) / counts, counts)
    return float(np.mean(error**2)), float(np.mean(own**2))


def score(x: Columns, c: Constants) -> float:
    predicted = predict(x, c)
    error, own = spread(x, predicted)
    return 0.5 * error + 2 * own + 0.3 * float(np.mean(regrets(x, predicted)))


def fit(x: Columns, steps: int) -> Constants:
    """Random search from the current constants; only improvements are accepted."""
    draw = np.random.default_rng(1)
    best, least, width = dict(CONSTANTS), score(x, CONSTANTS), 0.15
    names = list(CONSTANTS)[FIXED:]
    for step in range(steps):
        trial = dict(best)
        for name in draw.choice(names, draw.integers(1, 4), replace=False):
            trial[name] *= math.exp(draw.normal() * width)
        found = score(x, trial)
        if found < least:
            best, least = trial, found
        if step % (steps // 4 + 1) == steps // 4:
            width *= 0.6
    return best


def pick(x: Columns, mask: np.ndarray) -> Columns:
    return {key: column[mask] for key, column in x.items()}


def folds(x: Columns) -> np.ndarray:
    """The fold of each timing; products of equal sizes share a fold in all sweeps."""
    sizes = np.stack([x["m"], x["n"], x["k"]], 1)
    _, number = np.unique(sizes, axis=0, return_inverse=True)
    fold_of = np.random.default_rng(0).permutation(number.max() + 1) % FOLDS
    return fold_of[number.reshape(-1)]


def describe(what: str, x: Columns, c: Constants) -> None:
    predicted = predict(x, c)
    found, (error, _) = regrets(x, predicted), spread(x, predicted)
    print(
        f"{what}: root mean square error {math.sqrt(error):.1%}, regret {found.mean():.2%}, "
        f"worst {found.max():.1%}, above 10% {np.mean(found > 0.1):.1%}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("lines", nargs="*", type=Path, default=SWEEPS)
    parser.add_argument("--fit", type=int, default=0, metavar="STEPS", help="search (9000)")
    options = parser.parse_args()
    x = read(options.lines)
    print(f"{len(x['us'])} timings of {len(starts(x))} products")
    describe("constants of sm90_cost.cpp", x, CONSTANTS)
    for gpu, rate in MEMORY.items():
        if (x["memory"] == rate).any():
            describe(f"those of the {gpu.upper()}", pick(x, x["memory"] == rate), CONSTANTS)
    if not options.fit:
        return
    fold = folds(x)
    parts = [pick(x, fold != i) for i in range(FOLDS)] + [x]
    with multiprocessing.Pool() as pool:
        found = pool.starmap(fit, [(part, options.fit) for part in parts])
    before, after = [], []
    for i in range(FOLDS):
        held = pick(x, fold == i)
        before.append(regrets(held, predict(held, CONSTANTS)))
        after.append(regrets(held, predict(held, found[i])))
        print(f"fold {i}, held out: regret {before[i].mean():.2%} -> {after[i].mean():.2%}")
    gain = np.concatenate(after) - np.concatenate(before)
    error = gain.std() / math.sqrt(len(gain))
    print(f"held out, all folds: regret changes by {gain.mean():+.2%}, standard error {error:.2%}")
    describe("fitted to all", x, found[FOLDS])
    for name, value in found[FOLDS].items():
        of_folds = " ".join(f"{constants[name]:.4g}" for constants in found[:FOLDS])
        print(f"  {name} {value:.4g} (was {CONSTANTS[name]:.4g}; folds {of_folds})")


if __name__ == "__main__":
    main()
