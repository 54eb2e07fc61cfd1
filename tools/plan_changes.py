"""Compares the kernels of 10,000 random products before and after a change of the planner.

    git checkout main && make && python tools/plan_changes.py record /tmp/before.json
    git checkout mine && make && python tools/plan_changes.py compare /tmp/before.json [--show 40]

Each product is planned on the tests' stand-in driver, as on an H200 or (`--gpu h100`) an H100, by
the cost models only, without tuned tables. `compare` prints every product whose config changed,
with the new model's predicted microseconds for both configs, and the old model's prediction. A
batch-invariant product may only change to a config with the same order of additions, and therefore
the same bits: any other change is an error, which the exit status reports.
"""

from __future__ import annotations

import collections
import json
import random
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))
import stand_in


def main() -> int:
    options = stand_in.comparison(__doc__, "products", show=40)
    if not stand_in.is_there():
        return stand_in.run_again(options.gpu)
    stand_in.driver()
    products = random_products(options.products, options.seed)
    if options.action == "record":
        options.record.write_text(json.dumps([as_recorded(plan) for plan in plans_of(products)]))
        return 0
    return compare(products, json.loads(options.record.read_text()), options.show)


def plans_of(products: list[dict[str, Any]], configs: bool = False) -> list[dict[str, Any]]:
    from torch_cubin._native import library

    return library.planned(products, configs)


def as_recorded(plan: dict[str, Any]) -> list[Any]:
    return [plan["chosen"], round(plan["microseconds"], 3), plan["sum_order"]]


def compare(products: list[dict[str, Any]], before: list[list[Any]], show: int) -> int:
    """Prints the changes; returns 1 if the order of a batch-invariant product's additions
    changed."""
    changes: collections.Counter[tuple[str, str]] = collections.Counter()
    wrong, shown = 0, 0
    after = [as_recorded(plan) for plan in plans_of(products)]
    for product, old, new in zip(products, before, after, strict=True):
        if product["batch_invariant"] and old[2] != new[2]:
            wrong += 1
            print(f"OTHER BITS {product}: {old[0]}, order {old[2]} -> {new[0]}, order {new[2]}")
        if old[0] == new[0]:
            continue
        changes[kind(old[0]), kind(new[0])] += 1
        if shown < show:
            shown += 1
            print(explained(product, old, new))
    print(f"{len(products)} products, {changes.total()} changed")
    for (old, new), count in changes.most_common():
        print(f"{count:6} {old} -> {new}")
    return 1 if wrong else 0


def explained(product: dict[str, Any], old: list[Any], new: list[Any]) -> str:
    (plan,) = plans_of([product], configs=True)
    times = {config["name"]: config["microseconds"] for config in plan["configs"]}
    now = f"{times[old[0]]:.2f} us" if old[0] in times else "no longer offered"
    facts = " ".join(
        name if value is True else f"{name}={value}"
        for name, value in product.items()
        if name not in ("m", "n", "k") and value not in (False, 0)
    )
    sizes = f"{product['m']}x{product['n']}x{product['k']}"
    return f"{sizes} {facts}: {old[0]} ({old[1]:.2f} then, {now}) -> {new[0]} ({new[1]:.2f} us)"


def kind(name: str) -> str:
    return name.split(" ")[0]


def random_products(count: int, seed: int) -> list[dict[str, Any]]:
    rng = random.Random(seed)
    return [random_product(rng) for _ in range(count)]


def random_product(rng: random.Random) -> dict[str, Any]:
    math = rng.choice(("16_bit", "16_bit", "16_bit", "16_bit", "tf32", "float32", "float64"))
    bytes_each = {"16_bit": 2, "float64": 8}.get(math, 4)
    m, n, k = (stand_in.random_size(rng) for _ in range(3))
    plain = math != "16_bit" or rng.random() < 0.7
    return {
        "m": m, "n": n, "k": k, "batch": rng.choice((1, 1, 1, 1, 2, 16, rng.randint(1, 300))),
        "math": math, "dtype": rng.choice(("bfloat16", "float16")),
        "a": random_access(rng, m, k, bytes_each), "b": random_access(rng, n, k, bytes_each),
        "bias": rng.random() < 0.3, "activation": 0 if plain else rng.randint(0, 3),
        "addend": not plain and rng.random() < 0.3,
        "batch_invariant": rng.random() < 0.25,
    }  # fmt: skip


def random_access(rng: random.Random, own: int, k: int, bytes_each: int) -> str:
    """How a contiguous operand of these sizes is read, with K along its rows or not."""
    dim = rng.choice(("k", "k", "own"))
    row = (k if dim == "k" else own) * bytes_each
    return f"{dim}_{'lines' if row % 128 == 0 else 'vectors' if row % 16 == 0 else 'elements'}"


if __name__ == "__main__":
    sys.exit(main())
