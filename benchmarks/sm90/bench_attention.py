"""Attention forward on an H200: kernels/attention/sm90/forward.cu compared with cuDNN and flash.

    python benchmarks/sm90/bench_attention.py --build OUT           # nvcc, no GPU
    python benchmarks/sm90/bench_attention.py OUT [--json FILE]     # checks, then times

Every kernel is first checked against float64 (tails, bands, grouped heads, strides, huge scores,
NaN, logsumexp, repeats). Then each length is timed in CUDA graphs, the contenders alternating in
one process; medians over the rounds are printed. TFLOP/s count half the work for causal attention.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import math
import os
import random
import statistics
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from attention_bench import NO_BOUND, TOKENS, WIDTH, compile_kernel, laid_out, milliseconds
from kernel_params import AttentionParams

ROUND_ROBIN, IN_PAIRS, BY_QUERIES = 0, -1, -2  # schedules; a positive value: heads to balance


@dataclass(frozen=True)
class Kernel:
    dtype: str
    head_dim: int
    tile_n: int
    groups: int
    q_slots: int
    stages: int
    ping_pong: bool = True

    @property
    def name(self) -> str:
        kind = {"bfloat16": "bf16", "float16": "f16"}[self.dtype]
        order = "" if self.ping_pong else "_free"
        slots = f"q{self.q_slots}s{self.stages}"
        return f"{kind}_{self.head_dim}_{64 * self.groups}x{self.tile_n}_{slots}{order}"

    @property
    def shared(self) -> int:
        row = 2 * self.head_dim
        size = self.q_slots * self.groups * 64 * row + 2 * self.stages * self.tile_n * row
        size += 16 * self.q_slots * self.groups + 32 * self.stages + 64
        return (size + 15) // 16 * 16 + 8 * 68


def kernels() -> list[Kernel]:
    b = "bfloat16"
    return [
        Kernel(b, 128, 128, 2, 2, 2),
        Kernel(b, 128, 128, 2, 2, 2, ping_pong=False),
        Kernel(b, 64, 128, 3, 2, 3), Kernel(b, 64, 128, 2, 2, 2),
        Kernel(b, 256, 80, 2, 1, 2), Kernel("float16", 128, 128, 2, 2, 2),
        Kernel("float16", 64, 128, 3, 2, 3), Kernel("float16", 256, 80, 2, 1, 2),
    ]  # fmt: skip


def build(kernel: Kernel, out: Path, extra: list[str]) -> str:
    defines = {
        "TC_KERNEL": kernel.name,
        "TC_DTYPE": kernel.dtype,
        "TC_TILE_M": 64 * kernel.groups,
        "TC_TILE_N": kernel.tile_n,
        "TC_TILE_K": kernel.head_dim,
        "TC_Q_SLOTS": kernel.q_slots,
        "TC_STAGES": kernel.stages,
        "TC_MASKED": 0,
        "TC_GENERAL": 0,
        "TC_PING_PONG": int(kernel.ping_pong),
        "TC_THREADS": 128 * (kernel.groups + 1),
        "TC_DYNAMIC_SHARED": kernel.shared,
    }
    return compile_kernel("sm90/forward", kernel.name, defines, extra, out)


def setup() -> None:
    global torch, driver
    import cubin_launch as driver
    import torch


def aligned_copy(params):
    """Copies a kernel parameter to a 64-byte boundary, which its tensor maps need."""
    storage = ctypes.create_string_buffer(ctypes.sizeof(params) + 64)
    aligned = type(params).from_buffer(storage, -ctypes.addressof(storage) % 64)
    ctypes.memmove(ctypes.addressof(aligned), ctypes.addressof(params), ctypes.sizeof(params))
    return aligned


def set_lengths(lengths, seqlen_q: int, seqlen_k: int, first: int, last: int) -> None:
    """No packed sequences: the offsets stay null."""
    lengths.seqlen_q, lengths.seqlen_k = seqlen_q, seqlen_k
    lengths.first, lengths.last = first, last


def encode(tensor, box_rows: int):
    """Tensor map of (batch, heads, rows, columns); strides must be multiples of 16 bytes."""
    storage = (ctypes.c_char * 192)()
    address = (ctypes.addressof(storage) + 63) // 64 * 64
    batch, heads, rows, columns = tensor.shape
    strides = [tensor.stride(2) * 2, tensor.stride(1) * 2, tensor.stride(0) * 2]
    strides = [s if n > 1 else 16 for s, n in zip(strides, (rows, heads, batch), strict=True)]
    code = driver.cuda.cuTensorMapEncodeTiled(
        ctypes.c_void_p(address), {torch.float16: 6, torch.bfloat16: 9}[tensor.dtype], 5,
        ctypes.c_void_p(tensor.data_ptr()), (ctypes.c_uint64 * 5)(columns, rows, heads, batch, 1),
        (ctypes.c_uint64 * 4)(*strides, 16), (ctypes.c_uint32 * 5)(64, box_rows, 1, 1, 1),
        (ctypes.c_uint32 * 5)(1, 1, 1, 1, 1), 0, 3, 3, 0,
    )  # fmt: skip
    driver.check(code, f"cuTensorMapEncodeTiled {tuple(tensor.shape)} {tensor.stride()}")
    return driver.TensorMap.from_buffer_copy((ctypes.c_char * 128).from_address(address))


class Forward:
    """One kernel with the parameters of one problem; tensors are (batch, heads, rows, columns)."""

    def __init__(
        self, kernel, function, q, k, v, out, lse=None, first=-NO_BOUND, last=NO_BOUND,
        schedule=ROUND_ROBIN, scale=None, blocks=132,
    ) -> None:  # fmt: skip
        batch, heads, seqlen_q, head_dim = q.shape
        seqlen_k = k.shape[2]
        box = kernel.tile_n
        p = AttentionParams()
        p.q.words, p.k.words, p.v.words = encode(q, 64), encode(k, box), encode(v, box)
        p.out = out.data_ptr()
        p.logsumexp = lse.data_ptr() if lse is not None else 0
        p.out_stride = (ctypes.c_int64 * 3)(out.stride(0), out.stride(1), out.stride(2))
        p.batch, p.heads, p.group = batch, heads, heads // k.shape[1]
        p.logsumexp_stride = (ctypes.c_int64 * 2)(heads * seqlen_q, seqlen_q)
        set_lengths(p.lengths, seqlen_q, seqlen_k, first, last)
        p.head_dim_v = v.shape[3]
        p.tiles = -(-seqlen_q // (64 * kernel.groups))
        p.schedule = schedule
        p.unit = (1 / math.sqrt(head_dim) if scale is None else scale) * math.log2(math.e)
        blocks = min(blocks, p.tiles * batch * heads)
        aligned = aligned_copy(p)
        self.keep = (q, k, v, out, lse, aligned)
        self.run = function.prepare(
            aligned, blocks, 128 * (kernel.groups + 1), kernel.shared
        )  # fmt: skip

    def __call__(self) -> None:
        self.run()


def reference(q, k, v, first, last, scale):
    """out and logsumexp in float64; fully masked rows give 0 and -inf."""
    group = q.shape[1] // k.shape[1]
    q, k, v = q.double(), k.double(), v.double()
    k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    s = q @ k.transpose(-1, -2) * scale
    i = torch.arange(q.shape[2], device="cuda")[:, None]
    j = torch.arange(k.shape[2], device="cuda")[None]
    s = s.masked_fill((j < i + first) | (j > i + last), -math.inf)
    lse = torch.logsumexp(s, -1)
    weights = torch.exp(s - lse[..., None]).masked_fill(lse[..., None] == -math.inf, 0)
    return weights @ v, lse


def check(kernel: Kernel, function) -> str:
    """Raises if a result is wrong."""
    dtype = getattr(torch, kernel.dtype)
    full, d = kernel.head_dim, kernel.head_dim
    # batch, heads, kv heads, rows, keys, first, last, head_dim, layout, factor, schedule
    cases = [
        (1, 2, 2, 128, 128, None, None, d, "bhsd", 1, 0),
        (2, 4, 2, 257, 300, None, None, d, "bshd", 1, 0),
        (1, 1, 1, 1, 1, None, None, d, "bhsd", 1, 0),
        (3, 2, 1, 64, 7, None, None, d, "bhsd+", 1, 0),
        (2, 6, 3, 1000, 1000, None, 0, d, "bshd", 1, 2),
        (2, 6, 3, 1000, 1000, None, 0, d, "bshd", 1, 0),
        (2, 6, 3, 1100, 1000, None, 0, d, "bshd", 1, -1),
        (40, 8, 2, 650, 333, None, 0, d, "bshd", 1, -1),
        (60, 8, 2, 250, 333, None, 0, d, "bshd", 1, 20),
        (1, 3, 1, 1000, 77, None, 0, d, "bhsd", 1, 3),
        (2, 2, 1, 77, 1000, None, 923, d, "bshd", 1, 1),
        (1, 2, 2, 900, 500, None, -400, d, "bhsd", 1, 1),  # bottom right: 400 rows fully masked
        (2, 2, 2, 1500, 1500, -200, 100, d, "bhsd", 1, 2),
        (1, 2, 2, 700, 700, -100, -50, d, "bhsd", 1, 2),
        (40, 8, 2, 200, 333, None, 0, d, "bshd", 1, 5),
        (1, 2, 1, 300, 1111, None, None, d - 24, "bshd", 1, 0),
        (1, 2, 1, 300, 1111, None, 811, d - 8, "bhsd+", 20, 0),  # huge scores
        (1, 2, 1, 300, 1111, None, 811, d, "bhsd", 5, 0),
        (2, 2, 2, 900, 900, None, 0, d, "bhsd", 1000, 1),  # beyond the precision of one fma
        (1, 2, 1, 600, 600, None, 0, d, "bhsd", -1, 0),  # all scores very negative
        (1, 16, 16, 4000, 4000, None, 0, d, "bshd", 1, 2),
    ]
    worst, worst_lse = 0.0, 0.0
    for number, (b, h, hk, sq, sk, first, last, hd, layout, factor, schedule) in enumerate(cases):
        torch.manual_seed(number)
        first = -NO_BOUND if first is None else first
        last = NO_BOUND if last is None else last
        q = laid_out((b, h, sq, hd), layout, dtype)
        k, v = (laid_out((b, hk, sk, hd), layout, dtype) for _ in range(2))
        if factor < 0:
            q, k = q.abs() * 3, -k.abs() * 3
        elif factor > 1:
            q, k = q * factor, k * factor
        scale = 1 / math.sqrt(hd)
        want, want_lse = reference(q, k, v, first, last, scale)
        buffer = torch.full((b, h, sq + 3, full + 8), math.nan, device="cuda", dtype=dtype)
        out = buffer[:, :, :sq, :hd]
        lse = torch.full((b, h, sq), math.nan, device="cuda")
        launch = Forward(kernel, function, q, k, v, out, lse, first, last, schedule)
        answers = []
        what = f"{kernel.name} case {number} {cases[number]}"
        for _ in range(3):
            buffer.fill_(math.nan)
            lse.fill_(math.nan)
            launch()
            try:
                torch.cuda.synchronize()
            except torch.AcceleratorError:
                print(what)
                raise
            answers.append((out.clone(), lse.clone()))
        error = ((out.double() - want).norm() / want.norm()).item()
        seen = want_lse != -math.inf
        lse_error = (lse.double() - want_lse)[seen].abs() / want_lse[seen].abs().clamp(min=1)
        lse_error = lse_error.max().item()
        limit = 2e-2 if factor == 1000 else 4e-3 if dtype == torch.bfloat16 else 5e-4
        if not (error < limit and lse_error < 2e-5):
            raise SystemExit(f"{what}: error {error}, logsumexp {lse_error}")
        if not bool((lse[~seen] == -math.inf).all()) or not bool((out[~seen] == 0).all()):
            raise SystemExit(f"{what}: fully masked rows")
        if not bool(buffer[:, :, sq:].isnan().all() and buffer[..., hd:].isnan().all()):
            raise SystemExit(f"{what}: wrote outside")
        for other, other_lse in answers:
            if not torch.equal(other, out) or not torch.equal(other_lse, lse):
                raise SystemExit(f"{what}: another answer in another run")
        worst, worst_lse = max(worst, error), max(worst_lse, lse_error)
    # NaN in one query; NaN and inf in keys that are visible to causal rows from row 300.
    q, k, v = (torch.randn(1, 2, 500, d, device="cuda").to(dtype) for _ in range(3))
    q[0, 0, 17, 3] = math.nan
    k[0, 1, 300, 5] = math.nan
    out, lse = torch.zeros_like(q), torch.zeros(1, 2, 500, device="cuda")
    Forward(kernel, function, q, k, v, out, lse, -NO_BOUND, 0)()
    torch.cuda.synchronize()
    nan_rows = out.isnan().any(-1)
    want_nan = torch.zeros(1, 2, 500, dtype=torch.bool, device="cuda")
    want_nan[0, 0, 17] = True
    want_nan[0, 1, 300:] = True
    if not torch.equal(nan_rows, want_nan) or not torch.equal(lse.isnan(), want_nan):
        raise SystemExit(f"{kernel.name}: NaN in rows {nan_rows.nonzero().tolist()[:20]}")
    return f"{kernel.name}: error {worst:.2e}, logsumexp {worst_lse:.1e}"


def library(backend: str, q, k, v, causal: bool):
    from torch.nn.attention import SDPBackend, sdpa_kernel

    kind = {"cudnn": SDPBackend.CUDNN_ATTENTION, "flash": SDPBackend.FLASH_ATTENTION}[backend]

    def run():
        with sdpa_kernel(kind):
            return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=causal)

    return run


def graph_of(run, duration: float):
    """A graph of launches that together take about `duration` milliseconds, and their number."""
    milliseconds(run, 2)
    count = max(1, min(200, round(duration / max(milliseconds(run, 1), 1e-3))))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(count):
            run()
    graph.replay()
    torch.cuda.synchronize()
    return graph, count


def timed(contenders: dict, rounds: int, duration: float = 8) -> dict:
    """Median milliseconds per launch; each contender settles for as long as it is measured."""
    graphs = {name: graph_of(run, duration) for name, run in contenders.items()}
    times = {name: [] for name in graphs}
    for _ in range(rounds):
        for name in random.sample(list(graphs), len(graphs)):
            graph, count = graphs[name]
            graph.replay()
            times[name].append(milliseconds(graph.replay, 2) / count)
    return {name: statistics.median(t) for name, t in times.items()}


def time_window(functions: dict, d: int, window: int, rounds: int) -> None:
    """Prints each kernel's cost per visible score, with the window and for causal attention."""
    q, k, v = (
        torch.randn(1, TOKENS, WIDTH // d, d, device="cuda", dtype=torch.bfloat16).transpose(1, 2)
        for _ in range(3)
    )
    contenders, out = {}, torch.empty_like(q)
    for kernel, function in functions.items():
        for last, first, schedule in ((0, 1 - window, BY_QUERIES), (0, -NO_BOUND, 2)):
            contenders[kernel.name, first] = Forward(
                kernel, function, q, k, v, out, first=first, last=last, schedule=schedule
            )
    times = timed(contenders, rounds)
    for kernel in functions:
        rates = []
        for first, keys in ((1 - window, window), (-NO_BOUND, TOKENS)):
            scores = sum(min(i + 1, keys) for i in range(TOKENS))
            rates.append(4 * scores * WIDTH / times[kernel.name, first] / 1e9)
        own, causal = rates
        text = f"window {window}: {own:.0f} TFLOP/s, causal {causal:.0f}, share {own / causal:.2f}"
        print(f"{kernel.name} {text}", flush=True)


def clocks(contenders: dict, seconds: float = 0.5) -> None:
    """Prints the clock and power in the middle of a long run of each."""
    for name, run in contenders.items():
        graph, _ = graph_of(run, 20)
        begin = time.time()
        while time.time() - begin < seconds:
            for _ in range(4):
                graph.replay()
            torch.cuda.current_stream().synchronize()
        for _ in range(20):
            graph.replay()
        query = ["nvidia-smi", "--query-gpu=clocks.sm,power.draw", "--format=csv,noheader"]
        text = subprocess.run(query, capture_output=True, text=True, check=False).stdout.strip()
        torch.cuda.synchronize()
        print(f"{name}: {text}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("out", type=Path)
    parser.add_argument("--build", action="store_true")
    parser.add_argument("--bound", action="store_true", help="barriers of the producers trap")
    parser.add_argument("--only", default="", help="part of the kernels' names")
    parser.add_argument("--lengths", default="512,1024,2048,8192,16384")
    parser.add_argument("--head-dims", default="128,64,256")
    parser.add_argument("--flash", action="store_true", help="time flash, too")
    parser.add_argument("--groups", default="", help="schedule of causal tiles")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--window", type=int, help="time it at 16,384 rows, beside causal")
    parser.add_argument("--without", action="append", default=[], help="a kernel to skip")
    parser.add_argument("--clocks", action="store_true")
    parser.add_argument("--once", action="store_true", help="launch each once, for a profiler")
    parser.add_argument("--skip-checks", action="store_true")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    chosen = [k for k in kernels() if any(x in k.name for x in arguments.only.split(","))]
    chosen = [k for k in chosen if k.name not in arguments.without]
    if arguments.build:
        arguments.out.mkdir(parents=True, exist_ok=True)
        extra = ["-DTC_BOUND_NANOSECONDS=1000000000ull"] if arguments.bound else []
        with ThreadPoolExecutor(2) as pool:
            for line in pool.map(lambda k: build(k, arguments.out, extra), chosen):
                print(line, flush=True)
        return
    setup()
    start = time.time()
    functions, lines = {}, []
    for kernel in chosen:
        functions[kernel] = driver.Cubin(str(arguments.out / f"{kernel.name}.cubin"))[kernel.name]
        functions[kernel].allow_shared(kernel.shared)
        if arguments.skip_checks:
            continue
        try:
            print(check(kernel, functions[kernel]), f"({time.time() - start:.1f} s)", flush=True)
        except torch.AcceleratorError as error:  # the context is lost
            print(f"{kernel.name}: {str(error).splitlines()[0]}", flush=True)
            skipped = [*arguments.without, kernel.name]
            words = [w for name in skipped for w in ("--without", name)]
            os.execv(sys.executable, [sys.executable, *sys.argv, *words])
    if arguments.once:
        arguments.rounds = 0
    busy = torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16)
    for _ in range(500 if arguments.rounds else 1):
        busy @ busy
    torch.cuda.synchronize()
    print(f"checked and warm after {time.time() - start:.1f} s", flush=True)
    if arguments.window:
        for d in map(int, arguments.head_dims.split(",")):
            here = {k: f for k, f in functions.items() if k.dtype == "bfloat16" and k.head_dim == d}
            time_window(here, d, arguments.window, arguments.rounds)
        return
    for d in map(int, arguments.head_dims.split(",")):
        for s in map(int, arguments.lengths.split(",")):
            b, h = TOKENS // s, WIDTH // d
            q, k, v = (
                torch.randn(b, s, h, d, device="cuda", dtype=torch.bfloat16).transpose(1, 2)
                for _ in range(3)
            )
            for causal in (False,) if arguments.once else (False, True):
                contenders = {"cudnn": library("cudnn", q, k, v, causal)}
                if arguments.flash:
                    contenders["flash"] = library("flash", q, k, v, causal)
                outs = {}
                for kernel in chosen:
                    if kernel.head_dim != d or kernel.dtype != "bfloat16":
                        continue
                    groups = [ROUND_ROBIN]
                    if causal and arguments.groups:
                        groups = [int(x) for x in arguments.groups.split(",")]
                    elif causal:
                        groups = [max(1, 32768 // s) if s > 4096 else IN_PAIRS]
                    for group in groups:
                        name = f"{kernel.name.removeprefix(f'bf16_{d}_')}" + f" g{group}" * causal
                        out = torch.empty_like(q)
                        outs[name] = out
                        contenders[name] = Forward(
                            kernel, functions[kernel], q, k, v, out,
                            last=0 if causal else NO_BOUND, schedule=group,
                        )  # fmt: skip
                if arguments.once:
                    for name in outs:
                        contenders[name]()
                    torch.cuda.synchronize()
                    continue
                if arguments.clocks and s == 16384:
                    clocks(contenders)
                want = contenders["cudnn"]()
                times = timed(contenders, arguments.rounds)
                flops = 4 * b * h * s * s * d / (2 if causal else 1)
                rates = {name: flops / t / 1e9 for name, t in times.items()}
                for name, out in outs.items():
                    error = ((out.float() - want.float()).norm() / want.float().norm()).item()
                    if not error < 5e-3:
                        raise SystemExit(f"{name} s {s} d {d}: differs from cuDNN by {error}")
                lines.append({"d": d, "s": s, "causal": causal, "tflops": rates})
                ordered = sorted(rates.items(), key=lambda x: -x[1])
                text = " | ".join(f"{name} {rate:.0f}" for name, rate in ordered)
                print(f"d{d} s{s} {'causal' if causal else 'full'}: {text}", flush=True)
                del outs, want, contenders
    if arguments.json:
        arguments.json.write_text(json.dumps(lines, indent=1) + "\n")
    print(f"{time.time() - start:.1f} s")


if __name__ == "__main__":
    main()
