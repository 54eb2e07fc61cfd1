"""Symmetric products and Muon, compared with PyTorch's own.

    python benchmarks/bench_symmetric.py [--json FILE] [--only TEXT ...]
    python benchmarks/bench_symmetric.py --configs [--json FILE] [--only TEXT ...]

- products: `x @ x.t()` through `cubin::matmul`, and `b g + c g g` of a symmetric g by
  `cubin::symm_square`, as CUDA graphs whose operands rotate over more than the L2 cache;
- any size: `x @ x.t()` of 186 sizes, for less time each, so that no size is slower unseen;
- Newton-Schulz: Muon's own function, outside and inside drop_in(), and `newton_schulz()`, also of
  batches and in its Gram form; small matrices also as CUDA graphs, since the host's launches take
  longer than their products;
- steps: `torch.optim.Muon(...).step()` of the matrices of Llama-3.2-1B, and of larger ones.

Each contender alternates with PyTorch in one process; the first half of each block lets the clocks
settle. Ratios are PyTorch's time to a contender's, the median of five rounds and their range: above
1, ours is faster. All takes some 150 seconds, the products half, the sizes a third. --only keeps
the cases whose names contain some TEXT ("x x^T", "any size", "Newton-Schulz 4096"). --json is
written after every case; what the file has of other cases, from an earlier run on the same machine,
stays. --configs times the configs that seem quickest to the planner for `x @ x.t()`, beside their
predicted times, in place of contenders.
"""

from __future__ import annotations

import argparse
import functools
import json
import math
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

ops = torch.ops.cubin
Calls = dict[str, Callable[[], object]]
ROUNDS, BUDGET_MS = 5, 450  # of a pair of contenders
ROTATED_BYTES = 150e6
CONFIGS = 9  # that --configs times of a product
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
    product: tuple[torch.dtype, int, int] | None = None  # of --configs
    budget_ms: float = BUDGET_MS


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


def operands(dtype: torch.dtype, n: int, k: int, count: int, gram: bool = False) -> list[Tensor]:
    sets = [draw(n, k, dtype=dtype) for _ in range(count)]
    return [ops.syrk(x) / k for x in sets] if gram else sets


TIMES_TRANSPOSE = {
    "torch": lambda x: x @ x.t(),
    "ours": lambda x: ops.matmul(x, x.t()),
}
SQUARE = {
    "torch": lambda g: torch.addmm(g, g, g, beta=-4.775, alpha=2.0315),
    "ours": lambda g: ops.symm_square(g, g, beta=-4.775, alpha=2.0315),
}


def rotated(dtype: torch.dtype, n: int, k: int) -> int:
    """Pairs of an operand and a result that together are larger than the L2 cache."""
    return max(1, min(12, math.ceil(ROTATED_BYTES / (dtype.itemsize * n * (n + k)))))


def products() -> Iterator[Case]:
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        sizes = PRODUCTS if dtype == torch.bfloat16 else [(2048, 2048), (4096, 4096)]
        name = "TF32" if dtype == torch.float32 else str(dtype).removeprefix("torch.")
        for n, k in sizes:
            count = rotated(dtype, n, k)
            draws = functools.partial(operands, dtype, n, k, count)
            rows = "from 4,096 rows" if n >= 4096 else "fewer rows"
            yield Case(
                f"x x^T, {rows}",
                f"x x^T {name} {n} x {k}",
                lambda draws=draws: graphs(TIMES_TRANSPOSE, draws()),
                count,
                (dtype, n, k),
            )
            if n == k:
                yield Case(
                    f"b g + c g g, {rows}",
                    f"b g + c g g {name} {n}",
                    lambda draws=draws: graphs(SQUARE, draws(gram=True)),
                    count,
                )


def any_size() -> Iterator[Case]:
    for n in ROWS:
        for k in COLUMNS:
            count = rotated(torch.bfloat16, n, k)
            draws = functools.partial(operands, torch.bfloat16, n, k, count)
            yield Case(
                "x x^T, any size",
                f"any size, x x^T {n} x {k}",
                lambda draws=draws: graphs(TIMES_TRANSPOSE, draws()),
                count,
                (torch.bfloat16, n, k),
                SIZES_BUDGET_MS,
            )


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


def compared(case: Case) -> list[dict[str, Any]]:
    """One line for each contender but PyTorch, printed."""
    calls = case.calls()
    torch_call = calls.pop("torch")
    lines = []
    for who, call in calls.items():
        ratio = common.alternate(torch_call, call, case.count, case.budget_ms, ROUNDS)
        spread = f"{ratio.ratio:.3f} ({ratio.low:.3f}-{ratio.high:.3f})"
        print(
            f"{case.name}: {spread}  {who}  {ratio.first_us:.1f} -> {ratio.second_us:.1f} us",
            flush=True,
        )
        group = case.group if who == "ours" else f"{case.group}: {who}"
        line = {"group": group, "case": case.name, "value": ratio.ratio}
        lines.append(line | asdict(ratio))
    return lines


def configs(case: Case) -> list[dict[str, Any]]:
    """The times of all configs of a case, printed."""
    dtype, n, k = case.product
    line = "k_lines" if k * dtype.itemsize % 128 == 0 else "k_vectors"
    described = {"m": n, "n": n, "k": k, "batch": 1, "a": line, "b": line, "symmetric": True}
    described["math"] = "tf32" if dtype == torch.float32 else "16_bit"
    (plan,) = library.planned([described], True)
    predicted = {config["name"]: config["microseconds"] for config in plan["configs"]}
    # Those that seem quickest; of full products, three.
    quickest = sorted(predicted, key=lambda name: predicted[name])
    names = [name for name in quickest if "symmetric" in name][:CONFIGS]
    names += [name for name in quickest if "symmetric" not in name][:3]
    sets = operands(dtype, n, k, case.count)
    runs = graphs({"torch": lambda x: x @ x.t()}, sets)
    for name in names:
        with measure.watching():
            library.force_config(name)
            runs |= graphs({name: lambda x: ops.matmul(x, x.t())}, sets)
    times = common.interleaved(runs, block_ms=12, rounds=3, settle_ms=12)
    times = {name: time / case.count for name, time in times.items()}
    print(f"{case.name}: {times['torch']:.2f} us, chosen {plan['chosen']}", flush=True)
    for name in sorted(names, key=lambda name: times[name]):
        print(
            f"  {times['torch'] / times[name]:.3f} {times[name]:.2f} {predicted[name]:.2f} {name}"
        )
    return [{"case": case.name, "chosen": plan["chosen"], "us": times, "predicted": predicted}]


def earlier_results(path: str | None, cases: list[Case]) -> list[dict[str, Any]]:
    """The file's results of other cases, if this machine wrote them."""
    if path is None or not Path(path).exists():
        return []
    content = json.loads(Path(path).read_text())
    names = {case.name for case in cases}
    if content["machine"] != common.machine():
        sys.exit(f"{path} is of another machine: {content['machine']}")
    return [line for line in content["results"] if line["case"] not in names]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json")
    parser.add_argument("--only", nargs="+", default=[""])
    parser.add_argument("--configs", action="store_true")
    arguments = parser.parse_args()
    common.require_gpu()
    torch.backends.cuda.matmul.allow_tf32 = True
    common.print_machine("Symmetric products")
    cases = [case for group in (products, any_size, newton_schulz, steps) for case in group()]
    cases = [case for case in cases if any(text in case.name for text in arguments.only)]
    if arguments.configs:
        cases = [case for case in cases if case.product]
    if not cases:
        parser.error(f"no case's name contains {arguments.only!r}")
    results = earlier_results(arguments.json, cases)
    for case in cases:
        with torch.no_grad():
            results += configs(case) if arguments.configs else compared(case)
        common.write_json(arguments.json, results)
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
