"""Speed of grouped_matmul in bfloat16, compared with PyTorch's and with a loop of products.

    python benchmarks/bench_grouped.py [--moe [--compile] | --training] [--json FILE] [--only TEXT]
                                       [--deep-gemm FOLDER]

Each contender is a CUDA graph of calls whose operands rotate over several times the L2 cache; the
contenders alternate. "torch" is torch._grouped_mm, "loop" a product for each group, for which the
host must know the sizes. --deep-gemm: also DeepGEMM's forward, by the kernels that deep_gemm.py
built in FOLDER; its groups are padded to multiples of 128 rows, which is not counted. A Triton
kernel is not run here, whose forward was compared with torch in another run on an H200
(2026-11-26): "by its ratio" is torch's time divided by that ratio.

--moe measures whole layers (moe_layers.py): torch_cubin.moe through transformers' "cubin", and
transformers' own implementations. "loop" waits for the GPU, so it is no graph. --training measures
layers forward and backward, called one after the other, and in CUDA graphs.
"""

from __future__ import annotations

import argparse
import functools
import math
import random
from collections.abc import Callable
from typing import Any

import common
import deep_gemm
import moe_layers
import torch

import torch_cubin  # noqa: F401  (registers the ops)

op = torch.ops.cubin.grouped_matmul
ROTATED_BYTES = 200e6
DTYPE = torch.bfloat16


def zipf(total: int, groups: int, empty: int) -> list[int]:
    weights = [1 / (i + 1) for i in range(groups - empty)]
    sizes = [max(1, int(total * weight / sum(weights))) for weight in weights]
    sizes[0] += total - sum(sizes)
    sizes += [0] * empty
    random.Random(1).shuffle(sizes)
    return sizes


UNEVEN = [0 if i % 5 == 0 else 1260 + 97 * (i - 8) for i in range(16)]
FEW = [1 if i % 32 == 0 else 0 for i in range(256)]
# Name, sizes of the groups, N, K; the speed of Triton relative to torch.
CASES: list[tuple[str, list[int], int, int, float]] = [
    ("4 x 8192", [8192] * 4, 4096, 7168, 0.90),
    ("4 x 8192", [8192] * 4, 7168, 2048, 0.85),
    ("8 x 4096", [4096] * 8, 4096, 7168, 0.88),
    ("8 x 4096", [4096] * 8, 7168, 2048, 0.87),
    ("32 x 256", [256] * 32, 4096, 7168, 0.76),
    ("32 x 256", [256] * 32, 7168, 2048, 0.79),
    ("128 x 64", [64] * 128, 1536, 2048, 1.22),
    ("128 x 64", [64] * 128, 2048, 768, 1.19),
    ("256 x 32", [32] * 256, 2048, 7168, 1.28),
    ("16 uneven, 4 empty", UNEVEN, 4096, 7168, 0.93),
    ("16 uneven, 4 empty", UNEVEN, 7168, 2048, 0.90),
    ("128 Zipf, 20 empty", zipf(8192, 128, 20), 1536, 2048, 1.15),
    ("8 rows, 256 groups", FEW, 2048, 7168, 1.02),
]


def draw(*shape: int) -> torch.Tensor:
    return torch.randn(shape, device="cuda", dtype=DTYPE) * shape[-1] ** -0.25


def copies(outputs: int, *shapes: tuple[int, ...]) -> list[list[torch.Tensor]]:
    """Sets of operands; `outputs`: elements that a call writes."""
    size = 2 * (outputs + sum(math.prod(shape) for shape in shapes))
    return [[draw(*x) for x in shapes] for _ in range(max(1, min(8, int(ROTATED_BYTES / size))))]


def contenders(what: str, sizes: list[int], offs: torch.Tensor) -> dict[str, Callable[..., Any]]:
    """Functions of rows and weights; for `dW`, of the gradient of the outputs and the rows."""

    def operands(a: torch.Tensor, b: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return (a.t(), b) if what == "dW" else (a, b.mT if what == "forward" else b)

    def loop(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        a, b = operands(a, b)
        if what == "dW":
            outs = [x @ y for x, y in zip(a.split(sizes, 1), b.split(sizes), strict=True)]
        else:
            outs = [x @ y for x, y in zip(a.split(sizes), b, strict=True) if len(x)]
        return outs[0]

    return {
        "ours": lambda a, b: op(*operands(a, b), offs=offs),
        "torch": lambda a, b: torch._grouped_mm(*operands(a, b), offs=offs),
        "loop": loop,
    }


def measure(
    what: str, case: tuple[str, list[int], int, int, float], peer: deep_gemm.Peer | None
) -> dict[str, Any]:
    name, sizes, n, k, triton = case
    label = f"{what} {name}: N {n}, K {k}"
    rows, groups = sum(sizes), len(sizes)
    offs = torch.tensor(sizes, device="cuda").cumsum(0).to(torch.int32)
    shapes = {
        "forward": ((rows, k), (groups, n, k)),
        "dX": ((rows, n), (groups, n, k)),
        "dW": ((rows, n), (rows, k)),
    }[what]
    outputs = {"forward": rows * n, "dX": rows * k, "dW": groups * n * k}[what]
    sets = copies(outputs, *shapes)
    with torch.no_grad():
        graphs = {
            who: common.graph_of([functools.partial(call, *own) for own in sets])[0]
            for who, call in contenders(what, sizes, offs).items()
        }
    runs = {who: graph.replay for who, graph in graphs.items()}
    if peer is not None and what == "forward":
        of_rows = deep_gemm.groups_of_rows(sizes)
        padded = [(deep_gemm.padded(sizes, a), b) for a, b in sets]
        calls = [functools.partial(peer.product, *own, None, of_rows) for own in padded]
        runs[deep_gemm.WHO] = common.graph_of(calls)[0].replay
    times = common.interleaved(runs, block_ms=12, rounds=5, settle_ms=12)
    times = {who: time / len(sets) for who, time in times.items()}
    if what == "forward":
        times["Triton, by its ratio"] = times["torch"] / triton
    moved = 2 * (outputs + rows * shapes[0][1])
    moved += 2 * (rows * k if what == "dW" else sum(size > 0 for size in sizes) * n * k)
    return {"case": label, "us": times, "bytes": moved,
            "flops": 2.0 * rows * n * k}  # fmt: skip


def measure_layer(layer: Any, sizes: tuple[Any, ...], tokens: int, compiles: bool) -> Any:
    name, experts, k, hidden, inner = sizes
    inputs = [
        moe_layers.routed(tokens, experts, k, hidden) for _ in range(4 if tokens < 999 else 1)
    ]
    with torch.no_grad():
        graphs = {
            who: common.graph_of([functools.partial(call, *own) for own in inputs])[0]
            for who, call in moe_layers.contenders(layer, tokens, compiles).items()
        }
        runs: dict[str, Callable[[], Any]] = {who: graph.replay for who, graph in graphs.items()}
        loop = moe_layers.loop(layer)
        runs["loop"] = lambda: [loop(*own) for own in inputs]
        times = common.interleaved(runs, block_ms=20, rounds=5)
    used = sum(len(ids.unique()) for _, ids, _ in inputs) / len(inputs)
    return {
        "case": f"{name}, {tokens} tokens",
        "us": {who: time / len(inputs) for who, time in times.items()},
        "bytes": 2 * (used * 3 * hidden * inner + 2 * tokens * hidden),
        "flops": 6.0 * tokens * k * hidden * inner,
    }


def measure_training(layer: Any, sizes: tuple[Any, ...], tokens: int, graphs: bool) -> Any:
    name, experts, k, hidden, inner = sizes
    runs = moe_layers.steps(layer, *moe_layers.routed(tokens, experts, k, hidden))
    if graphs:
        runs = {who: common.graph_of([step])[0].replay for who, step in runs.items()}
    else:
        runs[moe_layers.KEPT_FLOAT8] = moe_layers.kept(runs[moe_layers.OURS_FLOAT8])
    times = common.interleaved(runs, block_ms=60, rounds=5)
    if not graphs:
        times[moe_layers.KEPT_FLOAT8] /= moe_layers.MICRO_BATCHES
    weights = 3 * experts * hidden * inner
    return {
        "case": f"{name}, training, {tokens} tokens{', graph' if graphs else ''}",
        "us": times,
        "bytes": 2 * 3 * weights,
        "flops": 18.0 * tokens * k * hidden * inner,
    }


Measured = Callable[[Any, tuple[Any, ...], int], Any]


def measure_layers(
    arguments: argparse.Namespace, models: Any, all_tokens: Any, *measures: Measured
) -> list[float]:
    results, ratios = [], []
    for sizes in models:
        if arguments.only not in sizes[0]:
            continue
        layer = moe_layers.experts_of(*sizes[1:])
        for tokens in all_tokens:
            for measure in measures:
                results.append(measure(layer, sizes, tokens))
                ratios.append(show(results[-1]))
                common.write_json(arguments.json, results)  # the next case may be ended
        del layer
        torch.cuda.empty_cache()
    return ratios


def show(result: dict[str, Any]) -> float:
    """Prints a result, and returns our speed in parts of the best other one's."""
    times = result["us"]
    ours = "ours", moe_layers.OURS_FLOAT8, moe_layers.KEPT_FLOAT8
    best = min((time, who) for who, time in times.items() if who not in ours)
    ratio = best[0] / times["ours"]
    rest = "  ".join(f"{who} {time:.1f}" for who, time in times.items())
    print(
        f"{result['case']}: {ratio:.3f} of {best[1]}, "
        f"{result['flops'] / times['ours'] / 1e6:.0f} TF, "
        f"{result['bytes'] / times['ours'] / 1e6:.2f} TB/s  {rest}",
        flush=True,
    )
    return ratio


def main() -> None:
    parser = common.parser(__doc__)
    parser.add_argument("--only", default="")
    parser.add_argument("--deep-gemm", type=deep_gemm.Peer, metavar="FOLDER")
    parser.add_argument("--moe", action="store_true")
    parser.add_argument("--training", action="store_true", help="layers, forward and backward")
    parser.add_argument("--compile", action="store_true", help="grouped_mm compiled, too")
    arguments = parser.parse_args()
    common.require_gpu()
    if arguments.moe or arguments.training:
        common.print_machine("Mixtures of experts, bfloat16, microseconds a layer")
        if arguments.training:
            measures = [functools.partial(measure_training, graphs=on) for on in (False, True)]
            cases = moe_layers.TRAINED_MODELS, moe_layers.TRAINED_TOKENS
            ratios = measure_layers(arguments, *cases, *measures)
        else:
            timed = functools.partial(measure_layer, compiles=arguments.compile)
            ratios = measure_layers(arguments, moe_layers.MODELS, moe_layers.TOKENS, timed)
        mean = common.geometric_mean(ratios)
        print(f"mean {mean:.3f}, least {min(ratios):.3f} of the best of all (goal 1.15)")
        return
    common.print_machine("Products of groups, bfloat16, microseconds a call")
    results, ratios = [], []
    for what in ("forward", "dX", "dW"):
        for case in CASES:
            if arguments.only not in f"{what} {case[0]}":
                continue
            result = measure(what, case, arguments.deep_gemm)
            ratios.append(show(result))
            results.append(result)
            common.write_json(arguments.json, results)  # the next case may be ended
            torch.cuda.empty_cache()
    mean = common.geometric_mean(ratios)
    print(f"mean {mean:.3f}, least {min(ratios):.3f} of the best of all (goals 1.03 and 0.96)")


if __name__ == "__main__":
    main()
