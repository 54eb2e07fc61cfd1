"""The kernels of examples/triton_ahead_of_time: Triton's launcher compared with a package's ops.

    python benchmarks/bench_triton_examples.py [--json FILE]

Needs a GPU and Triton; the package was compiled ahead of time. "host" is the host cost of a call
with small tensors, the median over interleaved batches of calls that do not wait for the GPU.
"gpu" is microseconds of a large call in a CUDA graph, interleaved. The matmul runs the config that
the op selects before torch_cubin.tune: through an autotuner with only that config, as after
tuning, and as a plain @triton.jit function. For comparison: x + y of 1,024 floats, an op of one
nvcc kernel. The last lines give an op's host cost as a fraction of Triton's launcher.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parents[1]


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path)
    return parser.parse_args()


OPTIONS = arguments()  # --help needs no Triton

sys.path[:0] = [str(ROOT), str(ROOT / "examples" / "triton_ahead_of_time")]

import kernels  # noqa: E402
import triton  # noqa: E402

import torch_cubin  # noqa: E402

BATCH, ROUNDS = 200, 25


def host(call: Callable[[], object]) -> float:
    torch.cuda.synchronize()
    begun = time.perf_counter()
    for _ in range(BATCH):
        call()
    taken = time.perf_counter() - begun
    torch.cuda.synchronize()
    return taken / BATCH * 1e6


def graph_of(call: Callable[[], object], count: int = 20) -> torch.cuda.CUDAGraph:
    call()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(count):
            call()
    return graph


def gpu(graph: torch.cuda.CUDAGraph, count: int = 20) -> float:
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    graph.replay()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) / count * 1e3


def contenders_of(ops: dict[str, torch_cubin.Op], size: int, rows: int) -> dict[str, Callable]:
    a, b = (torch.randn(size, size, device="cuda", dtype=torch.float16) for _ in range(2))
    q, k, v = (torch.randn(2, 8, rows, 64, device="cuda", dtype=torch.bfloat16) for _ in range(3))
    first = kernels.CONFIGS[0]
    blocks = first.kwargs
    tuned = triton.autotune([first], key=["M", "N", "K"])(kernels.matmul.fn)
    grid = (triton.cdiv(size, blocks["BLOCK_M"]) * triton.cdiv(size, blocks["BLOCK_N"]),)
    options = {"num_warps": first.num_warps, "num_stages": first.num_stages}

    def by_autotuner():
        c = torch.empty(size, size, device="cuda", dtype=torch.float16)
        tuned[grid](a, b, c, size, size, size, GROUP=8)
        return c

    def by_function():
        c = torch.empty(size, size, device="cuda", dtype=torch.float16)
        kernels.matmul.fn[grid](a, b, c, size, size, size, GROUP=8, **blocks, **options)
        return c

    def attention():
        out = torch.empty_like(q)
        kernels.attention[(triton.cdiv(rows, 128), 16)](
            *(q, k, v, out, 0.125, 8, 8, rows, rows),
            CAUSAL=True,
            D=64,
            BLOCK_M=128,
            BLOCK_N=64,
            num_warps=4,
            num_stages=3,
        )
        return out

    x, y = (torch.randn(1024, device="cuda") for _ in range(2))
    plain_op = torch.ops.bench_triton_examples.vec_add.default
    matmul_op = ops["triton_example::matmul"].overload
    attention_op = ops["triton_example::attention"].overload
    return {
        "matmul, Triton's autotuner": by_autotuner,
        "matmul, Triton's function": by_function,
        "matmul, op": lambda: matmul_op(a, b),
        "attention, Triton's function": attention,
        "attention, op": lambda: attention_op(q, k, v, True, 0.125),
        "x + y, op": lambda: plain_op(x, y),
    }


def measured(contenders: dict[str, Callable], clock: Callable) -> dict[str, dict[str, object]]:
    times: dict[str, list[float]] = {name: [] for name in contenders}
    for _ in range(ROUNDS):
        for name, call in contenders.items():
            times[name].append(clock(call))
    return {
        name: {
            "median": round(statistics.median(found), 2),
            "quartiles": [round(q, 2) for q in statistics.quantiles(found, n=4)[::2]],
        }
        for name, found in times.items()
    }


def shares(host_times: dict[str, dict[str, object]]) -> list[str]:
    """An op's host cost as a fraction of Triton's launcher, for the same kernel."""
    lines = []
    for kernel in ("matmul", "attention"):
        op = host_times[f"{kernel}, op"]["median"]
        for launcher in ("function", "autotuner"):
            name = f"{kernel}, Triton's {launcher}"
            if name in host_times:
                triton_s = host_times[name]["median"]
                share = op / triton_s
                lines.append(
                    f"{kernel}: {op:.1f} us, {share:.2f} of Triton's {launcher} ({triton_s:.1f})"
                )
    return lines


def define_plain_op() -> None:
    """Defines x + y of floats: the cost of the simplest op, measured in the same run."""
    torch_cubin.define_op(
        "bench_triton_examples::vec_add(Tensor x, Tensor y) -> Tensor",
        kernel=f"{ROOT / 'tests' / 'data' / 'launch.sm_90a.cuda130.cubin'}:vec_add",
        tensors=dict.fromkeys(("x", "y", "out"), "float32[*s]"),
        args=lambda x, y, out: (x, y, out, torch_cubin.int32(x.numel())),
        grid=lambda x: torch_cubin.cdiv(x.numel(), 256),
        block=256,
    )


def main() -> None:
    define_plain_op()
    ops = torch_cubin.load_package(ROOT / "examples" / "triton_ahead_of_time" / "package")
    small = contenders_of(ops, 128, 128)
    for one, other in (
        ("matmul, Triton's function", "matmul, op"),
        ("attention, Triton's function", "attention, op"),
    ):
        difference = (small[one]().double() - small[other]().double()).abs().max().item()
        if difference > 0.05:
            raise SystemExit(f"{one} and {other} differ by {difference}")
    for call in small.values():
        host(call)
    graphs = {name: graph_of(call) for name, call in contenders_of(ops, 4096, 4096).items()}
    facts = {
        "gpu": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "triton": triton.__version__,
        "python": sys.version.split()[0],
        "host_microseconds_128": measured(small, host),
        "gpu_microseconds_4096": measured(graphs, gpu),
    }
    print(json.dumps(facts, indent=2))
    print("\n".join(shares(facts["host_microseconds_128"])))
    if OPTIONS.json:
        OPTIONS.json.write_text(json.dumps(facts, indent=2) + "\n")


if __name__ == "__main__":
    main()
