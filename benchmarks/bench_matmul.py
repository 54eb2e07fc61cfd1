"""Speed of torch.ops.cubin.matmul and torch.matmul: GPU time, and eager calls for small shapes.

    python benchmarks/bench_matmul.py                         # everything, about 3 minutes
    python benchmarks/bench_matmul.py --quick                 # a dozen shapes
    python benchmarks/bench_matmul.py --shapes 16x4096x4096,8192x8192x8192 --dtype bf16 --layout nt
    python benchmarks/bench_matmul.py --markdown --json result.json
    python benchmarks/bench_matmul.py --batch-invariant --quick       # cost of that mode

Random normal data. Inputs rotate over sets of three times the L2 cache, and outputs over a few
blocks of memory (a single block would stay in the cache). Calls run in a CUDA graph, so that host
time is not measured; both outputs are checked against float64. Ratios above 1 mean that torch_cubin
is faster. `plain` is the ratio of eager calls, host overhead included, for shapes under 60
microseconds. NT: B is [N, K] (a @ w.t()); NN: [K, N]. With --batch-invariant, both contenders are
torch_cubin: first outside `torch_cubin.batch_invariant()`, second inside it.
"""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass

import common
import numerics
import torch

import torch_cubin

DTYPES = {
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "tf32": torch.float32,
    "fp32": torch.float32,
    "fp64": torch.float64,
}
CUBES = [(s, s, s) for s in (512, 1024, 2048, 4096, 8192, 16384)]
# (N, K) of the projections of an 8B and a 70B language model; M is the number of tokens.
PROJECTIONS = [
    (4096, 4096), (6144, 4096), (28672, 4096), (4096, 14336), (10240, 8192), (57344, 8192),
    (8192, 28672),
]  # fmt: skip
TOKENS = (1, 16, 64, 256, 1024, 4096, 8192)
QUICK = [
    *CUBES[1:5], (1, 4096, 4096), (1, 28672, 4096), (4, 4096, 4096), (16, 4096, 14336),
    (64, 6144, 4096), (256, 28672, 4096), (1024, 4096, 4096), (4096, 4096, 14336),
]  # fmt: skip

# The project's promise on an H200: dtype, shapes, minimum ratio to torch.matmul.
FLOORS = [
    ("bf16", lambda m, n, k: m == n == k and m in (4096, 8192), 0.65),
    ("tf32", lambda m, n, k: m == n == k and m in (4096, 8192), 0.5),
    ("fp64", lambda m, n, k: m == n == k and m in (4096, 8192), 0.5),
    ("fp32", lambda m, n, k: m == n == k and m in (4096, 8192), 0.7),
    ("bf16", lambda m, n, k: True, 0.4),
]


@dataclass(frozen=True)
class Row:
    """One measured line."""

    dtype: str
    layout: str
    m: int
    n: int
    k: int
    torch_us: float
    cubin_us: float
    ratio: float
    low: float
    high: float
    torch_tflops: float
    cubin_tflops: float
    cubin_gbs: float
    plain: float | None
    kernels: str


def inputs(m: int, n: int, k: int, dtype: torch.dtype, layout: str) -> list:
    """Sets of operands, three times the size of the L2 cache in total (at most 200 sets)."""
    cache = torch.cuda.get_device_properties(0).L2_cache_size
    size = (m * k + k * n) * dtype.itemsize
    count = max(2, min(200, math.ceil(3 * cache / size)))
    sets = []
    for _ in range(count):
        a = torch.randn(m, k, device="cuda", dtype=dtype)
        b = torch.randn((n, k) if layout == "nt" else (k, n), device="cuda", dtype=dtype)
        sets.append((a, b.t() if layout == "nt" else b))
    return sets


def check(out: torch.Tensor, own: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> None:
    """Checks up to 64 rows of a timed output by the rule of tests/numerics.py."""
    rows = torch.randint(a.shape[0], (min(64, a.shape[0]),), device="cuda")
    reference = numerics.reference_matmul(a[rows], b)
    numerics.check_close(out[rows], own[rows], reference, f"{tuple(a.shape)} @ {tuple(b.shape)}")


def batch_invariant_matmul(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    with torch_cubin.batch_invariant():
        return torch.ops.cubin.matmul.default(a, b)


def contenders(batch_invariant: bool) -> tuple:
    if batch_invariant:
        return torch.ops.cubin.matmul.default, batch_invariant_matmul
    return torch.matmul, torch.ops.cubin.matmul.default


def kernel_names(function: Callable, a: torch.Tensor, b: torch.Tensor) -> str:
    """Names of the kernels that one call launches, from the profiler."""
    activities = [torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profile:
        function(a, b)
        torch.cuda.synchronize()
    events = (e.name for e in profile.events() if e.device_type.name == "CUDA")
    return " + ".join(name for name in events if "mem" not in name.lower())


def plain_ratio(sets: list, functions: tuple) -> float:
    """Ratio of eager calls in a loop, host included: first function's time over the second's."""
    rounds = []
    for _ in range(7):
        times = []
        for function in functions:
            torch.cuda.synchronize()
            start = time.perf_counter()
            for index in range(100):
                function(*sets[index % len(sets)])
            torch.cuda.synchronize()
            times.append((time.perf_counter() - start) * 1e6 / 100)
        rounds.append((times[0], times[1]))
    return common.summarise(rounds).ratio


def measure(
    name: str,
    layout: str,
    shape: tuple[int, int, int],
    budget_ms: float,
    kernels: bool,
    rest_ms: float = 0,
    functions: tuple = contenders(False),
) -> Row:
    m, n, k = shape
    torch.backends.cuda.matmul.allow_tf32 = name == "tf32"
    sets = inputs(m, n, k, DTYPES[name], layout)
    # A multiple of the sets, with enough calls per graph to hide the cost of a replay.
    guess_us = max(3.0, 2 * m * n * k / 300e6, (m * k + k * n) * sets[0][0].element_size() / 4e6)
    calls = len(sets) * max(1, round(2000 / guess_us / len(sets))) if guess_us < 2000 else 2
    order = [sets[i % len(sets)] for i in range(calls)]
    graphs, outputs = [], []
    for function in functions:
        run = [lambda s=s, f=function: f(*s) for s in order]
        graph, last = common.graph_of(run, alive=min(len(sets), 4))
        graphs.append(graph)
        outputs.append(last)
    timed = common.alternate(graphs[0].replay, graphs[1].replay, calls, budget_ms, rest_ms=rest_ms)
    torch.cuda.synchronize()
    check(outputs[1], outputs[0], *order[-1])
    small = timed.first_us < 60
    flops, size = 2 * m * n * k, sum(t.numel() * t.element_size() for t in (*order[0], outputs[0]))
    return Row(
        dtype=name,
        layout=layout,
        m=m,
        n=n,
        k=k,
        torch_us=timed.first_us,
        cubin_us=timed.second_us,
        ratio=timed.ratio,
        low=timed.low,
        high=timed.high,
        torch_tflops=flops / timed.first_us / 1e6,
        cubin_tflops=flops / timed.second_us / 1e6,
        cubin_gbs=size / timed.second_us / 1e3,
        plain=plain_ratio(sets, functions) if small else None,
        kernels=kernel_names(functions[1], *order[0]) if kernels else "",
    )


def plan(options: argparse.Namespace) -> list[tuple[str, str, tuple[int, int, int]]]:
    layouts = [options.layout] if options.layout else ["nt", "nn"]
    dtypes = [options.dtype] if options.dtype else list(DTYPES)
    if options.batch_invariant and not options.dtype:
        dtypes = ["bf16"]
    lines = []
    for name in dtypes:
        if options.shapes:
            shapes = [tuple(map(int, text.split("x"))) for text in options.shapes.split(",")]
        elif options.quick:
            shapes = QUICK if name == "bf16" else CUBES[1:4]
        elif name == "bf16":
            shapes = CUBES + [(m, n, k) for m in TOKENS for n, k in PROJECTIONS]
        else:
            shapes = CUBES[1:5]
        few = options.quick and name != "bf16"
        lines += [(name, layout, s) for s in shapes for layout in (layouts[:1] if few else layouts)]
    return lines


def cells(row: Row) -> list[str]:
    shape = [row.dtype, row.layout.upper(), str(row.m), str(row.n), str(row.k)]
    plain = "" if row.plain is None else f"{row.plain:.2f}"
    numbers = [f"{row.torch_us:.1f}", f"{row.cubin_us:.1f}", f"{row.ratio:.3f}"]
    spread = f"{row.low:.2f}-{row.high:.2f}"
    rates = [f"{row.torch_tflops:.1f}", f"{row.cubin_tflops:.1f}", f"{row.cubin_gbs:.0f}"]
    return shape + numbers + [spread] + rates + [plain] + ([row.kernels] if row.kernels else [])


def print_summary(rows: list[Row], names: tuple[str, str], promises: bool) -> None:
    first, second = names
    print(f"\nratio, {first} us / {second} us, geometric mean and worst:")
    groups: dict[str, list[Row]] = {}
    for row in rows:
        size = "cubes" if row.m == row.n == row.k else f"M={row.m}"
        groups.setdefault(f"{row.dtype} {size}", []).append(row)
    for name, group in groups.items():
        worst = min(group, key=lambda row: row.ratio)
        mean = common.geometric_mean([row.ratio for row in group])
        where = f"{worst.m}x{worst.n}x{worst.k} {worst.layout.upper()}"
        print(f"  {name:12} {mean:.3f}   worst {worst.ratio:.3f} ({where})")
    for dtype, applies, floor in FLOORS if promises else ():
        group = [r for r in rows if r.dtype == dtype and applies(r.m, r.n, r.k)]
        under = [r for r in group if not (r.ratio >= floor)]
        if group:
            names = ", ".join(f"{r.m}x{r.n}x{r.k} {r.layout}" for r in under)
            shapes = f"{len(group)} {dtype} lines"
            print(f"  floor {floor}: {shapes}: {'all above' if not under else 'UNDER: ' + names}")


def main() -> None:
    parser = common.parser(__doc__, markdown=True)
    parser.add_argument("--quick", action="store_true", help="a dozen shapes instead of all")
    parser.add_argument("--shapes", help="MxNxK,MxNxK,... instead of the list")
    parser.add_argument(
        "--batch-invariant", action="store_true", help="what batch_invariant() costs (bf16)"
    )
    parser.add_argument("--dtype", choices=DTYPES)
    parser.add_argument("--layout", choices=["nt", "nn"])
    parser.add_argument("--budget", type=float, default=300, help="milliseconds a line (300)")
    parser.add_argument(
        "--rest",
        type=float,
        default=0,
        metavar="MS",
        help="rest before each block of 3 ms, so that power does not limit the clocks",
    )
    parser.add_argument("--kernels", action="store_true", help="name the kernels that ran")
    options = parser.parse_args()
    common.require_gpu()
    names = ("torch", "cubin")
    title = "torch.ops.cubin.matmul beside torch.matmul (GPU time, CUDA graphs)"
    if options.batch_invariant:
        names = ("outside", "inside")
        title = "torch.ops.cubin.matmul outside of batch_invariant() and inside (GPU time, graphs)"
    common.print_machine(title)
    torch.manual_seed(0)
    # Both sides accumulate in float32: PyTorch's reduced-precision split-K is disabled.
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
    torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction = False
    rows, failures = [], []
    with torch.no_grad():
        warm = torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16)
        for _ in range(500):  # about a second, until clocks and temperature settle
            torch.mm(warm, warm)
        torch.cuda.synchronize()
        del warm
        for name, layout, shape in plan(options):
            try:
                rows.append(
                    measure(
                        *(name, layout, shape, options.budget, options.kernels, options.rest),
                        functions=contenders(options.batch_invariant),
                    )
                )
            except Exception as error:  # keep the numbers of the other lines
                failures.append(f"{name} {layout} {shape}: {type(error).__name__}: {error}")
            torch.cuda.empty_cache()
    first, second = names
    headers = ["dtype", "layout", "M", "N", "K", f"{first} us", f"{second} us", "ratio", "spread",
               f"{first} TFLOP/s", f"{second} TFLOP/s", f"{second} GB/s", "plain"]  # fmt: skip
    headers += ["kernels"] if options.kernels else []
    common.print_table(headers, [cells(row) for row in rows], options.markdown)
    if rows:
        print_summary(rows, names, promises=not options.batch_invariant)
    common.write_json(options.json, [asdict(row) for row in rows])
    common.end_with(failures)


if __name__ == "__main__":
    main()
