"""The products for graphs and into float32, beside PyTorch's kernels and our own, composed.

    python benchmarks/bench_fused.py [--json FILE]

Each contender is a CUDA graph of calls whose operands rotate over several times the L2 cache; the
contenders alternate. "torch" is what eager PyTorch runs, "composed" our own ops one by one.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from typing import Any

import common
import torch
import torch.nn.functional as F

import torch_cubin  # noqa: F401  (registers the ops)

ops = torch.ops.cubin
Call = Callable[[], Any]
ROTATED_BYTES = 200e6
# tokens, hidden, intermediate
GLU = [(128, 4096, 14336), (512, 4096, 14336), (2048, 2048, 5632), (4096, 4096, 14336),
       (8192, 2048, 8192), (8192, 5120, 13824)]  # fmt: skip
# tokens, hidden, columns of each weight
LINEARS = [(128, 4096, (4096, 1024, 1024)), (512, 4096, (4096, 1024, 1024)),
           (1024, 1024, (1024, 1024, 1024)), (2048, 2048, (2048, 512, 512)),
           (4096, 768, (768, 768, 768)), (8192, 4096, (4096, 1024, 1024))]  # fmt: skip
# tokens, inputs, outputs
LAYERS = [(512, 768, 3072), (4096, 768, 3072), (8192, 1024, 4096), (16384, 1152, 4304),
          (8192, 4096, 16384)]  # fmt: skip


def draw(*shape: int) -> torch.Tensor:
    return torch.randn(shape, device="cuda", dtype=torch.bfloat16) * shape[-1] ** -0.25


def copies(make: Callable[[], list[Any]], size: float) -> list[list[Any]]:
    return [make() for _ in range(max(1, min(12, int(ROTATED_BYTES / size))))]


def glu_cases() -> Iterator[tuple[str, float, dict[str, list[Call]]]]:
    for tokens, hidden, inner in GLU:
        size = 2.0 * (tokens * hidden + 2 * inner * hidden + tokens * inner)
        sets = copies(lambda: [draw(tokens, hidden), draw(inner, hidden), draw(inner, hidden)], size)
        yield f"SwiGLU {tokens} x {hidden} -> {inner}", 4.0 * tokens * hidden * inner, {
            "ours": [lambda s=s: ops._linear_glu(*s, "silu") for s in sets],
            "torch": [lambda s=s: F.silu(F.linear(s[0], s[1])) * F.linear(s[0], s[2]) for s in sets],
            "composed": [
                lambda s=s: ops.linear(s[0], s[1], activation="silu") * ops.linear(s[0], s[2])
                for s in sets
            ],
            "ours, aux": [lambda s=s: ops._linear_glu_aux(*s, "silu")[0] for s in sets],
        }


def linears_cases() -> Iterator[tuple[str, float, dict[str, list[Call]]]]:
    for tokens, hidden, columns in LINEARS:
        size = 2.0 * (tokens * hidden + sum(columns) * (hidden + tokens))
        sets = copies(lambda: [draw(tokens, hidden), [draw(n, hidden) for n in columns]], size)
        joined = [torch.cat(s[1]) for s in sets]
        yield f"linears {tokens} x {hidden} -> {columns}", 2.0 * tokens * hidden * sum(columns), {
            "ours": [lambda s=s: ops._linears(s[0], s[1], [])[0] for s in sets],
            "torch": [lambda s=s: [F.linear(s[0], w) for w in s[1]][0] for s in sets],
            "composed": [lambda s=s: [ops.linear(s[0], w) for w in s[1]][0] for s in sets],
            "torch, one weight": [
                lambda s=s, w=w: F.linear(s[0], w) for s, w in zip(sets, joined, strict=True)
            ],
        }


def aux_cases() -> Iterator[tuple[str, float, dict[str, list[Call]]]]:
    for tokens, inputs, outputs in LAYERS:
        size = 2.0 * (tokens * inputs + inputs * outputs + 2 * tokens * outputs)
        sets = copies(lambda: [draw(tokens, inputs), draw(outputs, inputs), draw(outputs)], size)
        yield f"GELU and aux {tokens} x {inputs} -> {outputs}", 2.0 * tokens * inputs * outputs, {
            "ours": [lambda s=s: ops._linear_activation_aux(*s, "gelu")[0] for s in sets],
            "torch": [lambda s=s: F.gelu(F.linear(*s)) for s in sets],
            "composed": [lambda s=s: F.gelu(ops.linear(*s)) for s in sets],
        }


def backward_cases() -> Iterator[tuple[str, float, dict[str, list[Call]]]]:
    aten = torch.ops.aten
    for tokens, outputs, inputs in LAYERS:  # the layer behind: inputs are the activated
        size = 2.0 * (tokens * outputs + inputs * outputs + 2 * tokens * inputs)
        sets = copies(
            lambda: [draw(tokens, outputs), draw(outputs, inputs), draw(tokens, inputs)], size
        )
        yield f"dX and GELU' {tokens} x {outputs} -> {inputs}", 2.0 * tokens * inputs * outputs, {
            "ours": [lambda s=s: ops._linear_activation_backward(*s, "gelu") for s in sets],
            "torch": [lambda s=s: aten.gelu_backward(s[0] @ s[1], s[2]) for s in sets],
            "composed": [
                lambda s=s: aten.gelu_backward(ops.matmul(s[0], s[1]), s[2]) for s in sets
            ],
        }


def addmm_cases() -> Iterator[tuple[str, float, dict[str, list[Call]]]]:
    for tokens, inputs, outputs in [*LAYERS, (16384, 768, 768), (4096, 4096, 1024)]:
        size = 2.0 * tokens * (inputs + outputs) + 4.0 * inputs * outputs
        sets = copies(
            lambda: [
                torch.zeros(outputs, inputs, device="cuda"),
                draw(tokens, outputs).t(),
                draw(tokens, inputs),
            ],
            size,
        )
        yield f"dW into float32 {tokens}: {outputs} x {inputs}", 2.0 * tokens * inputs * outputs, {
            "ours": [lambda s=s: ops.addmm_into(*s) or s[0] for s in sets],
            "torch": [
                lambda s=s: torch.addmm(*s, out_dtype=torch.float32, out=s[0]) for s in sets
            ],
            "torch, two passes": [lambda s=s: s[0].add_(s[1] @ s[2]) for s in sets],
            "ours, 16 bits": [lambda s=s: ops.matmul(s[1], s[2]) for s in sets],
        }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json")
    parser.add_argument("--only", default="")
    arguments = parser.parse_args()
    common.require_gpu()
    common.print_machine("Fused products, bfloat16, microseconds a call")
    results = []
    for cases in (glu_cases, linears_cases, aux_cases, backward_cases, addmm_cases):
        for name, flops, contenders in cases():
            if arguments.only not in name:
                continue
            with torch.no_grad():
                graphs = {who: common.graph_of(calls)[0] for who, calls in contenders.items()}
            count = len(contenders["ours"])
            runs = {who: graph.replay for who, graph in graphs.items()}
            times = common.interleaved(runs, block_ms=12, rounds=5)
            times = {who: time / count for who, time in times.items()}
            rest = "  ".join(f"{who} {time:.1f}" for who, time in times.items())
            speedup = times["torch"] / times["ours"]
            print(f"{name}: {speedup:.3f} of torch, {flops / times['ours'] / 1e6:.0f} TF  {rest}",
                  flush=True)  # fmt: skip
            results.append({"case": name, "us": times})
            del graphs, contenders, runs
            torch.cuda.empty_cache()
    common.write_json(arguments.json, results)


if __name__ == "__main__":
    main()
