"""Symmetric products and Muon, compared with PyTorch's own.

    python benchmarks/bench_symmetric.py [--json FILE] [--plot FILE] [--only TEXT]

- products: `x @ x.t()` through `cubin::matmul`, and `b g + c g g` of a symmetric g by
  `cubin::symm_square`, as CUDA graphs whose operands rotate over more than the L2 cache;
- Newton-Schulz: Muon's own function, outside and inside drop_in(), and `newton_schulz()`, also of
  batches and in its Gram form;
- steps: `torch.optim.Muon(...).step()` of the matrices of Llama-3.2-1B, and of larger ones.

The contenders alternate in one process. Ratios are PyTorch's time to ours: above 1, ours is faster.
`--plot` draws the ratios of the products by size (matplotlib).
"""

from __future__ import annotations

import argparse
import functools
import math
from collections.abc import Callable, Iterator
from typing import Any

import common
import torch
from torch import Tensor
from torch.optim import _muon

import torch_cubin

ops = torch.ops.cubin
Calls = dict[str, Callable[[], object]]
ROTATED_BYTES = 150e6
# Rows, columns.
PRODUCTS = [
    *((n, n) for n in (256, 512, 768, 1024, 1280, 1536, 1792, 2048, 2560, 3072, 4096, 5120, 6144)),
    *((8192, 8192), (12288, 12288), (512, 2048), (1024, 4096), (2048, 8192), (4096, 1024)),
    *((4096, 16384), (3000, 3000), (4104, 4096)),
]
MATRICES = [(512, 2048), (1024, 1024), (2048, 2048), (2048, 8192), (4096, 4096), (4096, 16384),
            (16384, 4096)]  # fmt: skip
COMPILED = (4096, 4096)
BATCHES = [(32, 512, 2048), (16, 1024, 1024), (32, 2048, 2048), (16, 2048, 8192)]
# The matrices of a step, by their number.
LLAMA_1B = {(2048, 2048): 32, (512, 2048): 32, (8192, 2048): 32, (2048, 8192): 16}
LARGE = {(4096, 4096): 4, (14336, 4096): 4, (4096, 14336): 2}
NEWTON_SCHULZ = functools.partial(
    _muon._zeropower_via_newtonschulz,
    ns_coefficients=(3.4445, -4.7750, 2.0315),
    ns_steps=5,
    eps=1e-7,
)


def served(call: Callable[[], object]) -> Callable[[], object]:
    def inside() -> object:
        with torch_cubin.drop_in():
            return call()

    return inside


def draw(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.randn(shape, device="cuda", dtype=dtype)


def products() -> Iterator[tuple[str, float, Calls]]:
    """Each contender is a graph of calls with operands of their own."""
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        sizes = PRODUCTS if dtype == torch.bfloat16 else [(2048, 2048), (4096, 4096)]
        name = "TF32" if dtype == torch.float32 else str(dtype).removeprefix("torch.")
        for n, k in sizes:
            size = draw(1, dtype=dtype).itemsize * n * (n + k)
            count = max(1, min(12, math.ceil(ROTATED_BYTES / size)))
            sets = [draw(n, k, dtype=dtype) for _ in range(count)]
            pairs: dict[str, Callable[[Tensor], Tensor]] = {
                "torch": lambda x: x @ x.t(),
                "ours": lambda x: ops.matmul(x, x.t()),
            }
            yield f"x x^T {name} {n} x {k}", count, graphs(pairs, sets)
            if n != k:
                continue
            sets = [ops.syrk(x) / n for x in sets]
            pairs = {
                "torch": lambda g: torch.addmm(g, g, g, beta=-4.775, alpha=2.0315),
                "ours": lambda g: ops.symm_square(g, g, beta=-4.775, alpha=2.0315),
            }
            yield f"b g + c g g {name} {n}", count, graphs(pairs, sets)


def graphs(calls: dict[str, Callable[[Tensor], Tensor]], sets: list[Tensor]) -> Calls:
    return {
        who: common.graph_of([functools.partial(call, x) for x in sets])[0].replay
        for who, call in calls.items()
    }


def newton_schulz() -> Iterator[tuple[str, float, Calls]]:
    for shape in MATRICES:
        grad = draw(*shape)
        own = functools.partial(NEWTON_SCHULZ, grad)
        calls: Calls = {
            "torch": own,
            "ours": served(own),
            "gram": functools.partial(torch_cubin.newton_schulz, grad, gram=True),
        }
        if shape == COMPILED:
            step = functools.partial(torch.compile(NEWTON_SCHULZ), grad)
            inside = served(functools.partial(torch.compile(own)))
            calls |= {"torch, compiled": step, "ours, compiled": inside}
        yield f"Newton-Schulz {shape[0]} x {shape[1]}", 1, calls
    for batch, rows, columns in BATCHES:
        grads = draw(batch, rows, columns)

        def one_by_one(grads: Tensor = grads) -> None:
            for grad in grads:
                NEWTON_SCHULZ(grad)

        calls = {
            "torch": one_by_one,
            "ours": functools.partial(torch_cubin.newton_schulz, grads),
            "one by one": served(one_by_one),
            "gram": functools.partial(torch_cubin.newton_schulz, grads, gram=True),
        }
        yield f"Newton-Schulz batch {batch} of {rows} x {columns}", 1, calls


def steps() -> Iterator[tuple[str, float, Calls]]:
    for name, matrices in (("Llama-3.2-1B", LLAMA_1B), ("from 4096 on", LARGE)):
        parameters = []
        for shape, count in matrices.items():
            for _ in range(count):
                parameters.append(torch.nn.Parameter(draw(*shape)))
                parameters[-1].grad = draw(*shape)
        own = torch.optim.Muon(parameters, lr=1e-4).step
        yield f"Muon.step() {name}", 1, {"torch": own, "ours": served(own)}
        grads = {shape: draw(count, *shape) for shape, count in matrices.items()}

        def one_by_one(grads: dict[Any, Tensor] = grads) -> None:
            for batch in grads.values():
                for grad in batch:
                    NEWTON_SCHULZ(grad)

        def batched(grads: dict[Any, Tensor] = grads, gram: bool = False) -> None:
            for batch in grads.values():
                torch_cubin.newton_schulz(batch, gram=gram)

        calls: Calls = {
            "torch": one_by_one,
            "ours": batched,
            "gram": functools.partial(batched, gram=True),
        }
        yield f"batches of one shape {name}", 1, calls


def plot(results: list[dict[str, Any]], path: str) -> None:
    import matplotlib.figure

    figure = matplotlib.figure.Figure(figsize=(8, 4.5), layout="constrained")
    axes = figure.subplots()
    for kind in ("x x^T bfloat16", "b g + c g g bfloat16"):
        points = []
        for result in results:
            case = result["case"]
            rest = case.removeprefix(kind).split(" x ") if case.startswith(kind) else []
            if rest and len(set(map(int, rest))) == 1:
                points.append((int(rest[0]), result["us"]["torch"] / result["us"]["ours"]))
        if points:
            axes.plot(*zip(*sorted(points), strict=True), "o-", label=kind)
    axes.axhline(1, color="gray", linewidth=0.8)
    axes.set(xlabel="rows and columns", ylabel="PyTorch's time / ours", xscale="log")
    axes.legend()
    figure.savefig(path)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json")
    parser.add_argument("--plot")
    parser.add_argument("--only", default="")
    arguments = parser.parse_args()
    common.require_gpu()
    torch.backends.cuda.matmul.allow_tf32 = True
    common.print_machine("Symmetric products, microseconds a call")
    results = []
    for cases in (products, newton_schulz, steps):
        if arguments.only not in cases.__name__:
            continue
        for name, count, calls in cases():
            with torch.no_grad():
                times = common.interleaved(calls, block_ms=50, rounds=5, settle_ms=60)
            times = {who: time / count for who, time in times.items()}
            rest = "  ".join(f"{who} {time:.1f}" for who, time in times.items())
            print(f"{name}: {times['torch'] / times['ours']:.3f}  {rest}", flush=True)
            results.append({"case": name, "us": times})
            del calls
            torch.cuda.empty_cache()
    common.write_json(arguments.json, results)
    if arguments.plot:
        plot(results, arguments.plot)


if __name__ == "__main__":
    main()
