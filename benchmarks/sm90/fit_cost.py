"""How well csrc/ops/matmul/sm90_cost.cpp predicts a sweep's timings, and constants that fit better.

    python benchmarks/sm90/fit_cost.py [LINES.jsonl] [--fit 6000]        # needs numpy, no GPU

LINES is what `python -m torch_cubin tune --sweep --lines` writes; by default the sweep on an H200
whose timings the constants below, which are those of sm90_cost.cpp, were fitted to. A product's
regret is how much longer the way that the model would choose takes than the best that was measured.
"""

from __future__ import annotations

import argparse
import json
import math
from pathlib import Path

import numpy as np

LINES = Path(__file__).parents[1] / "results" / "2026-11-22_h200_sweep.jsonl"
MULTIPROCESSORS = 132
# The names of sm90_cost.cpp; the first ones are not searched for: they are of long products, which
# settle at the power limit only in longer runs than a sweep's.
CONSTANTS = {
    "kFlopsPerMicrosecond": 750e6, "kMemoryBytesPerMicrosecond": 3.8e6, "kEnergyOfShared": 0.2,
    "kCyclesPerMicrosecond": 1950, "kL2BytesPerCycle": 80, "kFixed": 1.5, "kTileCycles": 490,
    "kExchangeBytesPerCycle": 13.7, "kExchangeFixed": 0.58, "kStreamFixed": 12,
    "kStreamBytesPerCycle": 15.2, "kShareCycles": 1.03, "kShareFixed": 0.11, "kSplitLines": 2.3,
    "kOutside": 1.13, "kOneWarpgroup": 1.085,
}  # fmt: skip
FIXED = 3


def read(path: Path) -> tuple[dict[str, np.ndarray], list[str]]:
    """A column a fact of the ways of sm90.cu, and the names of the ways."""
    rows, names = [], []
    for number, text in enumerate(path.read_text().splitlines()):
        line = json.loads(text)
        p = line["product"]
        if "elements" in p["a"] + p["b"]:
            continue
        size = 4 if p["math"] == "tf32" else 2
        a_mn, b_mn = p["a"].startswith("own"), p["b"].startswith("own")
        for name, microseconds in line["microseconds"].items():
            if not name.startswith("sm90 "):
                continue
            words = name.split(" ")[1:]
            tile_m, tile_n = map(int, words[0].split("x"))
            names.append(name)
            rows.append({
                "product": number, "us": microseconds, "m": p["m"], "n": p["n"], "k": p["k"],
                "batch": p["batch"], "size": size, "tile_m": tile_m, "tile_n": tile_n,
                "share_a": "share_a" in words, "share_b": "share_b" in words,
                "split": "split_k" in words, "stream": "streamed" in words,
                "a_mn": a_mn, "b_mn": b_mn,
                "a_split": (p["m"] if a_mn else p["k"]) * size % 128 != 0,
                "b_split": (p["n"] if b_mn else p["k"]) * size % 128 != 0,
            })  # fmt: skip
    return {key: np.array([row[key] for row in rows], float) for key in rows[0]}, names


def predict(x: dict[str, np.ndarray], c: dict[str, float]) -> np.ndarray:
    """The model, in microseconds."""
    m, n, tile_m, tile_n = x["m"], x["n"], x["tile_m"], x["tile_n"]
    tiles_m, tiles_n = np.ceil(m / tile_m), np.ceil(n / tile_n)
    shares = x["share_a"] + x["share_b"]
    slots = np.floor(MULTIPROCESSORS / (1 + (shares + x["split"] > 0)))
    tiles = (
        x["batch"] * np.ceil(tiles_m / (1 + x["share_b"])) * np.ceil(tiles_n / (1 + x["share_a"]))
    )
    k_blocks = np.ceil(x["k"] * x["size"] / 128)
    rows_a = np.where(x["a_mn"] > 0, np.ceil(tile_m / 64) * 64, tile_m)
    rows_b = np.where(x["b_mn"] > 0, np.ceil(tile_n / 64) * 64, tile_n)
    shared = rows_a + rows_b + tile_m / 64 * (64 + tile_n)
    split_lines = c["kSplitLines"] - 1
    loaded = rows_a / (1 + x["share_a"]) * (1 + split_lines * x["a_split"])
    loaded += rows_b / (1 + x["share_b"]) * (1 + split_lines * x["b_split"])
    bounds = (tile_m * tile_n / 32, shared, loaded * 128 / c["kL2BytesPerCycle"])
    k_block = sum(bound**4 for bound in bounds) ** 0.25
    inside = m / (tiles_m * tile_m) * n / (tiles_n * tile_n)
    k_block *= 1 + c["kOutside"] * (1 - inside)
    k_block *= np.where(tile_m == 64, c["kOneWarpgroup"], 1)
    k_block *= np.where(shares > 0, c["kShareCycles"], 1)
    cycles = np.ceil(tiles / slots) * k_blocks * k_block
    extra = np.where(shares > 0, c["kShareFixed"], 0.0)
    bytes_of_tile, clock = tile_m * tile_n * 4, c["kCyclesPerMicrosecond"]
    cycles = np.where(x["split"] > 0, np.ceil(k_blocks / 2) * k_block, cycles)
    exchange = bytes_of_tile / c["kExchangeBytesPerCycle"] / clock + c["kExchangeFixed"]
    extra = np.where(x["split"] > 0, exchange, extra)
    whole = np.floor(tiles / slots)
    rest = np.maximum(tiles - whole * slots, 1)
    share = np.maximum(rest, np.minimum(slots, np.floor(rest * k_blocks / 8))) / rest
    streamed = c["kStreamFixed"] + bytes_of_tile * share / c["kStreamBytesPerCycle"] / clock
    cycles = np.where(x["stream"] > 0, (whole + 1 / share) * k_blocks * k_block, cycles)
    extra = np.where(x["stream"] > 0, streamed, extra)
    compute = (cycles + np.maximum(1, tiles / slots) * c["kTileCycles"]) / clock + extra
    moved = (tile_m + tile_n + tile_m / 64 * (64 + tile_n)) / (tile_m * tile_n) / 0.03
    power = 2 * x["batch"] * m * n * x["k"] * x["size"] / 2 / c["kFlopsPerMicrosecond"]
    power *= 1 + c["kEnergyOfShared"] * (moved - 1)
    memory = x["batch"] * x["size"] * (m * x["k"] + x["k"] * n + m * n)
    memory /= c["kMemoryBytesPerMicrosecond"]
    return (compute**4 + power**4 + memory**4) ** 0.25 + c["kFixed"]


def judge(x: dict[str, np.ndarray], c: dict[str, float]) -> dict[str, object]:
    predicted, us = predict(x, c), x["us"]
    error = np.log(predicted / us)
    regrets, spread = {}, 0.0
    for product in np.unique(x["product"]):
        own = np.flatnonzero(x["product"] == product)
        chosen = own[np.argmin(predicted[own])]
        regrets[int(product)] = us[chosen] / us[own].min() - 1
        spread += np.var(error[own]) * len(own)
    mean = sum(regrets.values()) / len(regrets)
    spread /= len(us)
    score = 0.5 * np.mean(error**2) + 2 * spread + 0.3 * mean
    return {"score": score, "rms": math.sqrt(np.mean(error**2)), "mean": mean, "regrets": regrets}


def fit(x: dict[str, np.ndarray], steps: int) -> dict[str, float]:
    """A random walk from the constants, that only goes where it is better."""
    draw = np.random.default_rng(1)
    best, score, width = dict(CONSTANTS), judge(x, CONSTANTS)["score"], 0.15
    names = list(CONSTANTS)[FIXED:]
    for step in range(steps):
        trial = dict(best)
        for name in draw.choice(names, draw.integers(1, 4), replace=False):
            trial[name] *= math.exp(draw.normal() * width)
        found = judge(x, trial)["score"]
        if found < score:
            best, score = trial, found
        if step % (steps // 4 + 1) == steps // 4:
            width *= 0.6
    return best


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("lines", nargs="?", type=Path, default=LINES)
    parser.add_argument("--fit", type=int, default=0, metavar="STEPS", help="search (6000)")
    options = parser.parse_args()
    x, names = read(options.lines)
    constants = fit(x, options.fit) if options.fit else CONSTANTS
    found = judge(x, constants)
    worst = max(found["regrets"].values())
    print(f"{len(names)} timings of {len(found['regrets'])} products")
    print(
        f"root mean square error {found['rms']:.1%}, regret {found['mean']:.1%}, worst {worst:.1%}"
    )
    if options.fit:
        for name, value in constants.items():
            print(f"  {name} {value:.4g} (was {CONSTANTS[name]:.4g})")


if __name__ == "__main__":
    main()
