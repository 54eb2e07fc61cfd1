"""The products for graphs and those with float32 output, compared with PyTorch's kernels and with
our composed ops.

    python benchmarks/bench_fused.py [--json FILE]

Each contender is a CUDA graph of calls whose operands rotate over several times the L2 cache; the
contenders alternate. "torch" is eager PyTorch, "composed" our own ops one after the other.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator
from typing import Any

import common
import torch
import torch.nn.functional as F

import torch_cubin  # noqa: F401  (registers the ops)

ops = torch.ops.cubin
Call = Callable[[], Any]
# Name, floating-point operations, sets of operands, contenders.
Case = tuple[str, float, list[list[torch.Tensor]], dict[str, Callable[..., Any]]]
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


def copies(outputs: int, *shapes: tuple[int, ...]) -> list[list[torch.Tensor]]:
    """Sets of operands; `outputs`: the number of elements that a call writes."""
    size = 2 * (outputs + sum(math.prod(shape) for shape in shapes))
    return [[draw(*x) for x in shapes] for _ in range(max(1, min(12, int(ROTATED_BYTES / size))))]


def of(function: Callable[..., Any], sets: list[list[torch.Tensor]]) -> list[Call]:
    return [functools.partial(function, *own) for own in sets]


def glu_cases() -> Iterator[Case]:
    def ours(*x: torch.Tensor) -> torch.Tensor:
        return ops._linear_glu(*x, "silu")

    def aux(*x: torch.Tensor) -> torch.Tensor:
        return ops._linear_glu_aux(*x, "silu")[0]

    def by_torch(x: torch.Tensor, gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
        return F.silu(F.linear(x, gate)) * F.linear(x, up)

    def composed(x: torch.Tensor, gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
        return ops.linear(x, gate, activation="silu") * ops.linear(x, up)

    for tokens, hidden, inner in GLU:
        sets = copies(tokens * inner, (tokens, hidden), (inner, hidden), (inner, hidden))
        calls = {"ours": ours, "torch": by_torch, "composed": composed, "ours, aux": aux}
        flops = 4.0 * tokens * hidden * inner
        yield f"SwiGLU {tokens} x {hidden} -> {inner}", flops, sets, calls


def linears_cases() -> Iterator[Case]:
    def ours(x: torch.Tensor, *weights: torch.Tensor) -> torch.Tensor:
        return ops._linears(x, weights, [])[0]

    def each(linear: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        def call(x: torch.Tensor, *weights: torch.Tensor) -> torch.Tensor:
            outs = [linear(x, weight) for weight in weights]
            return outs[0]

        return call

    for tokens, hidden, columns in LINEARS:
        shapes = [(tokens, hidden), *((n, hidden) for n in columns)]
        sets = copies(tokens * sum(columns), *shapes)
        calls = {"ours": ours, "torch": each(F.linear), "composed": each(ops.linear)}
        flops = 2.0 * tokens * hidden * sum(columns)
        yield f"linears {tokens} x {hidden} -> {columns}", flops, sets, calls


def aux_cases() -> Iterator[Case]:
    def ours(*x: torch.Tensor) -> torch.Tensor:
        return ops._linear_activation_aux(*x, "gelu")[0]

    for tokens, inputs, outputs in LAYERS:
        sets = copies(2 * tokens * outputs, (tokens, inputs), (outputs, inputs), (outputs,))
        calls = {
            "ours": ours,
            "torch": lambda *x: F.gelu(F.linear(*x)),
            "composed": lambda *x: F.gelu(ops.linear(*x)),
        }
        flops = 2.0 * tokens * inputs * outputs
        yield f"GELU and aux {tokens} x {inputs} -> {outputs}", flops, sets, calls


def backward_cases() -> Iterator[Case]:
    gelu_backward = torch.ops.aten.gelu_backward
    for tokens, outputs, inputs in LAYERS:  # of the layer after the activation
        sets = copies(tokens * inputs, (tokens, outputs), (outputs, inputs), (tokens, inputs))
        calls = {
            "ours": lambda *x: ops._linear_activation_backward(*x, "gelu"),
            "torch": lambda grad, weight, aux: gelu_backward(grad @ weight, aux),
            "composed": lambda grad, weight, aux: gelu_backward(ops.matmul(grad, weight), aux),
        }
        flops = 2.0 * tokens * inputs * outputs
        yield f"dX and GELU' {tokens} x {outputs} -> {inputs}", flops, sets, calls


def addmm_cases() -> Iterator[Case]:
    def ours(main: torch.Tensor, grad: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        ops.addmm_into(main, grad.t(), x)
        return main

    def by_torch(main: torch.Tensor, grad: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        return torch.addmm(main, grad.t(), x, out_dtype=torch.float32, out=main)

    for tokens, inputs, outputs in [*LAYERS, (16384, 768, 768), (4096, 4096, 1024)]:
        pairs = copies(2 * inputs * outputs, (tokens, outputs), (tokens, inputs))
        sets = [[torch.zeros(outputs, inputs, device="cuda"), *own] for own in pairs]
        calls = {
            "ours": ours,
            "torch": by_torch,
            "torch, two passes": lambda main, grad, x: main.add_(grad.t() @ x),
            "ours, 16 bits": lambda main, grad, x: ops.matmul(grad.t(), x),
        }
        flops = 2.0 * tokens * inputs * outputs
        yield f"dW into float32 {tokens}: {outputs} x {inputs}", flops, sets, calls


def main() -> None:
    parser = common.parser(__doc__)
    parser.add_argument("--only", default="")
    arguments = parser.parse_args()
    common.begin("Fused products, bfloat16, microseconds a call")
    results = []
    for cases in (glu_cases, linears_cases, aux_cases, backward_cases, addmm_cases):
        for name, flops, sets, calls in cases():
            if arguments.only not in name:
                continue
            with torch.no_grad():
                graphs = {who: common.graph_of(of(call, sets))[0] for who, call in calls.items()}
            runs = {who: graph.replay for who, graph in graphs.items()}
            times = common.interleaved(runs, block_ms=12, rounds=5)
            times = {who: time / len(sets) for who, time in times.items()}
            rest = "  ".join(f"{who} {time:.1f}" for who, time in times.items())
            speedup, rate = times["torch"] / times["ours"], flops / times["ours"] / 1e6
            print(f"{name}: {speedup:.3f} of torch, {rate:.0f} TF  {rest}", flush=True)
            results.append({"case": name, "us": times})
            del graphs, runs, sets, calls
            torch.cuda.empty_cache()
    common.write_json(arguments.json, results)


if __name__ == "__main__":
    main()
