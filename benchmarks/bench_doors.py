"""Host cost of install() and drop_in(), and the speedup of a small model in eager code.

    python benchmarks/bench_doors.py
    python benchmarks/bench_doors.py --device cpu      # without a GPU: only forwarded calls
    python benchmarks/bench_doors.py --only matmul,linear --rounds 10 --json FILE

Calls: microseconds of the process's CPU time, which a loaded host changes least, for a call with
64 x 64 operands in bfloat16, submitted without waiting. Models: the time of a step of eight
transformer blocks at 1 x 128 and 4 x 2048 tokens, including the wait for the GPU. The contenders
alternate; reported are the median over the rounds, and the median of the rounds' ratios to stock
PyTorch. The policy is the default, "fastest"; on the CPU, for a try without a GPU, "all".

After the first install() of a process, calls outside it pass through our kernels to PyTorch's. So
stock PyTorch runs in a process of its own, which never installs and takes its turn like the others;
"removed" is PyTorch in the process that has installed (stock_process.py; --again shows how far two
processes of stock PyTorch differ).
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import random
import statistics
import time
from collections.abc import Callable, Iterator

import common
import stock_process
import torch
import torch.nn.functional as F
from stock_process import AGAIN, StockProcess, on_the_same_cores
from torch import Tensor

import torch_cubin
from torch_cubin._drop_in import aten_kernels

ROUNDS = 30
CALLS = 300  # per block; the launch queue holds 1,024

POLICY = "fastest" if torch.cuda.is_available() else "all"
STOCK = "stock"  # in a process of its own
CONTENDERS: dict[str, Callable[[], contextlib.AbstractContextManager]] = {
    "removed": contextlib.nullcontext,
    "install": lambda: torch_cubin.install(policy=POLICY),
    "drop_in": lambda: torch_cubin.drop_in(policy=POLICY),
}


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


def block(work: Callable[[], object], device: str, calls: int, waits: bool) -> float:
    """Seconds per call."""
    clock = time.perf_counter if waits else time.process_time
    with on_the_same_cores():
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
    """What a process of stock PyTorch does."""
    blocks = {
        what: (work, calls, waits)
        for _, works, calls, waits in groups_of(device)
        for what, work in works.items()
    }

    def seconds(what: str) -> float:
        work, calls, waits = blocks[what]
        return block(work, device, calls, waits)

    stock_process.answer(seconds)


def measure(
    what: str, work: Callable[[], object], others: dict[str, StockProcess], device: str,
    calls: int, waits: bool, rounds: int,
) -> dict[str, list[float]]:  # fmt: skip
    """Seconds per call for each contender, one entry per round."""
    order = [*others, *CONTENDERS]
    times: dict[str, list[float]] = {name: [] for name in order}
    for turn in range(rounds + 2):
        random.shuffle(order)
        for name in order:
            if name in others:
                others[name].ask(what)
                seconds = others[name].answer()
            else:
                with CONTENDERS[name]():
                    seconds = block(work, device, calls, waits)
            if turn >= 2:  # the first two are warm-up
                times[name].append(seconds)
    return times


def chosen(works: dict[str, Callable[[], object]], only: str) -> dict[str, Callable[[], object]]:
    parts = only.split(",")
    return {what: work for what, work in works.items() if any(part in what for part in parts)}


def lines_of(device: str, only: str, rounds: int, again: bool) -> Iterator[dict[str, object]]:
    others = {
        name: StockProcess(__file__, "--device", device, "--answer")
        for name in (STOCK, *([AGAIN] if again else []))
    }
    for group, works, calls, waits in groups_of(device):
        for what, work in chosen(works, only).items():
            times = measure(what, work, others, device, calls, waits, rounds)
            line: dict[str, object] = {"group": group, "what": what}
            for name, seconds in times.items():
                ratios = [s / stock for s, stock in zip(seconds, times[STOCK], strict=True)]
                line[name] = {
                    "us": statistics.median(seconds) * 1e6,
                    "over stock": statistics.median(ratios),
                }
            show(line)
            yield line


def show(line: dict[str, object]) -> None:
    cells = []
    for name in (STOCK, AGAIN, *CONTENDERS):
        if name not in line:
            continue
        cell = line[name]
        assert isinstance(cell, dict)
        cells.append(f"{name} {cell['us']:9.1f} us ({cell['over stock']:.2f})")
    print(f"{line['what']:<40} {'   '.join(cells)}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--only", default="", metavar="PART,...", help="parts of lines' names")
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--json", help="also write the results to this file, line by line")
    parser.add_argument("--again", action="store_true", help=f"also measure {AGAIN!r}")
    parser.add_argument("--answer", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.device == "cpu":
        torch.set_num_threads(1)
    if options.answer:
        return answer(options.device)
    if options.device == "cpu":
        aten_kernels.register("CPU")
        aten_kernels.below_autograd = lambda: True
    else:
        common.print_machine("install() and drop_in()")
    lines: list[dict[str, object]] = []
    for line in lines_of(options.device, options.only, options.rounds, options.again):
        lines.append(line)
        common.write_json(options.json, {"lines": lines})
    print(torch_cubin.report())


if __name__ == "__main__":
    main()
