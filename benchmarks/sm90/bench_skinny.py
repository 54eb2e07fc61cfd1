"""Products with few tokens on an H200: the kernels of sm90_skinny.cu compared with cuBLAS.

    python benchmarks/sm90/bench_skinny.py --build skinny.cubin     # needs nvcc, no GPU
    python benchmarks/sm90/bench_skinny.py skinny.cubin --json skinny.json

Every kernel is first checked against float64 (tails, strides, poisoned outputs, exact integers,
repeats). A sweep then finds the best config of each shape, and the winners are measured in CUDA
graphs with rotated weights, alternating with torch.mm. Over 500 lines: check, sweep and measurement
share the launches of the raw kernels.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import random
import statistics
import subprocess
import sys
import time
from dataclasses import dataclass, replace
from pathlib import Path

from kernel_params import SkinnyParams

HERE = Path(__file__).resolve().parent
LIMIT = 227 * 1024 - 1024  # dynamic shared memory at one block per multiprocessor
HALF = 113 * 1024 - 1024  # at two blocks per multiprocessor
PADS = (8, 16, 32, 64)  # token counts that kernels are built for
MULTIPROCESSORS = 132
SHAPES = [
    (4096, 4096), (6144, 4096), (28672, 4096), (4096, 14336), (10240, 8192), (8192, 8192),
    (57344, 8192), (8192, 28672),
]  # fmt: skip


@dataclass(frozen=True)
class Kernel:
    dtype: str
    layout: str
    blocks: int  # blocks of 64 rows
    pad: int  # tokens

    @property
    def name(self) -> str:
        return f"sm90_skinny_{self.dtype}_{self.layout}_{64 * self.blocks}x{self.pad}"


def kernels() -> list[Kernel]:
    every = [Kernel("bf16", "nt", b, p) for b in (1, 2) for p in PADS]
    every += [Kernel("bf16", "nn", b, p) for b in (1, 3) for p in PADS]
    every += [Kernel("f16", layout, b, 16) for layout, b in (("nt", 2), ("nn", 3))]
    return every


def build(path: str) -> None:
    """Compiles all kernels. A serialised wgmma or a spill is an error."""
    lines = []
    for k in kernels():
        contiguous = "true" if k.layout == "nn" else "false"
        dtype = {"bf16": "bfloat16", "f16": "float16"}[k.dtype]
        lines.append(f"SKINNY({k.name}, {dtype}, {contiguous}, {k.blocks}, {k.pad})")
    table = Path(path).with_suffix(".inc").resolve()
    table.write_text("\n".join(lines) + "\n")
    command = [
        "nvcc", "-std=c++17", "-gencode=arch=compute_90a,code=sm_90a", "-cubin", "-Xptxas", "-v",
        f'-DSKINNY_LIST="{table}"', "-DTC_BOUND_NANOSECONDS=2000000000ull",
        "-I", str(HERE.parents[1] / "csrc" / "kernels"),
        str(HERE / "bench_skinny.cu"), "-o", path,
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    text = done.stdout + done.stderr
    bad = [s for s in text.splitlines() if "C75" in s or "error" in s or "warning" in s]
    bad += [s for s in text.splitlines() if "spill" in s and ", 0 bytes spill stores" not in s]
    if done.returncode or bad:
        sys.exit("\n".join(bad) or text)
    used = [int(s.split("Used ")[1].split()[0]) for s in text.splitlines() if "Used " in s]
    print(f"{len(lines)} kernels, at most {max(used)} registers")


@dataclass(frozen=True)
class Config:
    kernel: Kernel
    rows: int
    splits: int
    stages: int
    prefetched: int = -1  # k blocks; -1: the number of stages
    grid: int = 0  # maximum number of blocks; 0: no limit
    dependent: bool = True

    def text(self) -> str:
        k = self.kernel
        plain = {"prefetched": -1, "grid": 0, "dependent": True}
        extra = "".join(
            f" {n}{getattr(self, n)}" for n, v in plain.items() if getattr(self, n) != v
        )
        size = f"{64 * k.blocks}x{k.pad}"
        return f"{k.layout} {size} rows{self.rows} split{self.splits} stages{self.stages}{extra}"


def stage_bytes(kernel: Kernel, rows: int) -> int:
    if kernel.layout == "nn":
        rows = -(-rows // 64) * 64
    return (rows + kernel.pad) * 128 * 2


def other_bytes(kernel: Kernel, rows: int, splits: int) -> int:
    groups = kernel.blocks * kernel.pad // 8
    parts = -(-groups // splits) * splits * 2048 if splits > 1 else 0
    beyond = 0 if kernel.layout == "nn" else (64 * kernel.blocks - rows) * 128
    return max(parts, beyond)  # the last wgmma reads past the last panel


def stages_for(kernel: Kernel, rows: int, splits: int, limit: int) -> int:
    free = limit - other_bytes(kernel, rows, splits)
    return min(16, free // stage_bytes(kernel, rows))


def pad_of(m: int) -> int:
    return next(p for p in PADS if p >= m)


def setup():
    global torch, driver
    import cubin_launch as driver
    import torch


class Library:
    def __init__(self, path: str) -> None:
        self.cubin = driver.Cubin(path)
        self.functions = {}

    def function(self, kernel: Kernel):
        if kernel not in self.functions:
            function = self.cubin[kernel.name]
            function.allow_shared(LIMIT)
            self.functions[kernel] = function
        return self.functions[kernel]

    def prepare(self, config: Config, x, w, out, bias=None, turned=False):
        """out[t, r] = x[t, :] @ w[r, :]; w is [r, k], or [k, r] for nn; `turned`: out is [r, t]."""
        kernel = config.kernel
        width = 128 // x.element_size()
        rows_count = w.shape[0] if kernel.layout == "nt" else w.shape[1]
        tokens, k = x.shape
        box = (width, config.rows) if kernel.layout == "nt" else (64, 128)
        p = SkinnyParams()
        p.weights[0].words = driver.encode(w, box)
        p.tokens.words = driver.encode(x, (width, kernel.pad))
        p.layers_count, layer = 1, p.layers[0]
        layer.out, layer.bias = out.data_ptr(), bias.data_ptr() if bias is not None else 0
        layer.out_stride_row = out.stride(0) if turned else 1
        layer.out_stride_token = 1 if turned else out.stride(0)
        inner = tokens if turned else rows_count
        p.pairs = int(out.data_ptr() % 4 == 0 and out.stride(0) % 2 == 0 and inner % 2 == 0)
        layer.bias_stride_row, layer.bias_stride_token = (0, 1) if turned else (1, 0)
        p.tokens_count, layer.rows_count, p.k = tokens, rows_count, k
        p.rows, p.tiles, p.splits = config.rows, -(-rows_count // config.rows), config.splits
        p.stages, p.ring_bytes = config.stages, config.stages * stage_bytes(kernel, config.rows)
        p.prefetched = config.stages if config.prefetched < 0 else config.prefetched
        grid = p.tiles * config.splits
        if config.grid and config.splits == 1:
            grid = min(grid, config.grid)
        shared = p.ring_bytes + other_bytes(kernel, config.rows, config.splits)
        assert shared <= LIMIT, config
        return self.function(kernel).prepare(p, grid, 160, shared, config.splits, config.dependent)


def make_config(kernel: Kernel, rows: int, splits: int, limit: int, **more) -> Config:
    return Config(kernel, rows, splits, stages_for(kernel, rows, splits, limit), **more)


# ---- correctness --------------------------------------------------------------------------------


def check_one(library, config: Config, m: int, n: int, k: int, seed: int, what: str) -> None:
    kernel = config.kernel
    dtype = {"bf16": torch.bfloat16, "f16": torch.float16}[kernel.dtype]
    torch.manual_seed(seed)
    step = 16 // dtype.itemsize
    ld = lambda size: -(-size // step) * step + seed % 3 * step  # noqa: E731
    if what == "integers":
        draw = lambda a, b: torch.randint(-1, 2, (a, b), device="cuda").to(dtype)  # noqa: E731
    else:
        draw = lambda a, b: torch.randn(a, b, device="cuda").to(dtype)  # noqa: E731
    # NaN around the operands exposes reads out of bounds.
    x_full = torch.full((m + 1, ld(k)), float("nan"), device="cuda", dtype=dtype)
    w_shape = (n, k) if kernel.layout == "nt" else (k, n)
    w_full = torch.full((w_shape[0] + 1, ld(w_shape[1])), float("nan"), device="cuda", dtype=dtype)
    x, w = x_full[:m, :k], w_full[: w_shape[0], : w_shape[1]]
    x.copy_(draw(m, k))
    w.copy_(draw(*w_shape))
    turned = seed % 2 == 1
    out_shape = (n, m) if turned else (m, n)
    pitch = out_shape[1] + seed % 4
    out_full = torch.full((out_shape[0] + 2, pitch), float("nan"), device="cuda", dtype=dtype)
    out = out_full[1:-1, : out_shape[1]]
    bias = draw(1, m if turned else n)[0].contiguous() if seed % 5 < 2 else None
    wd = w.double() if kernel.layout == "nt" else w.double().t()
    reference = x.double() @ wd.t()
    if turned:
        reference = reference.t()
    if bias is not None:
        reference += bias.double()
    run = library.prepare(config, x, w, out, bias, turned)
    first = None
    name = f"{config.text()} {kernel.dtype} M{m} N{n} K{k} seed{seed} {what} bias{bias is not None}"
    for _ in range(3):
        out_full.fill_(float("nan"))
        run()
        torch.cuda.synchronize()
        got = out.clone()
        if first is None:
            first = got
        if not torch.equal(first.nan_to_num(7e4), got.nan_to_num(7e4)):
            raise AssertionError(f"{name}: repeats differ")
        rest = out_full.clone()
        rest[1:-1, : out_shape[1]] = float("nan")
        if not rest.isnan().all():
            raise AssertionError(f"{name}: wrote outside")
    if what == "integers":
        right = torch.equal(first, reference.to(dtype))
        error = (first.double() - reference).abs().max().item()
    else:
        error = ((first.double() - reference).norm() / reference.norm()).item()
        right = error < 5e-3 if kernel.dtype != "f16" else error < 1e-3
    if not right:
        bad = (~((first.double() - reference).abs() <= 0.05 + 0.02 * reference.abs())).nonzero()
        raise AssertionError(f"{name}: error {error}, {len(bad)} bad, first {bad[:4].tolist()}")


def check_all(library) -> list[str]:
    failures, seed, done = [], 0, 0
    for kernel in kernels():
        for splits in (1, 2, 3, 4, 8):
            for m in {kernel.pad, max(1, kernel.pad - 7), max(1, kernel.pad - 2)}:
                seed += 1
                n = random.Random(seed).choice([8, 64, 72, 200, 257, 640, 1001])
                k = random.Random(seed + 1).choice([8, 40, 64, 333, 520, 1024, 2049])
                width = 64 * kernel.blocks
                rows = random.Random(seed).choice([width, width - 8, width - 40])
                limit = random.Random(seed).choice([HALF, LIMIT])
                if stages_for(kernel, rows, splits, limit) < 1:
                    limit = LIMIT
                config = make_config(kernel, rows, splits, limit, prefetched=seed % 3 - 1, grid=2)
                what = "integers" if seed % 2 else "normal"
                try:
                    check_one(library, config, m, n, k, seed, what)
                    done += 1
                except AssertionError as error:
                    failures.append(str(error))
                    if len(failures) > 12:
                        return failures
    print(f"checked {done} cases, {len(failures)} failures", flush=True)
    return failures


def check_batch_invariance(library) -> None:
    """Checks that a token has the same bits among 1 to 64 tokens for one rows, splits, k block."""
    w = torch.randn(4096, 4096, device="cuda", dtype=torch.bfloat16)
    x = torch.randn(64, 4096, device="cuda", dtype=torch.bfloat16)
    whole, differ = None, []
    for m in (64, 33, 32, 17, 16, 9, 8, 5, 2, 1):
        kernel = Kernel("bf16", "nt", 1, pad_of(m))
        config = make_config(kernel, 64, 2, HALF)
        out = torch.empty(m, 4096, device="cuda", dtype=torch.bfloat16)
        library.prepare(config, x[:m], w, out)()
        torch.cuda.synchronize()
        whole = out if whole is None else whole
        if not torch.equal(out, whole[:m]):
            differ.append((m, (out != whole[:m]).float().mean().item()))
    print(f"batch invariance over 1..64 tokens: {differ or 'yes'}", flush=True)


# ---- speed --------------------------------------------------------------------------------------


class Case:
    """One shape, with operands that rotate."""

    def __init__(self, m: int, n: int, k: int, layout: str, rotate_mb: int = 260) -> None:
        self.m, self.n, self.k, self.layout = m, n, k, layout
        self.bytes = (n * k + m * k + m * n) * 2
        count = max(2, math.ceil(rotate_mb * 1e6 / self.bytes))
        shape = (n, k) if layout == "nt" else (k, n)
        self.sets = [
            (
                torch.randn(m, k, device="cuda", dtype=torch.bfloat16),
                torch.randn(*shape, device="cuda", dtype=torch.bfloat16),
                torch.empty(m, n, device="cuda", dtype=torch.bfloat16),
            )
            for _ in range(count)
        ]
        guess = self.bytes / 4e6 + 2
        self.calls = count * max(1, round(1500 / guess / count))

    def graph(self, prepare):
        """A graph of self.calls calls; prepare(x, w, out) returns the function to capture."""
        runs = [prepare(*s) for s in self.sets]
        runs[0]()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for i in range(self.calls):
                runs[i % len(runs)]()
        graph.keep = runs
        return graph

    def cublas(self):
        if self.layout == "nt":
            return self.graph(lambda x, w, out: lambda: torch.mm(x, w.t(), out=out))
        return self.graph(lambda x, w, out: lambda: torch.mm(x, w, out=out))

    def today(self):
        import torch_cubin  # noqa: F401

        op = torch.ops.cubin.matmul.default
        if self.layout == "nt":
            return self.graph(lambda x, w, out: lambda: op(x, w.t()))
        return self.graph(lambda x, w, out: lambda: op(x, w))

    def check_last(self) -> None:
        x, w, out = self.sets[(self.calls - 1) % len(self.sets)]
        columns = torch.randint(self.n, (min(self.n, 512),), device="cuda")
        part = (w[columns] if self.layout == "nt" else w[:, columns].t()).double()
        reference = x.double() @ part.t()
        error = ((out[:, columns].double() - reference).norm() / reference.norm()).item()
        if not error < 5e-3:
            raise AssertionError(f"error {error}")


def replay_us(graph, calls: int, times: int) -> float:
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    for _ in range(times):
        graph.replay()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) * 1e3 / times / calls


def plan(m: int, n: int, k: int, layout: str) -> Config:
    """The library's config. Rows and splits, and so the order of K, depend on n and k only."""
    blocks_of_k = -(-k // 128)
    if layout == "nn":  # whole lines of 64 columns: partial lines would be read twice
        best = math.inf
        for splits_here, rows_here in itertools.product((1, 2, 3, 4), (64, 192)):
            blocks = -(-n // rows_here) * splits_here
            if splits_here > 1 and (blocks > MULTIPROCESSORS or splits_here * 2 > blocks_of_k):
                continue  # a cluster computes one tile
            rounds = -(-blocks // MULTIPROCESSORS)
            cost = rounds * rows_here / splits_here + 6 * splits_here
            if cost < best:
                best, rows, splits = cost, rows_here, splits_here
    else:
        waves = -(-n // (MULTIPROCESSORS * 112))
        rows, splits = -(-n // (MULTIPROCESSORS * waves * 8)) * 8, 1
        if rows < 48 and blocks_of_k >= 4:
            rows, splits = -(-n // (MULTIPROCESSORS // 2 * 8)) * 8, 2
        if rows < 48 and blocks_of_k >= 6:
            rows = 64
            most = max(1, MULTIPROCESSORS // -(-n // rows))
            splits = min(max(3, blocks_of_k // 8), 8, most)
        rows = max(rows, 48)
    tiles = -(-n // rows)
    kernel = Kernel("bf16", layout, -(-rows // 64), pad_of(m))
    half = stages_for(kernel, rows, splits, HALF)
    limit = HALF if half >= 4 and rows * k // splits * 2 < 1 << 20 else LIMIT
    grid = MULTIPROCESSORS if tiles > MULTIPROCESSORS and splits == 1 else 0
    return make_config(kernel, rows, splits, limit, grid=grid)


def candidates(m: int, n: int, k: int, layout: str) -> list[Config]:
    found = {}
    existing = set(kernels())
    for splits in (1, 2, 3, 4, 8):
        options = {64, 128, 192, 256}
        for waves in (1, 2, 3, 4):
            options.add(-(-n // (MULTIPROCESSORS * waves // splits * 8)) * 8)
        for rows, limit in itertools.product(options, (HALF, LIMIT)):
            kernel = Kernel("bf16", layout, -(-rows // 64), pad_of(m))
            count = -(-n // rows) * splits
            if kernel not in existing or rows < 8 or splits * 2 > -(-k // 128):
                continue
            most = 8 * MULTIPROCESSORS if splits == 1 else MULTIPROCESSORS * (1 + (limit == HALF))
            if count > most or (count < 90 and n > 3000):
                continue
            config = make_config(kernel, rows, splits, limit)
            if config.stages < 2:
                continue
            several = [config]
            if splits == 1 and count > MULTIPROCESSORS:
                several += [replace(config, grid=MULTIPROCESSORS)]
            found |= {c.text(): c for c in several}
    rule = plan(m, n, k, layout)
    found[rule.text()] = rule
    return list(found.values())


def measure(case: Case, contenders: dict, rounds: int, ms: float, settle: bool) -> dict:
    """Microseconds of each contender in each round, in random order."""
    names, times = list(contenders), {name: [] for name in contenders}
    counts = {}
    for name, graph in contenders.items():
        once = replay_us(graph, case.calls, 1) * case.calls / 1e3
        counts[name] = max(1, round(ms / once))
    for _ in range(rounds):
        random.shuffle(names)
        for name in names:
            if settle:
                replay_us(contenders[name], case.calls, counts[name])
            times[name].append(replay_us(contenders[name], case.calls, counts[name]))
    return times


def sweep(library, case: Case, report: list, top: int = 2) -> list[Config]:
    """The fastest configs, searched in two steps: tiles and splits, then prefetching."""
    tried = {}

    def run(configs: list[Config]) -> None:
        graphs = {}
        for config in configs:
            if config in tried:
                continue
            try:
                graphs[config] = case.graph(lambda *s, c=config: library.prepare(c, *s))
            except RuntimeError as error:
                report.append({"config": config.text(), "error": str(error)})
        for config, times in measure(case, graphs, 2, 2.0, settle=False).items():
            tried[config] = min(times)

    run(candidates(case.m, case.n, case.k, case.layout))
    best = sorted(tried, key=tried.get)[:2]
    run([replace(config, dependent=False) for config in best])
    order = sorted(tried, key=tried.get)
    report += [{"config": c.text(), "us": tried[c]} for c in order]
    return order[:top]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("cubin")
    parser.add_argument("--build", action="store_true", help="compile the cubin and stop")
    parser.add_argument("--json", metavar="FILE")
    parser.add_argument("--seconds", type=float, default=60, help="stop measuring after these")
    parser.add_argument("--tokens", default="1,16,64")
    parser.add_argument("--layouts", default="nt")
    parser.add_argument("--shapes", help="NxK,NxK,...")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--ms", type=float, default=12)
    parser.add_argument("--no-sweep", action="store_true", help="the plan's choice alone")
    parser.add_argument("--no-check", action="store_true")
    parser.add_argument("--today", action="store_true", help="torch.ops.cubin.matmul as well")
    options = parser.parse_args()
    if options.build:
        build(options.cubin)
        return
    begin = time.monotonic()
    setup()
    library = Library(options.cubin)
    gpu = torch.cuda.get_device_properties(0)
    print(gpu.name, torch.__version__, flush=True)
    results = {"gpu": gpu.name, "torch": torch.__version__, "rows": [], "sweeps": {}}
    if not options.no_check:
        failures = check_all(library)
        for failure in failures:
            print("FAILED", failure)
        if failures:
            sys.exit(1)
        check_batch_invariance(library)
        print(f"checks took {time.monotonic() - begin:.1f} s", flush=True)
    shapes = SHAPES
    if options.shapes:
        shapes = [tuple(map(int, s.split("x"))) for s in options.shapes.split(",")]
    tokens = [int(t) for t in options.tokens.split(",")]
    warm = torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16)
    for _ in range(100):
        torch.mm(warm, warm)
    torch.cuda.synchronize()
    lines = itertools.product(options.layouts.split(","), tokens, shapes)
    for layout, m, (n, k) in lines:
        if time.monotonic() - begin > options.seconds:
            print("out of time")
            break
        report = []
        try:
            case = Case(m, n, k, layout)
            rule = plan(m, n, k, layout)
            best = [] if options.no_sweep else sweep(library, case, report, top=1)
            best = [rule, *[c for c in best if c != rule]]
            contenders = {"cublas": case.cublas()}
            if options.today:
                contenders["today"] = case.today()
            for config in best:
                contenders[config.text()] = case.graph(lambda *s, c=config: library.prepare(c, *s))
            times = measure(case, contenders, options.rounds, options.ms, settle=True)
            for _, _, out in case.sets:
                out.fill_(float("nan"))
            contenders[best[0].text()].replay()
            torch.cuda.synchronize()
            case.check_last()
            ratios = {
                name: statistics.median(c / t for c, t in zip(times["cublas"], times[name]))
                for name in contenders
            }
            medians = {name: statistics.median(t) for name, t in times.items()}
            shape = {"layout": layout, "m": m, "n": n, "k": k}
            row = {**shape, "us": medians, "ratios": ratios}
            results["rows"].append(row)
            rate = {name: case.bytes / us / 1e3 for name, us in medians.items()}
            line = f"{layout} M{m:3} {n:6}x{k:<6}"
            for name in contenders:
                line += f" | {name} {medians[name]:.1f}us {rate[name]:.0f}GB/s {ratios[name]:.3f}"
            print(line, flush=True)
        except Exception as error:
            print(f"FAILED {layout} {m} {n} {k}: {type(error).__name__}: {error}", flush=True)
            if "launch" in str(error) or "CUDA" in str(error):
                break
        results["sweeps"][f"{layout} {m} {n} {k}"] = report
        del report
        case = contenders = None
        torch.cuda.empty_cache()
    for m in tokens:
        group = [max(v for c, v in r["ratios"].items() if c not in ("cublas", "today"))
                 for r in results["rows"] if r["m"] == m]  # fmt: skip
        if group:
            mean = math.exp(statistics.mean(math.log(g) for g in group))
            print(f"M={m}: geometric mean {mean:.3f}, worst {min(group):.3f}")
    if options.json:
        Path(options.json).write_text(json.dumps(results, indent=1))
    print(f"took {time.monotonic() - begin:.1f} s")


if __name__ == "__main__":
    main()
