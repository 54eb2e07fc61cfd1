"""Attention backward on an H200: sm90/backward.cu and sm90/backward_wide.cu, compared with cuDNN.

    python benchmarks/sm90/bench_attention_backward.py --build OUT [--bound]   # nvcc, no GPU
    python benchmarks/sm90/bench_attention_backward.py OUT [--json FILE]       # checks, then times

Every kernel is first checked against float64 (tails, bands, grouped heads, strides, repeats). Then
each length is timed, the contenders alternating in one process: 35 ms to settle, 50 ms measured,
medians over the rounds. Times include the kernels that prepare and finish the backward. TFLOP/s
count half the work for causal attention.
"""

from __future__ import annotations

import argparse
import ctypes
import itertools
import json
import math
import os
import random
import statistics
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from attention_bench import NO_BOUND, TOKENS, WIDTH, compile_kernel, laid_out, milliseconds
from kernel_params import BackwardParams


@dataclass(frozen=True)
class Kernel:
    dtype: str
    head_dim: int
    rows: int
    q_stages: int
    grad_stages: int
    pair: bool = False  # two blocks of a cluster share dq

    @property
    def name(self) -> str:
        kind = {"bfloat16": "bf16", "float16": "f16"}[self.dtype]
        end = "_pair" if self.pair else ""
        return f"{kind}_{self.head_dim}_{self.rows}_q{self.q_stages}g{self.grad_stages}{end}"

    @property
    def wide(self) -> bool:
        return self.head_dim > 128

    @property
    def box(self) -> int:
        """Keys per block."""
        return 64 if self.wide else 128

    @property
    def keys(self) -> int:
        """Keys per work item."""
        return self.box * (2 if self.pair else 1)

    @property
    def shared(self) -> int:
        row = 2 * self.head_dim
        panels = self.head_dim // 64
        size = 2 * self.box * row + (self.q_stages + self.grad_stages) * self.rows * row
        size += 2 * -(-self.rows // 64) * self.box * 128  # dS of two steps, or of two blocks
        # dq, and P of wide kernels; a pair has half of the other's keys for one of dq's buffers
        size += 256 * self.rows * (2 + 1 if self.wide else 2 * panels)
        size += self.q_stages * (8 * self.rows + 4 + 4)
        if self.pair:
            size += 8 + 16 * self.q_stages + 16 * self.grad_stages + 16 + 16 * panels + 16 + 32
            return (size + 48 + 15) // 16 * 16 + 32 + 160
        size += self.q_stages * 8 * self.keys * -(-self.rows // 64)  # a mask's bits
        size += 8 + 16 * self.q_stages + 16 * self.grad_stages + 32 + 32 * panels + 16 * self.wide
        rows_out = 0 if self.wide else 8 * 8 * row  # staging of dk and dv for the store
        return (size + 48 + 15) // 16 * 16 + 160 + rows_out


def kernels() -> list[Kernel]:
    tiles = ((128, 48, 3, 2), (64, 96, 3, 2), (256, 64, 2, 1))
    tiles += ((256, 64, 2, 1, True),)
    return [Kernel(t, *tile) for t in ("bfloat16", "float16") for tile in tiles]


def build(kernel: Kernel, out: Path, extra: list[str]) -> str:
    defines = {
        "TC_KERNEL": kernel.name,
        "TC_DTYPE": kernel.dtype,
        "TC_TILE_M": kernel.rows,
        "TC_TILE_N": kernel.keys,
        "TC_TILE_K": kernel.head_dim,
        "TC_STAGES": kernel.q_stages,
        "TC_GRAD_STAGES": kernel.grad_stages,
        "TC_GENERAL": 0,
        "TC_PAIR": int(kernel.pair),
        "TC_THREADS": 512,
        "TC_DYNAMIC_SHARED": kernel.shared,
    }
    source = "sm90/backward_wide" if kernel.wide else "sm90/backward"
    return compile_kernel(source, kernel.name, defines, extra, out)


def build_ends(out: Path) -> None:
    """Compiles the kernels that prepare and finish the backward."""
    for dtype in ("bfloat16", "float16"):
        for end, threads in (("delta", 128), ("convert", 256)):
            name = f"sm90_backward_{end}_{dtype}"
            defines = {"TC_KERNEL": name, "TC_DTYPE": dtype, "TC_TILE_M": 16, "TC_THREADS": threads}
            compile_kernel(f"sm90/backward_{end}", name, defines, [], out)


def setup() -> None:
    global torch, driver
    import bench_attention
    import cubin_launch as driver
    import torch

    bench_attention.setup()


class Backward:
    """One kernel with the parameters of one problem, and the kernels before and after it."""

    def __init__(
        self, kernel, functions, q, k, v, out, lse, grad, dq, dk, dv, first=-NO_BOUND,
        last=NO_BOUND, together=8, scale=None, blocks=132,
    ) -> None:  # fmt: skip
        import bench_attention

        encode = bench_attention.encode

        batch, heads, seqlen_q, head_dim = q.shape
        kv_heads, seqlen_k = k.shape[1:3]
        p = BackwardParams()
        p.q.words, p.k.words = encode(q, kernel.rows), encode(k, kernel.box)
        p.v.words, p.grad_out.words = encode(v, kernel.box), encode(grad, kernel.rows)
        p.tile_rows, p.tile_keys = kernel.rows, kernel.keys
        p.tile_columns = kernel.head_dim
        p.tiles, p.key_tiles = -(-seqlen_q // kernel.rows), -(-seqlen_k // kernel.keys)
        tiles = batch * heads * p.tiles
        sums = torch.full((tiles, 2, kernel.rows), math.nan, device="cuda")
        dq_sum = torch.full((tiles, kernel.rows * kernel.head_dim), math.nan, device="cuda")
        turns = torch.full((tiles + 1,), 7, device="cuda", dtype=torch.int32)
        ticket = turns[tiles:]
        for name, tensor in (
            ("sums", sums), ("dq_sum", dq_sum), ("turns", turns), ("ticket", ticket),
            ("out", out), ("grad_out_rows", grad), ("logsumexp", lse), ("dq", dq),
            ("dk", dk), ("dv", dv),
        ):  # fmt: skip
            setattr(p, name, tensor.data_ptr())
        for name, x in (("out", out), ("grad_out", grad), ("dq", dq), ("dk", dk), ("dv", dv)):
            setattr(
                p, f"{name}_stride", (ctypes.c_int64 * 3)(x.stride(0), x.stride(1), x.stride(2))
            )
        p.batch, p.heads, p.group = batch, heads, heads // kv_heads
        p.logsumexp_stride = (ctypes.c_int64 * 2)(heads * seqlen_q, seqlen_q)
        bench_attention.set_lengths(p.lengths, seqlen_q, seqlen_k, first, last)
        p.head_dim, p.head_dim_v = head_dim, v.shape[3]
        p.parts, p.together = 1, min(together, batch * kv_heads)
        p.scale = 1 / math.sqrt(head_dim) if scale is None else scale
        p.unit = p.scale * math.log2(math.e)
        p.logsumexp_unit = math.log2(math.e)
        aligned = bench_attention.aligned_copy(p)
        self.keep = (q, k, v, out, lse, grad, dq, dk, dv, sums, dq_sum, turns, aligned)
        delta, main, convert = functions
        warps = tiles * (kernel.rows // 8) * (kernel.head_dim // 64)
        cluster = 2 if kernel.pair else 1
        grid = min(blocks, batch * kv_heads * p.key_tiles * cluster)
        self.runs = [
            delta.prepare(aligned, tiles * (kernel.rows // 16), 128),
            main.prepare(aligned, grid, 512, kernel.shared, cluster),
            convert.prepare(aligned, -(-warps // 8), 256),
        ]

    def __call__(self) -> None:
        for run in self.runs:
            run()


def load(kernel: Kernel, out: Path):
    main = driver.Cubin(str(out / f"{kernel.name}.cubin"))[kernel.name]
    main.allow_shared(kernel.shared)
    names = [f"sm90_backward_delta_{kernel.dtype}", f"sm90_backward_convert_{kernel.dtype}"]
    delta, convert = (driver.Cubin(str(out / f"{n}.cubin"))[n] for n in names)
    return delta, main, convert


def reference(q, k, v, grad, first, last, scale):
    """out, logsumexp, dq, dk and dv in float64; fully masked rows give 0 and -inf."""
    group = q.shape[1] // k.shape[1]
    q, k, v, grad = q.double(), k.double(), v.double(), grad.double()
    wide_k, wide_v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    s = q @ wide_k.transpose(-1, -2) * scale
    i = torch.arange(q.shape[2], device="cuda")[:, None]
    j = torch.arange(k.shape[2], device="cuda")[None]
    s = s.masked_fill((j < i + first) | (j > i + last), -math.inf)
    lse = torch.logsumexp(s, -1)
    p = torch.exp(s - lse[..., None]).masked_fill(lse[..., None] == -math.inf, 0)
    out = p @ wide_v
    dp = grad @ wide_v.transpose(-1, -2)
    ds = p * (dp - (grad * out).sum(-1, keepdim=True))

    def grouped(x):
        return x.unflatten(1, (k.shape[1], group)).sum(2)

    dk = grouped(ds.transpose(-1, -2) @ q) * scale
    return out, lse, ds @ wide_k * scale, dk, grouped(p.transpose(-1, -2) @ grad)


def check(kernel: Kernel, functions) -> str:
    """Raises if a result is wrong."""
    dtype = getattr(torch, kernel.dtype)
    d = kernel.head_dim
    # batch, heads, kv heads, rows, keys, first, last, head_dim, layout, factor, together
    cases = [
        (1, 1, 1, 96, 128, None, None, d, "bhsd", 1, 8),
        (1, 2, 2, 384, 256, None, None, d, "bhsd", 1, 8),
        (2, 4, 2, 257, 300, None, None, d, "bshd", 1, 2),
        (1, 1, 1, 1, 1, None, None, d, "bhsd", 1, 8),
        (3, 2, 1, 64, 7, None, None, d, "bhsd+", 1, 1),
        (2, 6, 3, 1000, 1000, None, 0, d, "bshd", 1, 4),
        (40, 8, 2, 250, 333, None, 0, d, "bshd", 1, 20),
        (1, 3, 1, 1000, 77, None, 0, d, "bhsd", 1, 3),
        (2, 2, 1, 77, 1000, None, 923, d, "bshd", 1, 1),
        (1, 2, 2, 900, 500, None, -400, d, "bhsd", 1, 1),  # bottom right: 400 rows fully masked
        (2, 2, 2, 1500, 1500, -200, 100, d, "bhsd", 1, 2),
        (1, 2, 2, 700, 700, -100, -50, d, "bhsd", 1, 2),
        (1, 2, 1, 300, 1111, None, None, d - 24, "bshd", 1, 8),
        (1, 2, 1, 300, 1111, None, 811, d - 8, "bhsd+", 5, 8),  # huge scores
        (1, 2, 1, 600, 600, None, 0, d, "bhsd", -1, 8),  # all scores very negative
        (1, 16, 16, 3000, 3000, None, 0, d, "bshd", 1, 8),
        (1, 8, 8, 3000, 3000, None, None, d, "bshd", 1, 8),
    ]
    worst = [0.0] * 3
    for number, (b, h, hk, sq, sk, first, last, hd, layout, factor, together) in enumerate(cases):
        torch.manual_seed(number)
        first = -NO_BOUND if first is None else first
        last = NO_BOUND if last is None else last
        q, grad = (laid_out((b, h, sq, hd), layout, dtype) for _ in range(2))
        k, v = (laid_out((b, hk, sk, hd), layout, dtype) for _ in range(2))
        if factor < 0:
            q, k = q.abs() * 3, -k.abs() * 3
        elif factor > 1:
            q, k = q * factor, k * factor
        scale = 1 / math.sqrt(hd)
        out, lse, *want = reference(q, k, v, grad, first, last, scale)
        out, lse = out.to(dtype), lse.float()
        buffers, results = [], []
        for heads, rows in ((h, sq), (hk, sk), (hk, sk)):
            buffer = torch.full((b, heads, rows + 3, d + 8), math.nan, device="cuda", dtype=dtype)
            buffers.append(buffer)
            results.append(buffer[:, :, :rows, :hd])
        launch = Backward(
            kernel, functions, q, k, v, out, lse, grad, *results, first, last, together
        )
        answers = []
        what = f"{kernel.name} case {number} {cases[number]}"
        for _ in range(3):
            for buffer in buffers:
                buffer.fill_(math.nan)
            launch()
            try:
                torch.cuda.synchronize()
            except torch.AcceleratorError:
                print(what)
                raise
            answers.append([x.clone() for x in results])
        errors = [
            ((x.double() - y).norm() / y.norm().clamp(min=1e-20)).item()
            for x, y in zip(results, want, strict=True)
        ]
        limit = (6e-3 if dtype == torch.bfloat16 else 1e-3) * (3 if factor != 1 else 1)
        if sq == sk == 1:
            errors[:2] = [x.double().abs().max().item() for x in results[:2]]
        if not max(errors) < limit:
            for n, x, y in zip(("dq", "dk", "dv"), results, want, strict=True):
                bad = ((x.double() - y).abs() > 0.05 * y.abs().max()) | x.isnan()
                print(n, f"{int(bad.sum())} of {bad.numel()} wrong", bad.nonzero()[:6].tolist())
            raise SystemExit(f"{what}: errors {errors}")
        for buffer, (rows, n) in zip(buffers, ((sq, hd), (sk, hd), (sk, hd)), strict=True):
            if not bool(buffer[:, :, rows:].isnan().all() and buffer[..., n:].isnan().all()):
                raise SystemExit(f"{what}: wrote outside")
        for other in answers:
            if not all(torch.equal(x, y) for x, y in zip(other, results, strict=True)):
                raise SystemExit(f"{what}: another answer in another run")
        worst = [max(x, y) for x, y in zip(worst, errors, strict=True)]
    # NaN in a value that is visible to causal rows from row 300, and in a row of grad_out.
    q, k, v, grad = (torch.randn(1, 3, 500, d, device="cuda").to(dtype) for _ in range(4))
    out, lse, *_ = reference(q, k, v, grad, -NO_BOUND, 0, 1 / math.sqrt(d))
    out, lse = out.to(dtype), lse.float()
    v[0, 0, 300, 3] = math.nan
    out[0, 0, 300:, 3] = math.nan
    grad[0, 1, 100, 5] = math.nan
    results = [torch.zeros_like(q) for _ in range(3)]
    Backward(kernel, functions, q, k, v, out, lse, grad, *results, -NO_BOUND, 0)()
    torch.cuda.synchronize()
    nan = [x.isnan().any(-1)[0] for x in results]
    want_nan = [torch.zeros_like(x) for x in nan]
    want_nan[0][0, 300:] = True
    want_nan[1][0] = True  # rows from 300 on reach every key
    want_nan[0][1, 100] = True
    want_nan[1][1, :101] = True
    want_nan[2][1, :101] = True
    nan[2][1, 101:256] = False  # 0 * NaN, in the tile of queries with the NaN
    for n, x, y in zip(("dq", "dk", "dv"), nan, want_nan, strict=True):
        if not torch.equal(x, y):
            raise SystemExit(f"{kernel.name}: NaN in {n}: {(x != y).nonzero().tolist()[:20]}")
    return f"{kernel.name}: errors " + " ".join(f"{x:.2e}" for x in worst)


def cudnn(q, k, v, grad, causal: bool):
    from torch.nn.attention import SDPBackend, sdpa_kernel

    leaves = [x.detach().requires_grad_() for x in (q, k, v)]
    with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
        out = torch.nn.functional.scaled_dot_product_attention(*leaves, is_causal=causal)
    return lambda: torch.autograd.grad(out, leaves, grad, retain_graph=True)


def rate_of(function, flops: float) -> float:
    """TFLOP/s, after 35 ms of warm-up with the same function."""
    function()
    one = max(milliseconds(function, 1), 0.01)
    milliseconds(function, max(1, round(35 / one)))
    return flops / milliseconds(function, max(2, round(50 / one))) / 1e9


def rates_of(contenders: dict, flops: dict, rounds: int) -> dict:
    """Median TFLOP/s of each contender, interleaved."""
    rates = {name: [] for name in contenders}
    for _ in range(rounds):
        for name in random.sample(list(contenders), len(contenders)):
            rates[name].append(rate_of(contenders[name], flops[name]))
    return {name: statistics.median(x) for name, x in rates.items()}


def time_window(kernel: Kernel, functions, window: int, rounds: int) -> None:
    """Prints the cost per visible score with and without the window, for 16,384 causal rows."""
    d = kernel.head_dim
    q, k, v, grad = (
        torch.randn(1, TOKENS, WIDTH // d, d, device="cuda", dtype=torch.bfloat16).transpose(1, 2)
        for _ in range(4)
    )
    with torch.no_grad():
        out, lse, *_ = torch.ops.aten._scaled_dot_product_flash_attention(q, k, v, 0.0, True)
    results = [torch.empty_like(x) for x in (q, k, v)]
    contenders, flops = {}, {}
    for keys, first in ((window, 1 - window), (TOKENS, -NO_BOUND)):
        # The time does not depend on the values of logsumexp.
        contenders[keys] = Backward(
            kernel, functions, q, k, v, out, lse, grad, *results, first, 0, max(4, 512 // d)
        )
        flops[keys] = 10 * WIDTH * sum(min(i + 1, keys) for i in range(TOKENS))
    own, causal = rates_of(contenders, flops, rounds).values()
    text = f"window {window}: {own:.0f} TFLOP/s, causal {causal:.0f}, share {own / causal:.2f}"
    print(f"{kernel.name} {text}", flush=True)


def contenders_of(kernels, functions, d: int, s: int, causal: bool, together: str) -> dict:
    """cuDNN and our kernels by name; checks that their results agree."""
    q, k, v, grad = (
        torch.randn(TOKENS // s, s, WIDTH // d, d, device="cuda", dtype=torch.bfloat16).transpose(
            1, 2
        )
        for _ in range(4)
    )
    own = cudnn(q, k, v, grad, causal)
    want = own()
    with torch.no_grad():
        out, lse, *_ = torch.ops.aten._scaled_dot_product_flash_attention(q, k, v, 0.0, causal)
    contenders = {"cudnn": own}
    for kernel, heads in itertools.product(kernels, map(int, together.split(","))):
        results = [torch.empty_like(x) for x in (q, k, v)]
        name = f"{kernel.name.removeprefix(f'bf16_{d}_')} t{heads}"
        launch = Backward(
            kernel, functions[kernel], q, k, v, out, lse, grad, *results,
            last=0 if causal else NO_BOUND, together=heads,
        )  # fmt: skip
        launch()
        torch.cuda.synchronize()
        for which, x, y in zip(("dq", "dk", "dv"), results, want, strict=True):
            error = ((x.float() - y.float()).norm() / y.float().norm()).item()
            if not error < 8e-3:
                raise SystemExit(f"{name} s {s} d {d}: {which} is off by {error}")
        contenders[name] = launch
    return contenders


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("out", type=Path, nargs="?")
    parser.add_argument("--build", type=Path)
    parser.add_argument("--bound", action="store_true")
    parser.add_argument("--only", default="", help="part of the kernels' names")
    parser.add_argument("--no-check", action="store_true")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--lengths", default="512,1024,2048,4096,8192,16384")
    parser.add_argument("--together", default="8")
    parser.add_argument("--window", type=int, help="time it at 16,384 rows, beside causal")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    chosen = [x for x in kernels() if arguments.only in x.name]
    if arguments.build:
        arguments.build.mkdir(parents=True, exist_ok=True)
        extra = ["-DTC_BOUND_NANOSECONDS=1000000000ull"] if arguments.bound else []
        build_ends(arguments.build)
        with ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as pool:
            for line in pool.map(lambda x: build(x, arguments.build, extra), chosen):
                print(line, flush=True)
        return
    setup()
    start = time.time()
    functions = {x: load(x, arguments.out) for x in chosen}
    if not arguments.no_check:
        for kernel in chosen:
            print(check(kernel, functions[kernel]), flush=True)
        print(f"checked after {time.time() - start:.1f} s", flush=True)
    if arguments.window:
        for kernel in (x for x in chosen if x.dtype == "bfloat16"):
            time_window(kernel, functions[kernel], arguments.window, arguments.rounds)
        return
    lines = []
    for d, s, causal in itertools.product(
        (256, 128, 64), map(int, filter(None, arguments.lengths.split(","))), (False, True)
    ):
        here = [x for x in chosen if x.head_dim == d and x.dtype == "bfloat16"]
        if not here:
            continue
        contenders = contenders_of(here, functions, d, s, causal, arguments.together)
        flops = 10 * TOKENS * s * WIDTH / (2 if causal else 1)
        medians = rates_of(contenders, dict.fromkeys(contenders, flops), arguments.rounds)
        lines.append({"d": d, "s": s, "causal": causal, "tflops": medians})
        ordered = sorted(medians.items(), key=lambda x: -x[1])
        text = " | ".join(f"{name} {rate:.0f}" for name, rate in ordered)
        print(f"d{d} s{s} {'causal' if causal else 'full'}: {text}", flush=True)
    if arguments.json:
        arguments.json.write_text(json.dumps(lines, indent=1) + "\n")
    print(f"{time.time() - start:.1f} s")


if __name__ == "__main__":
    main()
