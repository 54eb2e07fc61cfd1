"""Speed of scaled_matmul and quantize, compared with PyTorch's products and with a copy.

    python benchmarks/bench_fp8.py [--json FILE] [--rows 64,4096] [--only block] [--no-quantize]
                                   [--append] [--deep-gemm FOLDER] [--gated | --compiled]

Each contender is a CUDA graph of calls whose operands rotate over several times the L2 cache; the
contenders alternate. "goal" is the speed that the project aims at, relative to the contender named.
--append keeps the cases of FILE that are not measured again. --gated measures
scaled_gated_matmul alone, beside the product and the quantisation of its gate. --compiled measures
SwiGLU layers (gate, up and down) of torch_cubin.float8 under torch.compile, with and without the
pass that makes scaled_gated_matmul of them.
--deep-gemm: also DeepGEMM's products with scales of blocks, by the kernels that deep_gemm.py built
in FOLDER.
"""

from __future__ import annotations

import functools
import itertools
import json
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import common
import deep_gemm
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import torch_cubin

op = torch.ops.cubin.scaled_matmul
quantize = torch.ops.cubin.quantize
ROTATED_BYTES = 200e6
E4M3, BF16 = torch.float8_e4m3fn, torch.bfloat16
TENSOR, ROW, BLOCK_1X128, BLOCK_128X128 = 0, 1, 4, 5  # F.ScalingType's numbers
ROWS = (1, 16, 64, 128, 512, 2048, 4096, 8192)
# N, K.
WEIGHTS = [
    (2112, 7168), (4096, 7168), (7168, 2048), (24576, 1536), (32768, 512), (7168, 16384),
    (4096, 4096), (28672, 4096), (4096, 14336),
]  # fmt: skip
Calls = dict[str, Callable[[Tensor, Tensor], Tensor]]


def goal_of(recipe: str, m: int) -> tuple[float, str]:
    """The goal, and the contender that it is relative to ("" for the best)."""
    if recipe == "block":
        return 1.03, ""
    if m <= 128:
        return (1.35, "torch row fast") if recipe == "fast" else (1.0, "torch row")
    return (1.0, "") if recipe == "fast" else (1.03, "")


def scaled_mm_v1(
    scale_a: Tensor, scale_b: Tensor, fast: bool
) -> Callable[[Tensor, Tensor], Tensor]:
    return lambda a, b: torch._scaled_mm(
        a, b.t(), scale_a, scale_b, out_dtype=BF16, use_fast_accum=fast
    )


def contenders(recipe: str, m: int, n: int, k: int, peer: deep_gemm.Peer | None = None) -> Calls:
    """Functions of a (M, K) and b (N, K); `recipe`: "fast", "exact" (tensor and row scales) or
    "block" (1x128 for a, 128x128 for b)."""
    one = torch.ones((), device="cuda")
    rows, columns = torch.rand(m, 1, device="cuda"), torch.rand(1, n, device="cuda")
    if recipe != "block":
        fast = recipe == "fast"
        suffix = " fast" if fast else ""
        return {
            "ours": lambda a, b: op(a, b.t(), rows, ROW, columns, ROW, use_fast_accum=fast),
            f"torch tensor{suffix}": scaled_mm_v1(one, one, fast),
            f"torch row{suffix}": scaled_mm_v1(rows, columns, fast),
        }
    blocks = -(-k // 128)
    padded = -(-blocks // 4) * 4
    scale_a = torch.rand(blocks, m, device="cuda").t()
    scale_b = torch.rand(-(-n // 128), padded, device="cuda").t()
    types = F.ScalingType
    calls: Calls = {
        "ours": lambda a, b: op(a, b.t(), scale_a, BLOCK_1X128, scale_b, BLOCK_128X128),
    }
    if m % 4 == 0 and m >= 16:  # others are refused
        calls["torch block"] = lambda a, b: F.scaled_mm(
            a, b.t(), scale_a, types.BlockWise1x128, scale_b, types.BlockWise128x128
        )
    if peer is not None:
        scales = deep_gemm.scales_of_rows(scale_a), scale_b.t()[:, :blocks].contiguous()
        calls[deep_gemm.WHO] = lambda a, b: peer.product(a, b, scales)
    return calls


def times_of(calls: dict[str, Callable[..., Any]], sets: list[Any]) -> dict[str, float]:
    with torch.no_grad():
        graphs = {
            who: common.graph_of([functools.partial(call, *own) for own in sets])[0]
            for who, call in calls.items()
        }
    runs = {who: graph.replay for who, graph in graphs.items()}
    times = common.interleaved(runs, block_ms=8, rounds=3, settle_ms=8)
    return {who: time / len(sets) for who, time in times.items()}


def measure(recipe: str, m: int, n: int, k: int, peer: deep_gemm.Peer | None) -> dict[str, Any]:
    moved = m * k + n * k + 2 * m * n
    sets = [
        [(torch.randn(rows, k, device="cuda") * 30).to(E4M3) for rows in (m, n)]
        for _ in range(max(1, min(16, int(ROTATED_BYTES / moved))))
    ]
    times = times_of(contenders(recipe, m, n, k, peer), sets)
    goal, against = goal_of(recipe, m)
    others = {who: time for who, time in times.items() if who != "ours"}
    best = against or min(others, key=lambda who: others[who], default="")
    ratio = others[best] / times["ours"] if best else math.nan
    return {
        "case": f"{recipe} {m} x {n} x {k}", "recipe": recipe, "us": times, "bytes": moved,
        "flops": 2.0 * m * n * k, "goal": goal, "of": best, "ratio": ratio,
    }  # fmt: skip


@torch.compile(dynamic=False)
def compiled_gate(x: Tensor) -> tuple[Tensor, Tensor]:
    """What quantize(x, BLOCK_1X128, gate="silu") computes, as its users without it write it."""
    gate, up = x.chunk(2, -1)
    blocks = (F.silu(gate.float()) * up.float()).unflatten(-1, (-1, 128))
    scales = blocks.abs().amax(-1, keepdim=True) / torch.finfo(E4M3).max
    return (blocks / scales).to(E4M3).flatten(-2), scales.squeeze(-1)


GATE = "silu * up, 1x128"
QUANTIZE = {
    "1x128": lambda x: quantize(x, BLOCK_1X128)[0],
    "1x128 transposed": lambda x: quantize(x, BLOCK_1X128, transpose=True)[0],
    "128x128": lambda x: quantize(x, BLOCK_128X128)[0],
    "row": lambda x: quantize(x, ROW)[0],
    GATE: lambda x: quantize(x, BLOCK_1X128, gate="silu")[0],
    f"{GATE}, compiled": lambda x: compiled_gate(x)[0],
}
# Rows and columns; the last two, which are the goal's, with the gate alone.
QUANTIZED = ((16384, 7168), (4096, 7168), (4096, 2048), (8192, 28672), (8192, 4096))
GATES_ALONE = QUANTIZED[3:]


def bytes_of(what: str, m: int, k: int) -> int:
    """Read and written, with scales of 1x128; the others' are few, and would make a size that
    clone() copies at 0.64 to 0.7 of its rate (no multiple of 32 KB, H200)."""
    written = m * k // 2 if GATE in what else m * k
    blocks = written // 128 if "1x128" in what else 0
    return 2 * m * k + written + 4 * blocks


def measure_quantize(m: int, k: int) -> dict[str, Any]:
    """Of a copy: the time in which clone() reads and writes as many bytes, half of them each, over
    that of the call."""
    own = [what for what in QUANTIZE if GATE in what or (m, k) not in GATES_ALONE]
    sizes = {what: bytes_of(what, m, k) for what in own}
    copied = list(dict.fromkeys(size for what, size in sizes.items() if "compiled" not in what))
    sets = [
        [torch.randn(m, k, device="cuda", dtype=BF16)]
        + [torch.randint(255, (size // 2,), device="cuda", dtype=torch.uint8) for size in copied]
        for _ in range(max(2, min(16, int(2 * ROTATED_BYTES / (2 * m * k)))))
    ]
    calls: dict[str, Callable[..., Tensor]] = {
        f"copy of {size}": lambda x, *copies, at=at: copies[at].clone()
        for at, size in enumerate(copied)
    }
    calls |= {what: lambda x, *copies, what=what: QUANTIZE[what](x) for what in own}
    times = times_of(calls, sets)
    rates = {what: size / times[what] / 1e6 for what, size in sizes.items()}
    parts = {what: times[f"copy of {size}"] / times[what] for what, size in sizes.items()}
    return {"case": f"quantize {m} x {k}", "us": times, "TB/s": rates, "of a copy": parts}


# Outputs, half the rows of the weights, and K.
GATED_WEIGHTS = [(14336, 4096), (2048, 7168), (8960, 1536)]


def product_then_gate(a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor) -> Tensor:
    product = op(a, b.t(), scale_a, BLOCK_1X128, scale_b, BLOCK_128X128)
    return quantize(product, BLOCK_1X128, gate="silu")[0]


def measure_gated(m: int, n: int, k: int) -> dict[str, Any]:
    blocks, moved = k // 128, m * k + 2 * n * k + m * n
    sets = [
        [(torch.randn(rows, k, device="cuda") * 30).to(E4M3) for rows in (m, 2 * n)]
        for _ in range(max(1, min(16, int(ROTATED_BYTES / moved))))
    ]
    scale_a = torch.rand(blocks, m, device="cuda").t() / 1000
    scale_b = torch.rand(2 * n // 128, blocks, device="cuda").t()
    gated = torch.ops.cubin.scaled_gated_matmul
    calls: Calls = {
        "ours": lambda a, b: gated(a, b.t(), scale_a, scale_b)[0],
        "product, then gate": lambda a, b: product_then_gate(a, b, scale_a, scale_b),
    }
    times = times_of(calls, sets)
    ratio = times["product, then gate"] / times["ours"]
    return {"case": f"gated {m} x {n} x {k}", "us": times, "bytes": moved, "ratio": ratio}


class SwiGLU(nn.Module):
    def __init__(self, n: int, k: int) -> None:
        super().__init__()
        self.gate, self.up = (nn.Linear(k, n, bias=False) for _ in range(2))
        self.down = nn.Linear(n, k, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.silu(self.gate(x)) * self.up(x))


def measure_compiled(rows: list[int], n: int, k: int) -> Iterator[dict[str, Any]]:
    """Layers that together are larger than the L2 cache; times are of one of them."""
    from torch_cubin._inductor import fold

    layers = max(1, round(ROTATED_BYTES / (3 * n * k)))
    model = nn.Sequential(*(SwiGLU(n, k) for _ in range(layers))).to("cuda", BF16)
    model = torch_cubin.float8(model)
    passes = {"ours": fold._fold_quantized_gate, "without the fold": lambda graph, root: False}
    inputs = {m: torch.randn(m, k, device="cuda", dtype=BF16) for m in rows}
    graphs: dict[int, dict[str, torch.cuda.CUDAGraph]] = {m: {} for m in rows}
    for who, run in passes.items():
        torch._dynamo.reset()
        # Graphs of Inductor's cache do not come to the pass.
        compiled = torch.compile(model, dynamic=True, options={"fx_graph_cache": False})
        with mock.patch.object(fold, "_fold_quantized_gate", run), torch.no_grad():
            for m, x in inputs.items():
                graphs[m][who] = common.graph_of([functools.partial(compiled, x)])[0]
    for m, own in graphs.items():
        runs = {who: graph.replay for who, graph in own.items()}
        times = common.interleaved(runs, block_ms=8, rounds=5, settle_ms=8)
        ratio = times["without the fold"] / times["ours"]
        us = {who: time / layers for who, time in times.items()}
        yield {"case": f"compiled {m} x {n} x {k}", "us": us, "ratio": ratio}


def main() -> None:
    parser = common.parser(__doc__)
    parser.add_argument("--rows", default=",".join(map(str, ROWS)))
    parser.add_argument("--only", default="", help="fast, exact or block")
    parser.add_argument("--no-quantize", action="store_true")
    parser.add_argument("--deep-gemm", type=deep_gemm.Peer, metavar="FOLDER")
    only = parser.add_mutually_exclusive_group()
    only.add_argument("--gated", action="store_true")
    only.add_argument("--compiled", action="store_true")
    parser.add_argument("--append", action="store_true", help="to the cases of the JSON file")
    arguments = parser.parse_args()
    common.begin("Products of float8_e4m3fn, microseconds a call")
    kept = json.loads(Path(arguments.json).read_text())["results"] if arguments.append else []
    results: list[dict[str, Any]] = []

    def add(result: dict[str, Any]) -> None:
        results.append(result)
        again = {each["case"] for each in results}
        others = [each for each in kept if each["case"] not in again]
        common.write_json(arguments.json, others + results)  # the next case may be ended

    rows = list(map(int, arguments.rows.split(",")))
    layers: Iterator[dict[str, Any]] = iter(())
    if arguments.gated:
        layers = (measure_gated(m, n, k) for m in rows for n, k in GATED_WEIGHTS)
    elif arguments.compiled:
        layers = itertools.chain.from_iterable(
            measure_compiled(rows, n, k) for n, k in GATED_WEIGHTS
        )
    for result in layers:
        add(result)
        print(result["case"], f"{result['ratio']:.3f}", result["us"], flush=True)
    if arguments.gated or arguments.compiled:
        return
    for recipe in ("fast", "exact", "block"):
        for m in rows:
            if arguments.only not in recipe:
                continue
            own = []
            for n, k in WEIGHTS:
                result = measure(recipe, m, n, k, arguments.deep_gemm)
                own.append(result)
                times = result["us"]
                print(
                    f"{result['case']}: {result['ratio']:.3f} of {result['of']}, "
                    f"{result['flops'] / times['ours'] / 1e6:.0f} TF, "
                    f"{result['bytes'] / times['ours'] / 1e6:.2f} TB/s  "
                    + "  ".join(f"{who} {time:.1f}" for who, time in times.items()),
                    flush=True,
                )
                add(result)
                torch.cuda.empty_cache()
            ratios = [each["ratio"] for each in own]
            mean = common.geometric_mean(ratios)
            print(f"{recipe}, {m} rows: mean {mean:.3f}, least {min(ratios):.3f} "
                  f"(goal {own[0]['goal']})\n", flush=True)  # fmt: skip
    for m, k in () if arguments.no_quantize else QUANTIZED:
        result = measure_quantize(m, k)
        add(result)
        print(
            result["case"],
            "  ".join(f"{what} {x:.2f}" for what, x in result["of a copy"].items()),
        )


if __name__ == "__main__":
    main()
