"""Host cost of a call of a Triton kernel: through Triton's launcher, and as an op.

    python benchmarks/bench_triton_launch.py [--json FILE]

Needs a GPU and Triton. Each number is the median over batches of 200 calls, which do not wait for
the GPU; the contenders alternate. "in place" writes to a given tensor; "functional" allocates its
output (Triton's launcher: with torch.empty_like).
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


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path)
    return parser.parse_args()


OPTIONS = arguments()  # --help needs no Triton

import triton  # noqa: E402
import triton.language as tl  # noqa: E402

import torch_cubin  # noqa: E402
import torch_cubin.producers.triton as tct  # noqa: E402

BATCH, ROUNDS = 200, 41


@triton.jit
def add(x_ptr, y_ptr, out_ptr, n, BLOCK: tl.constexpr):
    offsets = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = offsets < n
    x = tl.load(x_ptr + offsets, mask=mask)
    tl.store(out_ptr + offsets, x + tl.load(y_ptr + offsets, mask=mask), mask=mask)


@triton.jit
def many(a_ptr, b_ptr, c_ptr, M, N, K, stride_a, stride_b, stride_c, alpha, BLOCK: tl.constexpr):
    offsets = tl.arange(0, BLOCK)
    value = tl.load(a_ptr + offsets) * alpha + tl.load(b_ptr + offsets) + M + N + K
    tl.store(c_ptr + offsets, value + stride_a + stride_b + stride_c)


def microseconds(call: Callable[[], object]) -> float:
    torch.cuda.synchronize()
    begun = time.perf_counter()
    for _ in range(BATCH):
        call()
    taken = time.perf_counter() - begun
    torch.cuda.synchronize()
    return taken / BATCH * 1e6


def main() -> None:
    options = OPTIONS
    n = 4096
    x, y = torch.randn(n, device="cuda"), torch.randn(n, device="cuda")
    out = torch.empty_like(x)
    grid = (triton.cdiv(n, 1024),)
    compiled = add[grid](x, y, out, n, 1024)
    add_tensors = {"x": "float32[n]", "y": "float32[n]", "out": "float32[n]"}
    add_args = {"x_ptr": "x", "y_ptr": "y", "out_ptr": "out"}
    in_place, functional = (
        tct.define_op(
            schema, kernel=compiled, tensors=add_tensors, args=add_args,
            grid=lambda n, BLOCK: torch_cubin.cdiv(n, BLOCK),
        )
        for schema in (
            "bench::add_(Tensor x, Tensor y, Tensor(a!) out) -> ()",
            "bench::add(Tensor x, Tensor y) -> Tensor",
        )
    )  # fmt: skip
    a, b, c = (torch.randn(64, 64, device="cuda") for _ in range(3))
    arguments = (a, b, c, 64, 64, 64, 64, 64, 64, 0.5, 1024)
    of_many = tct.define_op(
        "bench::many(Tensor a, Tensor b, Tensor(a!) c, float alpha) -> ()",
        kernel=many[(1,)](*arguments),
        tensors={"a": "float32[M, K]", "b": "float32[K, N]", "c": "float32[M, N]"},
        args={
            "a_ptr": "a", "b_ptr": "b", "c_ptr": "c", "stride_a": lambda a: a.stride(0),
            "stride_b": lambda b: b.stride(0), "stride_c": lambda c: c.stride(0),
        },
        grid=1,
    )  # fmt: skip
    launch = add[grid]
    contenders: dict[str, Callable[[], object]] = {
        "add in place, Triton": lambda: launch(x, y, out, n, 1024),
        "add in place, op": lambda: in_place.overload(x, y, out),
        "add functional, Triton": lambda: launch(x, y, torch.empty_like(x), n, 1024),
        "add functional, op": lambda: functional.overload(x, y),
        "eleven arguments, Triton": lambda: many[(1,)](*arguments),
        "eleven arguments, op": lambda: of_many.overload(a, b, c, 0.5),
    }
    for call in contenders.values():
        microseconds(call)
    times: dict[str, list[float]] = {name: [] for name in contenders}
    for _ in range(ROUNDS):
        for name, call in contenders.items():
            times[name].append(microseconds(call))
    facts = {
        "gpu": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "triton": triton.__version__,
        "python": sys.version.split()[0],
        "microseconds": {
            name: {
                "median": round(statistics.median(found), 2),
                "quartiles": [round(q, 2) for q in statistics.quantiles(found, n=4)[::2]],
            }
            for name, found in times.items()
        },
    }
    print(json.dumps(facts, indent=2))
    if options.json:
        options.json.write_text(json.dumps(facts, indent=2) + "\n")


if __name__ == "__main__":
    main()
