"""The planner's regret on sweeps: how much longer products take than with the best config.

    python benchmarks/planner_regret.py [SWEEP.jsonl ...] [--worst 20]    # needs no GPU

A product's regret is the time of the measured config that the planner predicts to be fastest,
relative to that of the best one. It covers all kernels, without tuned tables. Sweeps are the output
of `python -m torch_cubin tune --sweep --lines`, in files that name their GPU; by default all sweeps
of the tree. Products are planned on the tests' stand-in driver, with that GPU's memory.
"""

from __future__ import annotations

import argparse
import functools
import json
import math
import re
import statistics
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tools"))
import stand_in  # noqa: E402

RESULTS = ROOT / "benchmarks" / "results"
LINE_BYTES = 128
SUM_BYTES = 4  # of a sum of a split
Line = tuple[dict[str, Any], dict[str, float]]  # a product, and microseconds by config
KINDS = ("few rows", "rows anywhere", "others")
# From this day on blocks alone of tiles that end within a panel load lines of the L2 cache as a
# whole (csrc/kernels/matmul/sm90_halves.cuh): 1.04 times as fast, up to 1.18. Older times of them
# are of other kernels.
WHOLE_LINES_SINCE = "2026-12-01"
WITH_HALVES = re.compile(r"sm90 \d+x(?:160|96)( ping_pong)?( swapped)?( streamed.*)?")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("sweeps", nargs="*", type=Path)
    parser.add_argument("--worst", type=int, default=0, metavar="PRODUCTS")
    parser.add_argument("--gpu", choices=stand_in.MEMORY, help="only its sweeps")
    options = parser.parse_args()
    if not stand_in.is_there():
        gpus = [options.gpu] if options.gpu else list(stand_in.MEMORY)
        return max(stand_in.run_again(gpu, "--gpu", gpu) for gpu in gpus)
    stand_in.driver()
    found = regrets_of(sweep_lines(options.gpu, options.sweeps))
    for what, regrets in ({"all": found} | by_kind(found)).items():
        values = [regret["regret"] for regret in regrets]
        if values:
            above = sum(value > 0.1 for value in values) / len(values)
            mean = f"regret {statistics.mean(values):.2%}, above 10% {above:.1%}"
            print(f"{options.gpu} {what}: {len(values)} products, {mean}")
    for regret in sorted(found, key=lambda each: -each["regret"])[: options.worst]:
        print("{regret:.0%} {product}: {chosen}, best {best}".format(**regret))
    return 0


def sweep_lines(gpu: str, paths: list[Path] | None = None) -> list[Line]:
    """Each product of a GPU's sweeps once, with the times of the newest file."""
    found = [line for path in sweeps(gpu, paths) for line in lines(path)]
    return list(
        {json.dumps(product, sort_keys=True): (product, t) for product, t in found}.values()
    )


def merged_lines(gpu: str, paths: list[Path] | None = None) -> list[Line]:
    """The same with older times, too, as much longer or shorter as those of the configs that were
    measured again. Of one day each file counts as much as those before it together; times of other
    days stand for configs that were not measured since."""
    found: dict[str, tuple[str, Line]] = {}
    for path in sweeps(gpu, paths):
        day = path.name.split("_")[0]
        for product, times in lines(path):
            before, (_, older) = found.get(key_of(product), (day, (product, {})))
            ratios = [us / older[name] for name, us in times.items() if name in older]
            scale = statistics.geometric_mean(ratios) if ratios else 0
            scaled = {name: us * scale for name, us in older.items()} if scale else {}
            if day == before:
                times = {n: math.sqrt(us * scaled.get(n, us)) for n, us in times.items()}
            found[key_of(product)] = day, (product, {**scaled, **times})
    return [line for _, line in found.values()]


def sweeps(gpu: str, paths: list[Path] | None) -> list[Path]:
    every = paths or sorted(RESULTS.glob("*sweep*.jsonl"))
    return [path for path in every if f"_{gpu}_" in path.name]


def key_of(product: dict[str, Any]) -> str:
    """Both 16-bit types have the same plans."""
    return json.dumps({k: v for k, v in product.items() if k != "dtype"}, sort_keys=True)


def kind_of(product: dict[str, Any]) -> str:
    few = min(product["m"], product["n"]) <= 64
    anywhere = "elements" in product["a"] + product["b"]
    return "rows anywhere" if anywhere else "few rows" if few else "others"


def by_kind(found: list[dict[str, Any]]) -> dict[str, list[dict[str, Any]]]:
    return {kind: [each for each in found if kind_of(each["sizes"]) == kind] for kind in KINDS}


def lines(path: Path) -> list[Line]:
    read = [json.loads(text) for text in path.read_text().splitlines()]
    found = [
        (with_lines(line["product"]), {this_name(n): t for n, t in line["microseconds"].items()})
        for line in read
    ]
    if path.name >= WHOLE_LINES_SINCE:
        return found
    return [(x, {n: t for n, t in ts.items() if not has_halves(x, n)}) for x, ts in found]


def has_halves(product: dict[str, Any], name: str) -> bool:
    """Whether a config is a block alone whose columns end within a panel of 16-bit numbers."""
    config = WITH_HALVES.fullmatch(name)
    if config is None or product["math"] != "16_bit":
        return False
    return bool(product["a" if config[2] else "b"].startswith("own"))


def predictions(
    sweep: list[Line], terms: dict[str, float] | None = None, every: bool = False
) -> list[dict[str, float]]:
    """Of each product the predicted microseconds of the configs that were measured, or of `every`
    one. Where splits were measured by the config of their products ("split/sm90 64x128 7 splits"),
    they count in place of "split", whose config may have been another one."""
    found = predicted([product for product, _ in sweep], terms)
    with_parts = [i for i, (_, times) in enumerate(sweep) if any("/" in name for name in times)]
    all_parts = predicted_parts([sweep[i][0] for i in with_parts], terms)
    for i, parts in zip(with_parts, all_parts, strict=True):
        if not parts or "split" not in found[i]:
            continue
        best = min(parts, key=parts.__getitem__)
        beside = found[i].pop("split") - parts[best]  # the kernel that adds the sums
        one = sweep[i][0]["m"] * sweep[i][0]["n"] * SUM_BYTES / bytes_per_microsecond()
        for name, us in parts.items():
            more_sums = (splits_of(name) - splits_of(best)) * one
            found[i][f"split/{name}"] = us + beside + more_sums
    return [
        {name: us for name, us in own.items() if every or name in times}
        for own, (_, times) in zip(found, sweep, strict=True)
    ]


def predicted(
    products: list[dict[str, Any]], terms: dict[str, float] | None = None
) -> list[dict[str, float]]:
    """Microseconds by config."""
    from torch_cubin._native import library

    plans = library.planned(products, True, **({} if terms is None else {"terms": terms}))
    return [{c["name"]: c["microseconds"] for c in plan["configs"]} for plan in plans]


def predicted_parts(
    products: list[dict[str, Any]], terms: dict[str, float] | None = None
) -> list[dict[str, float]]:
    """The same of each product's parts of K, whose sums another kernel adds."""
    cases = [{**product, "split_sums": True, "float_output": True} for product in products]
    found = predicted(cases, terms)
    return [{n: us for n, us in each.items() if n.endswith(" splits")} for each in found]


def splits_of(name: str) -> int:
    return int(name.split(" ")[-2])


@functools.cache
def bytes_per_microsecond() -> float:
    """Of the kernel that adds the sums of splits."""
    from torch_cubin._native import library

    kernels = json.loads((ROOT / "torch_cubin" / "cubins" / "manifest.json").read_text())["kernels"]
    share = next(k["cost"]["share"] for k in kernels if k["kind"] == "finish")
    return share * library.planner_terms()["memory_bytes_per_microsecond"]


def regrets_of(sweep: list[Line]) -> list[dict[str, Any]]:
    regrets = []
    for (product, times), predicted in zip(sweep, predictions(sweep), strict=True):
        if not predicted:
            continue
        chosen, best = min(predicted, key=predicted.__getitem__), min(predicted, key=times.get)
        sizes = f"{product['m']}x{product['n']}x{product['k']} {product['a']} {product['b']}"
        regrets.append(
            {"regret": times[chosen] / times[best] - 1, "product": sizes, "sizes": product,
             "chosen": chosen, "best": best}
        )  # fmt: skip
    return regrets


def this_name(name: str) -> str:
    """The first sweeps used the full names of portable kernels."""
    found = re.fullmatch(r"(\w+?)_matmul_\w+?_(\d+x[\dx]+)( swapped)?", name)
    return f"{found[1]} {found[2]}{found[3] or ''}" if found else name


def with_lines(product: dict[str, Any]) -> dict[str, Any]:
    """The first sweeps labelled all aligned rows as vectors."""
    size = {"16_bit": 2, "float64": 8}.get(product["math"], 4)

    def access(name: str, own: int) -> str:
        dim = name.split("_")[0]
        row = (product["k"] if dim == "k" else own) * size
        whole = "lines" if row % LINE_BYTES == 0 else "vectors"
        return name if name.endswith("elements") else f"{dim}_{whole}"

    a, b = access(product["a"], product["m"]), access(product["b"], product["n"])
    return {**product, "a": a, "b": b}


if __name__ == "__main__":
    sys.exit(main())
