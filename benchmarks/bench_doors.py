"""Host cost of install() and drop_in(), and the speedup of a small model in eager code.

    python benchmarks/bench_doors.py
    python benchmarks/bench_doors.py --device cpu      # without a GPU: only forwarded calls
    python benchmarks/bench_doors.py --only matmul,linear --rounds 10 --json FILE
    python benchmarks/bench_doors.py --only "a gradient to take" --rounds 10

Calls: microseconds of the process's CPU time, which a loaded host changes least, for a call with
64 x 64 operands in bfloat16, submitted without waiting. Models: the time of a step of eight
transformer blocks at 1 x 128 and 4 x 2048 tokens, including the wait for the GPU. The policy is the
default, "fastest"; on the CPU, for a try without a GPU, "all".

Stock PyTorch has processes that never install, the other contenders share as many that do
(benchmark_process.py); "removed" is PyTorch in those, "by name" our op in place of PyTorch's
function, outside install() and drop_in(). All take turns. Of each process the quickest
block counts; a number is the median over the processes, and stock's has their range beside it.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import random
import statistics
import time
from collections.abc import Callable, Collection, Iterator

import benchmark_process
import common
import torch
import torch.nn.functional as F
from benchmark_process import BenchmarkProcess, on_cores_of
from torch import Tensor

import torch_cubin
from torch_cubin._drop_in import aten_kernels

ROUNDS = 30
PROCESSES = 3  # of stock PyTorch, and of the others
CALLS = 300  # per block; the launch queue holds 1,024

POLICY = "fastest" if torch.cuda.is_available() else "all"
STOCK = "stock"
CONTENDERS: dict[str, Callable[[], contextlib.AbstractContextManager]] = {
    "removed": contextlib.nullcontext,
    "install": lambda: torch_cubin.install(policy=POLICY),
    "drop_in": lambda: torch_cubin.drop_in(policy=POLICY),
}
BY_NAME = "by name"


def finish(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def calls_of(device: str) -> dict[str, Callable[[], object]]:
    options = {"device": device, "dtype": torch.bfloat16 if device == "cuda" else torch.float32}
    x, w = torch.randn(64, 64, **options), torch.randn(64, 64, **options)
    bias, out = torch.randn(64, **options), torch.empty(64, 64, **options)
    wg, bg = w.clone().requires_grad_(), bias.clone().requires_grad_()
    batch = torch.randn(4, 64, 64, **options)
    q = torch.randn(1, 4, 64, 64, **options)
    qg, one = q.clone().requires_grad_(), torch.ones(64, 64, **options)

    rows = torch.randn(4096, 64, **options)
    rows_g, bias_g = rows.clone().requires_grad_(), bias.clone().requires_grad_()
    normed = functools.partial(F.layer_norm, normalized_shape=(64,), bias=bias)

    def trained_norm() -> None:
        torch.autograd.grad(normed(rows, weight=bg), bg, rows)

    def wholly_trained_norm() -> None:
        result = F.layer_norm(rows_g, (64,), bg, bias_g)
        torch.autograd.grad(result, (rows_g, bg, bias_g), rows)

    def trained_rms_norm() -> None:
        torch.autograd.grad(F.rms_norm(rows_g, (64,), bg), (rows_g, bg), rows)

    def trained() -> None:
        torch.autograd.grad(torch.matmul(x, wg), wg, one)

    def trained_linear() -> None:
        torch.autograd.grad(F.linear(x, wg, bg), (wg, bg), one)

    return {
        "matmul, no gradient": torch.no_grad()(lambda: torch.matmul(x, w)),
        "matmul, a gradient to take": lambda: torch.matmul(x, wg),
        "matmul, forward and backward": trained,
        "mm(out=)": torch.no_grad()(lambda: torch.mm(x, w, out=out)),
        "linear with bias, no gradient": torch.no_grad()(lambda: F.linear(x, w, bias)),
        "linear with bias, a gradient to take": lambda: F.linear(x, wg, bg),
        "linear with bias, forward and backward": trained_linear,
        "bmm, no gradient": torch.no_grad()(lambda: torch.bmm(batch, batch)),
        "attention, no gradient": torch.no_grad()(
            lambda: F.scaled_dot_product_attention(q, q, q, is_causal=True)
        ),
        "attention, a gradient to take": lambda: F.scaled_dot_product_attention(qg, qg, qg),
        "layer norm, no gradient": torch.no_grad()(lambda: normed(x, weight=bias)),
        "layer norm, the weight's gradient": trained_norm,
        "layer norm, forward and backward": wholly_trained_norm,
        "RMS norm, forward and backward": trained_rms_norm,
        "relu (nothing to serve)": torch.no_grad()(lambda: torch.relu(x)),
    }


def by_name(device: str) -> dict[str, Callable[[], object]]:
    """Calls of our ops in place of those of calls_of()."""
    options = {"device": device, "dtype": torch.bfloat16 if device == "cuda" else torch.float32}
    x, bias = torch.randn(64, 64, **options), torch.randn(64, **options).requires_grad_()
    w, one = torch.randn(64, 64, **options).requires_grad_(), torch.ones(64, 64, **options)
    ops = torch.ops.cubin
    return {
        "matmul, a gradient to take": lambda: ops.matmul(x, w),
        "matmul, forward and backward": lambda: torch.autograd.grad(ops.matmul(x, w), w, one),
        "linear with bias, a gradient to take": lambda: ops.linear(x, w, bias),
    }


class Block(torch.nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = torch.nn.RMSNorm(width), torch.nn.RMSNorm(width)
        self.qkv = torch.nn.Linear(width, 3 * width)
        self.out = torch.nn.Linear(width, width, bias=False)
        self.up = torch.nn.Linear(width, 4 * width)
        self.down = torch.nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        parts = self.qkv(self.norm1(x)).chunk(3, dim=-1)
        q, k, v = (p.view(batch, length, self.heads, -1).transpose(1, 2) for p in parts)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).reshape(batch, length, width))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


def models_of(device: str) -> dict[str, Callable[[], object]]:
    on_gpu = device == "cuda"
    options = {"device": device, "dtype": torch.bfloat16 if on_gpu else torch.float32}
    width, layers = (2048, 8) if on_gpu else (64, 2)
    model = torch.nn.Sequential(*[Block(width, width // 64) for _ in range(layers)]).to(**options)
    found: dict[str, Callable[[], object]] = {}
    for batch, length in [(1, 128), (4, 2048)] if on_gpu else [(1, 16)]:
        x = torch.randn(batch, length, width, **options)

        def train(x: Tensor = x) -> None:
            model.zero_grad(set_to_none=True)
            model(x).float().square().mean().backward()

        found[f"forward, {batch} x {length}"] = torch.no_grad()(lambda x=x: model(x))
        found[f"training, {batch} x {length}"] = train
    return found


def block(work: Callable[[], object], device: str, calls: int, waits: bool, turn: int) -> float:
    """Seconds per call."""
    clock = time.perf_counter if waits else time.process_time
    with on_cores_of(turn):
        for _ in range(max(1, calls // 3)):
            work()
        finish(device)
        begin = clock()
        for _ in range(calls):
            work()
        if waits:
            finish(device)
        elapsed = clock() - begin
        finish(device)
        return elapsed / calls


def groups_of(device: str) -> list[tuple[str, dict[str, Callable[[], object]], int, bool]]:
    return [("calls", calls_of(device), CALLS, False), ("models", models_of(device), 10, True)]


def answer(device: str) -> None:
    """What a process of a contender does."""
    blocks = {
        what: (work, calls, waits)
        for _, works, calls, waits in groups_of(device)
        for what, work in works.items()
    }

    ops = by_name(device)

    def found(do: str, name: str = "", what: str = "", turn: int = 0) -> float | str:
        if do == "report":
            return str(torch_cubin.report())
        work, calls, waits = blocks[what]
        if name == BY_NAME:
            work = ops[what]
        with CONTENDERS.get(name, contextlib.nullcontext)():
            return block(work, device, calls, waits, turn)

    benchmark_process.answer(found)


def measure(
    what: str, of_stock: list[BenchmarkProcess], others: list[BenchmarkProcess], rounds: int,
    names: list[str],
) -> dict[str, list[float]]:  # fmt: skip
    """Seconds per call for each contender, one entry per process."""
    order = [(STOCK, process) for process in of_stock]
    order += [(name, process) for process in others for name in names]
    times: dict[tuple[str, BenchmarkProcess], list[float]] = {one: [] for one in order}
    for turn in range(rounds + 2):
        random.shuffle(order)
        for name, process in order:
            seconds = process.get("block", name, what, turn)
            if turn >= 2:
                times[name, process].append(seconds)
    found: dict[str, list[float]] = {name: [] for name in (STOCK, *names)}
    for (name, _), seconds in times.items():
        found[name].append(min(seconds))
    return found


def chosen(whats: list[str], only: str) -> list[str]:
    parts = only.split(",")
    return [what for what in whats if any(part in what for part in parts)]


def lines_of(
    whats: dict[str, list[str]], of_stock: list[BenchmarkProcess], others: list[BenchmarkProcess],
    rounds: int, have_ops: Collection[str],
) -> Iterator[dict[str, object]]:  # fmt: skip
    for group, of_group in whats.items():
        for what in of_group:
            line: dict[str, object] = {"group": group, "what": what}
            names = [*CONTENDERS, *([BY_NAME] if what in have_ops else [])]
            times = measure(what, of_stock, others, rounds, names)
            for name, seconds in times.items():
                line[name] = {
                    "us": statistics.median(seconds) * 1e6,
                    "over stock": statistics.median(seconds) / statistics.median(times[STOCK]),
                    "processes": sorted(s * 1e6 for s in seconds),
                }
            show(line)
            yield line


def show(line: dict[str, object]) -> None:
    cells = []
    for name in (STOCK, *CONTENDERS, BY_NAME):
        cell = line.get(name)
        if not isinstance(cell, dict):
            continue
        every = cell["processes"]
        beside = f"{every[0]:.1f}-{every[-1]:.1f}" if name == STOCK else f"{cell['over stock']:.2f}"
        cells.append(f"{name} {cell['us']:9.1f} us ({beside})")
    print(f"{line['what']!s:39}  " + "   ".join(cells), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--only", default="", metavar="PART,...", help="parts of lines' names")
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--json", help="also write the results to this file, line by line")
    parser.add_argument("--processes", type=int, default=PROCESSES)
    parser.add_argument("--answer", choices=(STOCK, "others"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.device == "cpu":
        torch.set_num_threads(1)
    if options.answer == "others" and options.device == "cpu":
        aten_kernels.register("CPU")
        aten_kernels.below_autograd = lambda: True
    if options.answer:
        return answer(options.device)
    if options.device == "cuda":
        common.print_machine("install() and drop_in()")
    groups = groups_of(options.device)
    whats = {group[0]: chosen([*group[1]], options.only) for group in groups}
    del groups
    have_ops = [*by_name(options.device)]
    of_stock, others = (
        [
            BenchmarkProcess(__file__, "--device", options.device, "--answer", which)
            for _ in range(options.processes)
        ]
        for which in (STOCK, "others")
    )
    lines: list[dict[str, object]] = []
    for line in lines_of(whats, of_stock, others, options.rounds, have_ops):
        lines.append(line)
        common.write_json(options.json, {"lines": lines})
    print(others[0].get("report"))


if __name__ == "__main__":
    main()
