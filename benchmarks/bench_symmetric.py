"""Symmetric products and Muon, compared with PyTorch's own.

    python benchmarks/bench_symmetric.py [--json FILE] [--only TEXT ...] [--random COUNT] [--seed N]
    python benchmarks/bench_symmetric.py --configs [--only TEXT ...] [--json FILE --below RATIO]

- products: `x @ x.t()` through `cubin::matmul`, and `b g + c g g` of a symmetric g by
  `cubin::symm_square`, as CUDA graphs whose operands rotate over more than the L2 cache;
- any size: `x @ x.t()` of 186 sizes, for less time each, so that no size is slower unseen;
- random: the same of 200 products of three dtypes, both layouts, batches and odd sizes;
- Newton-Schulz: Muon's own function, outside and inside drop_in(), and `newton_schulz()`, also of
  batches and in its Gram form; small matrices also as CUDA graphs, since the host's launches take
  longer than their products;
- steps: `torch.optim.Muon(...).step()` of the matrices of Llama-3.2-1B, and of larger ones.

Each contender alternates with PyTorch in one process; the first half of each block lets the clocks
settle. Ratios are PyTorch's time to a contender's, the median of five rounds and their range: above
1, ours is faster. Of the sizes and the random products, those under 0.988 are measured again at the
end, with other operands, in ten rounds more; their lines are of all fifteen. All takes some 190
seconds, the products a third, the sizes a quarter. --only
keeps the cases whose names contain some TEXT ("x x^T", "any size", "random", "Newton-Schulz 4096").
--json is written after every case; what the file has of other cases, from an earlier run on the
same machine, stays. --configs times the configs that seem quickest to the planner for `x @ x.t()`,
beside their predicted times, in place of contenders: also those that follow a copy; --lines appends
them to a sweep, as planner_regret.py reads it. With --below, only of the cases that have less in
the --json file, which is read first.
"""

from __future__ import annotations

import functools
import json
import math
import random
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import common
import torch
from torch import Tensor
from torch.optim import _muon

import torch_cubin
from torch_cubin._native import library
from torch_cubin._tuning import measure
from torch_cubin._tuning.products import Product

ops = torch.ops.cubin
Calls = dict[str, Callable[[], object]]
ROUNDS, BUDGET_MS = 5, 450  # of a pair of contenders
SLOW, MORE_ROUNDS = 0.988, 10  # a ratio that noise explains, and another look at those below it
ROTATED_BYTES = 150e6
CONFIGS, FULL = 12, 3  # that --configs times of a product; of full products
# Rows, columns.
PRODUCTS = [
    *((n, n) for n in (256, 512, 768, 1024, 1280, 1536, 1792, 2048, 2560, 3072, 4096, 5120, 6144)),
    *((8192, 8192), (12288, 12288), (512, 2048), (1024, 4096), (2048, 8192), (4096, 1024)),
    *((4096, 16384), (3000, 3000), (4104, 4096)),
    # Of 240 products of 64 to 3,072 rows and 256 to 8,192 columns, the slowest.
    *((384, 2048), (448, 2048), (896, 1024), (896, 2048), (960, 2048), (768, 4096), (1536, 256)),
    *((1536, 512), (1792, 256)),
]
ROWS = [*range(128, 1025, 64), *range(1152, 2049, 128), *range(2304, 4097, 256)]
COLUMNS = [256, 512, 1024, 2048, 4096, 8192]
SIZES_BUDGET_MS = 100
RANDOM, SEED = 200, 0
MOST_WORK, MOST_BYTES = 2**37, 2**28  # of a random product
MOST_LAUNCHES = 24  # of a graph
MATRICES = [(512, 2048), (1024, 1024), (2048, 2048), (2048, 8192), (4096, 4096), (4096, 16384),
            (16384, 4096)]  # fmt: skip
COMPILED = (4096, 4096)
BATCHES = [(32, 512, 2048), (16, 1024, 1024), (32, 2048, 2048), (16, 2048, 8192)]
# The matrices of a step, by their number.
LLAMA_1B = {(2048, 2048): 32, (512, 2048): 32, (8192, 2048): 32, (2048, 8192): 16}
LARGE = {(4096, 4096): 4, (14336, 4096): 4, (4096, 14336): 2}


def muons(grad: Tensor) -> Tensor:
    """Muon's own iteration, by its name: drop_in() replaces it."""
    return _muon._zeropower_via_newtonschulz(grad, (3.4445, -4.7750, 2.0315), 5, 1e-7)


@dataclass
class Case:
    """`calls` makes the contenders' calls, PyTorch's first; each runs the product `count` times."""

    group: str  # of goals.SYMMETRIC
    name: str
    calls: Callable[[], Calls]
    count: int = 1
    product: Product | None = None  # of --configs
    budget_ms: float = BUDGET_MS

    @property
    def brief(self) -> bool:  # so that noise is seen
        return self.budget_ms < BUDGET_MS


def served(call: Callable[[], object]) -> Callable[[], object]:
    def inside() -> object:
        with torch_cubin.drop_in():
            return call()

    return inside


def draw(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.randn(shape, device="cuda", dtype=dtype)


def graphs(calls: dict[str, Callable[[Tensor], Tensor]], sets: list[Tensor]) -> Calls:
    """Each contender is a graph of calls with operands of their own."""
    return {
        who: common.graph_of([functools.partial(call, x) for x in sets])[0].replay
        for who, call in calls.items()
    }


def operands(product: Product, count: int, gram: bool = False) -> list[Tensor]:
    """X of each product, or symmetric matrices of its size."""
    n, k, batch = product.m, product.k, product.batch
    shape = (n, k) if product.layout.lower() == "nt" else (k, n)
    sets = [draw(*([batch] if batch > 1 else []), *shape, dtype=product.torch_dtype)
            for _ in range(count)]  # fmt: skip
    if product.layout.lower() == "tn":
        sets = [x.mT for x in sets]
    return [ops.syrk(x) / k for x in sets] if gram else sets


TIMES_TRANSPOSE = {
    "torch": lambda x: x @ x.mT,
    "ours": lambda x: ops.matmul(x, x.mT),
}
SQUARE = {
    "torch": lambda g: torch.addmm(g, g, g, beta=-4.775, alpha=2.0315),
    "ours": lambda g: ops.symm_square(g, g, beta=-4.775, alpha=2.0315),
}


def rotated(product: Product) -> int:
    """Pairs of an operand and a result that together are larger than the L2 cache."""
    elements = product.batch * product.m * (product.m + product.k)
    sets = math.ceil(ROTATED_BYTES / (product.torch_dtype.itemsize * elements))
    return max(1, min(MOST_LAUNCHES, sets))


def gram_of(n: int, k: int, dtype: str = "bfloat16", layout: str = "nt", batch: int = 1) -> Product:
    return Product.of_layout(n, n, k, layout, dtype, batch)


def times_transpose(group: str, name: str, product: Product, budget_ms: float) -> Case:
    count = rotated(product)
    return Case(
        group,
        name,
        lambda: graphs(TIMES_TRANSPOSE, operands(product, count)),
        count,
        product,
        budget_ms,
    )


def products() -> Iterator[Case]:
    for dtype in ("bfloat16", "float16", "tf32"):
        for n, k in PRODUCTS if dtype == "bfloat16" else [(2048, 2048), (4096, 4096)]:
            product = gram_of(n, k, dtype)
            name = dtype.replace("tf32", "TF32")
            rows = "from 4,096 rows" if n >= 4096 else "fewer rows"
            yield times_transpose(f"x x^T, {rows}", f"x x^T {name} {n} x {k}", product, BUDGET_MS)
            if n == k:
                draws = functools.partial(operands, product, rotated(product), gram=True)
                yield Case(
                    f"b g + c g g, {rows}",
                    f"b g + c g g {name} {n}",
                    lambda draws=draws: graphs(SQUARE, draws()),
                    rotated(product),
                )


def any_size() -> Iterator[Case]:
    for n in ROWS:
        for k in COLUMNS:
            name = f"any size, x x^T {n} x {k}"
            yield times_transpose("x x^T, any size", name, gram_of(n, k), SIZES_BUDGET_MS)


def random_products(count: int, seed: int) -> Iterator[Case]:
    """Of 16 to 4,096 rows and 16 to 8,192 columns, their logarithms uniform: multiples of 64, of 8
    (rows of the 16-bit types are aligned), of 2 (to 4 bytes), and any."""
    draws = random.Random(seed)
    names: set[str] = set()
    while len(names) < count:
        dtype = draws.choice(("bfloat16", "float16", "tf32"))
        n, k = (
            max(step, round(2 ** draws.uniform(4, most) / step) * step)
            for most, step in ((12, draws.choice((64, 64, 8, 2, 1))),
                               (13, draws.choice((64, 64, 8, 2, 1))))
        )  # fmt: skip
        batch = draws.choice((1, 1, 1, 1, 1, 2, 8, draws.randint(2, 32)))
        product = gram_of(n, k, dtype, draws.choice(("nt", "nt", "tn")), batch)
        work, bytes_of = batch * n * n * k, batch * n * (n + k) * product.torch_dtype.itemsize
        name = f"random, x x^T {product}".replace("float32", "TF32")
        if work <= MOST_WORK and bytes_of <= MOST_BYTES and name not in names:
            names.add(name)
            yield times_transpose("x x^T, random", name, product, SIZES_BUDGET_MS)


def newton_schulz() -> Iterator[Case]:
    for shape in MATRICES:
        if min(shape) < 4096:
            yield Case(
                "Newton-Schulz, smaller, in a graph",
                f"Newton-Schulz {shape[0]} x {shape[1]} in a graph",
                functools.partial(in_a_graph, *shape),
            )
        large = "Newton-Schulz, squares" if shape[0] == shape[1] else "Newton-Schulz, long"
        group = large if min(shape) >= 4096 else "Newton-Schulz, smaller"
        name = f"Newton-Schulz {shape[0]} x {shape[1]}"
        yield Case(group, name, functools.partial(of_one, *shape))
    for shape in BATCHES:
        name = f"Newton-Schulz batch {shape[0]} of {shape[1]} x {shape[2]}"
        yield Case("Newton-Schulz, batches", name, functools.partial(of_batch, *shape))


def of_one(*shape: int) -> Calls:
    grad = draw(*shape)
    own = functools.partial(muons, grad)
    calls: Calls = {
        "torch": own,
        "ours": served(own),
        "gram": functools.partial(torch_cubin.newton_schulz, grad, gram=True),
    }
    if shape == COMPILED:
        calls["torch, compiled"] = functools.partial(torch.compile(muons), grad)
        calls["ours, compiled"] = served(torch.compile(own))
    return calls


def in_a_graph(*shape: int) -> Calls:
    own = functools.partial(muons, draw(*shape))
    calls = {"torch": own, "ours": served(own)}
    return {who: common.graph_of([call])[0].replay for who, call in calls.items()}


def of_batch(*shape: int) -> Calls:
    grads = draw(*shape)
    one_by_one = functools.partial(each, [grads])
    return {
        "torch": one_by_one,
        "ours": functools.partial(torch_cubin.newton_schulz, grads),
        "one by one": served(one_by_one),
        "gram": functools.partial(torch_cubin.newton_schulz, grads, gram=True),
    }


def each(batches: list[Tensor]) -> None:
    for batch in batches:
        for grad in batch:
            muons(grad)


def batched(batches: list[Tensor], gram: bool = False) -> None:
    for batch in batches:
        torch_cubin.newton_schulz(batch, gram=gram)


def steps() -> Iterator[Case]:
    for name, matrices in (("Llama-3.2-1B", LLAMA_1B), ("from 4,096 rows", LARGE)):
        step, batches = f"Muon.step(), {name}", f"Muon's matrices in batches, {name}"
        yield Case(step, step, functools.partial(of_step, matrices))
        yield Case(batches, batches, functools.partial(of_batches, matrices))


def of_step(matrices: dict[tuple[int, int], int]) -> Calls:
    parameters = []
    for shape, count in matrices.items():
        for _ in range(count):
            parameters.append(torch.nn.Parameter(draw(*shape)))
            parameters[-1].grad = draw(*shape)
    own = torch.optim.Muon(parameters, lr=1e-4).step
    return {"torch": own, "ours": served(own)}


def of_batches(matrices: dict[tuple[int, int], int]) -> Calls:
    batches = [draw(count, *shape) for shape, count in matrices.items()]
    return {
        "torch": functools.partial(each, batches),
        "ours": functools.partial(batched, batches),
        "gram": functools.partial(batched, batches, gram=True),
    }


Rounds = list[tuple[float, float]]


def compared(case: Case, earlier: Rounds | None = None) -> tuple[list[dict[str, Any]], Rounds]:
    """One line for each contender but PyTorch, printed, and the last one's rounds, of which
    `earlier` were measured before."""
    calls = case.calls()
    torch_call = calls.pop("torch")
    lines = []
    for who, call in calls.items():
        count = MORE_ROUNDS if earlier else ROUNDS
        budget_ms = case.budget_ms * count / ROUNDS
        rounds = common.alternated(torch_call, call, case.count, budget_ms, count)
        rounds = [*(earlier or []), *rounds]
        ratio = common.summarise(rounds)
        spread = f"{ratio.ratio:.3f} ({ratio.low:.3f}-{ratio.high:.3f})"
        if earlier:
            spread = f"{common.summarise(earlier).ratio:.3f}, in {len(rounds)} rounds {spread}"
        print(
            f"{case.name}: {spread}  {who}  {ratio.first_us:.1f} -> {ratio.second_us:.1f} us",
            flush=True,
        )
        group = case.group if who == "ours" else f"{case.group}: {who}"
        line = {"group": group, "case": case.name, "value": ratio.ratio}
        lines.append(line | asdict(ratio))
    return lines, rounds


def compare(cases: list[Case], results: list[dict[str, Any]], path: str | None) -> None:
    """Adds the cases' lines to the results, and writes them after each."""
    slow = []
    for case in cases:
        lines, rounds = compared(case)
        results += lines
        common.write_json(path, results)
        if case.brief and lines[0]["value"] < SLOW:
            slow.append((case, rounds, len(results) - 1))
        torch.cuda.empty_cache()
    for case, rounds, at in slow:
        (results[at],), _ = compared(case, rounds)
        common.write_json(path, results)
        torch.cuda.empty_cache()


def copied(described: dict[str, Any], chosen: str) -> dict[str, Any] | None:
    """The product that follows the copy of both operands that a plan begins with."""
    kind, _, which = chosen.partition(" ")
    if kind not in ("pad", "transpose") or which != "ab":
        return None
    access = "k_lines" if kind == "transpose" else described["a"].split("_")[0] + "_lines"
    return {**described, "a": access, "b": access}


def config_names(described: dict[str, Any]) -> tuple[str, dict[str, float], list[str]]:
    """The chosen config; microseconds by config, as predicted; the configs to measure."""
    (plan,) = library.planned([described], True)
    predicted = {config["name"]: config["microseconds"] for config in plan["configs"]}
    quickest = sorted(predicted, key=lambda name: predicted[name])
    names = [name for name in quickest if "symmetric" in name][:CONFIGS]
    others = [name for name in quickest if "symmetric" not in name]
    return plan["chosen"], predicted, names + others[: FULL if names else CONFIGS]


def configs(case: Case) -> dict[str, Any]:
    """The times of all configs of a case, printed; a line of a sweep. Of a product whose operand is
    copied, those of the product that follows have the copy's name before them."""
    described = {**asdict(case.product), "symmetric": True}
    chosen, predicted, own = config_names(described)
    forced = {name: name for name in own}
    inner, path = copied(described, chosen), chosen
    while inner:
        last, of_inner, names = config_names(inner)
        copies = path.replace(": ", "/")
        forced |= {f"{path}: {name}": f"{copies}/{name}" for name in names}
        predicted |= {f"{path}: {name}": of_inner[name] for name in names}
        inner, path = copied(inner, last), f"{path}: {last}"
    sets = operands(case.product, case.count)
    runs = graphs({"torch.matmul": TIMES_TRANSPOSE["torch"]}, sets)
    for name, config in forced.items():
        with measure.watching():
            library.force_config(config)
            runs |= graphs({name: TIMES_TRANSPOSE["ours"]}, sets)
    times = common.interleaved(runs, block_ms=3, rounds=5, settle_ms=3)
    times = {name: time / case.count for name, time in times.items()}
    print(f"{case.name}: {times['torch.matmul']:.2f} us, chosen {path}", flush=True)
    for name in sorted(forced, key=lambda name: times[name]):
        print(
            f"  {times['torch.matmul'] / times[name]:.3f} {times[name]:.2f} "
            f"{predicted[name]:.2f} {name}"
        )
    return {
        "product": described,
        "chosen": chosen,
        "microseconds": {name: round(time, 3) for name, time in times.items()},
        "predicted": {name: round(predicted[name], 3) for name in forced},
    }


def earlier_results(path: str | None) -> list[dict[str, Any]]:
    """The file's results, if this machine wrote them."""
    if path is None or not Path(path).exists():
        return []
    content = json.loads(Path(path).read_text())
    if content["machine"] != common.machine():
        sys.exit(f"{path} is of another machine: {content['machine']}")
    return content["results"]


def main() -> None:
    parser = common.parser(__doc__)
    parser.add_argument("--only", nargs="+", default=[""])
    parser.add_argument("--random", type=int, default=RANDOM, metavar="COUNT")
    parser.add_argument("--seed", type=int, default=SEED)
    parser.add_argument("--configs", action="store_true")
    parser.add_argument("--below", type=float, metavar="RATIO")
    parser.add_argument("--lines", type=Path)
    arguments = parser.parse_args()
    common.require_gpu()
    torch.backends.cuda.matmul.allow_tf32 = True
    common.print_machine("Symmetric products")
    randoms = functools.partial(random_products, arguments.random, arguments.seed)
    groups = (products, any_size, randoms, newton_schulz, steps)
    cases = [case for group in groups for case in group()]
    cases = [case for case in cases if any(text in case.name for text in arguments.only)]
    results = earlier_results(arguments.json)
    if arguments.configs:
        cases = [case for case in cases if case.product]
    if arguments.below is not None:
        slow = {line["case"] for line in results if line["value"] < arguments.below}
        cases = [case for case in cases if case.name in slow]
    if not cases:
        parser.error(f"no case's name contains {arguments.only!r}")
    names = {case.name for case in cases}
    results = [line for line in results if line["case"] not in names]
    with torch.no_grad():
        if not arguments.configs:
            return compare(cases, results, arguments.json)
        for case in cases:
            line = configs(case)
            if arguments.lines:
                with arguments.lines.open("a") as file:
                    file.write(json.dumps(line) + "\n")
            torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
