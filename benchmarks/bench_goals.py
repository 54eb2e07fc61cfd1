"""torch.ops.cubin.matmul compared with torch.matmul on the shapes of the project's goals, by group.

    python benchmarks/bench_goals.py --lines --json result.json      # about two minutes
    python benchmarks/bench_goals.py --only odd,random
    python benchmarks/bench_goals.py --batch-invariant --lines       # what that mode costs

Each line is one product. Both contenders are CUDA graphs over random normal operands that together
exceed the L2 cache; they alternate as common.py describes. A ratio above 1 means that torch_cubin
is faster. The goal of a group is a geometric mean and a minimum ratio. `epilogues` compares
torch_cubin's linear, with a bias and an activation, with its own plain product. The random shapes
are drawn with a seed and have no line in the tuned table.

With --batch-invariant both contenders are torch_cubin, outside `torch_cubin.batch_invariant()` and
inside it. Products that both plan alike are not measured: they count as 1.
"""

from __future__ import annotations

import functools
import itertools
import random
import subprocess
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass

import common
import numerics
import torch
import torch.nn.functional as F
from goals import BATCH_INVARIANT
from goals import PRODUCTS as GOALS

import torch_cubin
from torch_cubin._native import library
from torch_cubin._tuning.measure import float32_math
from torch_cubin._tuning.products import Operands, Product

PROJECTIONS = [
    (4096, 4096), (6144, 4096), (28672, 4096), (4096, 14336), (10240, 8192), (57344, 8192),
    (8192, 28672),
]  # fmt: skip
ODD = [
    (4096, 50257, 4096), (4097, 4097, 4097), (8191, 8191, 8191), (4096, 4096, 4095),
    (1025, 1025, 1025), (2047, 4095, 1025), (1111, 2222, 3333), (3000, 5001, 1503),
    (7681, 6555, 1035), (4095, 4096, 4097),
]  # fmt: skip
ACTIVATIONS = {
    "gelu": F.gelu, "gelu_tanh": functools.partial(F.gelu, approximate="tanh"),
    "silu": F.silu, "relu": torch.relu,
}  # fmt: skip


@dataclass(frozen=True)
class Line:
    group: str
    product: str
    what: str  # the epilogue
    first_us: float
    cubin_us: float
    ratio: float
    low: float
    high: float
    tflops: float


def random_shapes(count: int = 200) -> Iterator[tuple[int, int, int, str]]:
    draw = random.Random(20)
    for number in range(count):
        sizes = [int(2 ** draw.uniform(5, 13)) for _ in range(3)]
        if number % 2 == 0:
            sizes = [max(8, size // 8 * 8) for size in sizes]
        yield (*sizes, draw.choice(["nt", "nn"]))


def products() -> Iterator[tuple[str, Product]]:
    def each(group: str, shapes, layouts=("nt", "nn"), dtypes=("bfloat16",), batch=1):
        for m, n, k in shapes:
            for dtype in dtypes:
                for layout in layouts:
                    yield group, Product.of_layout(m, n, k, layout, dtype, batch)

    both = ("bfloat16", "float16")
    yield from each("large", [(s, s, s) for s in (2048, 4096, 8192, 16384)], dtypes=both)
    for m in (1024, 4096, 8192):
        dtypes = both if m == 1024 else both[:1]
        yield from each("large", [(m, n, k) for n, k in PROJECTIONS], dtypes=dtypes)
    yield from each("middle", [(1024, 1024, 1024)], dtypes=both)
    for m in (128, 256, 512):
        yield from each("middle", [(m, n, k) for n, k in PROJECTIONS], dtypes=both)
    for m in (1, 16, 64):
        yield from each("few rows", [(m, n, k) for n, k in PROJECTIONS], dtypes=both)
    yield from each("odd", ODD)
    for m, n, k, layout in random_shapes():
        yield from each("random", [(m, n, k)], (layout,))
    some = [(2048, 2048, 2048), (4096, 4096, 4096), (1024, 4096, 14336), (8192, 1024, 4096)]
    yield from each("other", some, ("tn", "tt"))
    yield from each("other", some, ("nt", "nn"), ("tf32",))
    yield from each("other", [(512, 512, 512), (1024, 128, 1024), (2048, 64, 2048)], batch=16)
    epilogues = [(4096, 4096, 4096), (8192, 4096, 14336), (1024, 6144, 4096), (512, 28672, 4096)]
    yield from each("epilogues", epilogues, ("nt",))
    few, gradients = PROJECTIONS[:2], [(1024, 1024, 8192), (4096, 1024, 8192), (3072, 768, 16384)]
    for dtype in ("float32", "float64"):
        yield from each(dtype, [(s, s, s) for s in (2048, 4096, 8192)], dtypes=(dtype,))
        yield from each(dtype, [(64, n, k) for n, k in few], dtypes=(dtype,))
        yield from each(dtype, gradients, ("tn",), (dtype,))


def batch_invariant(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    with torch_cubin.batch_invariant():
        return torch.ops.cubin.matmul.default(a, b)


def is_planned_alike(product: Product) -> bool:
    """Inside batch_invariant() and outside."""
    asked = [{**asdict(product), "batch_invariant": inside} for inside in (False, True)]
    one, other = library.planned(asked)
    return one["chosen"] == other["chosen"] and one["microseconds"] == other["microseconds"]


def contenders(
    group: str, bias: torch.Tensor, switch: bool
) -> dict[str, tuple[Callable, Callable]]:
    """By epilogue: the baseline, and torch_cubin's call."""
    ours = torch.ops.cubin.matmul.default
    if switch:
        return {"": (ours, batch_invariant)}
    if group != "epilogues":
        return {"": (torch.matmul, ours)}
    linear = torch.ops.cubin.linear.default
    found = {"bias": (ours, lambda a, b: linear(a, b.mT, bias))}
    for name in ACTIVATIONS:
        found[f"bias, {name}"] = (
            ours,
            lambda a, b, name=name: linear(a, b.mT, bias, activation=name),
        )
    return found


def measure(
    group: str, product: Product, operands: Operands, budget_ms: float, switch: bool
) -> Iterator[Line]:
    if switch and is_planned_alike(product):
        yield Line(group, str(product), "the same plan", 0, 0, 1, 1, 1, 0)
        return
    sets = operands.sets(product)
    about_us = max(3.0, product.flops / 600e6, product.bytes / 4e6)
    calls = len(sets) * max(1, round(1500 / about_us / len(sets)))
    order = [sets[i % len(sets)] for i in range(calls)]
    bias = torch.randn(product.n, device="cuda", dtype=product.torch_dtype)
    for what, functions in contenders(group, bias, switch).items():
        with float32_math(product):
            graphs, outputs = [], []
            for function in functions:
                run = [lambda s=s, f=function: f(*s) for s in order]
                graph, last = common.graph_of(run, alive=min(len(sets), 4))
                graphs.append(graph)
                outputs.append(last)
        # Long products run at the power limit; clocks take some milliseconds to settle there.
        budget = budget_ms * (4 if about_us > 100 else 1)
        timed = common.alternate(graphs[0].replay, graphs[1].replay, calls, budget)
        torch.cuda.synchronize()
        if what:
            check_epilogue(what, outputs[1], bias, *order[-1])
        elif not (switch and product.math == "float64"):  # one chain errs by up to three times more
            check(outputs[1], outputs[0], *order[-1])
        yield Line(
            *(group, str(product), what, timed.first_us, timed.second_us),
            *(timed.ratio, timed.low, timed.high, product.flops / timed.second_us / 1e6),
        )


def check(out: torch.Tensor, own: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> None:
    """Checks up to 64 rows of a timed output by the rule of tests/numerics.py."""
    rows = torch.randint(a.shape[-2], (min(64, a.shape[-2]),), device="cuda")
    reference = numerics.reference_matmul(a[..., rows, :], b)
    numerics.check_close(out[..., rows, :], own[..., rows, :], reference, f"{tuple(a.shape)}")


def check_epilogue(
    what: str, out: torch.Tensor, bias: torch.Tensor, a: torch.Tensor, b: torch.Tensor
) -> None:
    """Checks some rows against float64: sums of normal data, rounded once."""
    rows = torch.randint(a.shape[0], (min(64, a.shape[0]),), device="cuda")
    expected = a[rows].double() @ b.double() + bias.double()
    if ", " in what:
        expected = ACTIVATIONS[what.split(", ")[1]](expected)
    torch.testing.assert_close(out[rows].double(), expected, rtol=2**-7, atol=2e-2)


def summary(lines: list[Line], switch: bool = False) -> list[dict]:
    found = []
    for group, goal in (BATCH_INVARIANT if switch else GOALS).items():
        members = [line for line in lines if line.group == group]
        if not members:
            continue
        worst = min(members, key=lambda line: line.ratio)
        mean = common.geometric_mean([line.ratio for line in members])
        under = sum(line.ratio < goal.worst for line in members)
        found.append(
            {
                "group": group,
                "lines": len(members),
                "mean": mean,
                "mean_goal": goal.mean,
                "worst": worst.ratio,
                "worst_goal": goal.worst,
                "under": under,
                "worst_line": f"{worst.product} {worst.what}".strip(),
            }
        )
    return found


def print_summary(lines: list[Line], markdown: bool, switch: bool = False) -> None:
    headers = ["group", "lines", "mean", "goal", "worst", "goal", "under it", "worst line"]
    rows = [
        [
            GOALS[s["group"]].title, str(s["lines"]), f"{s['mean']:.3f}", f"{s['mean_goal']:.2f}",
            f"{s['worst']:.3f}", f"{s['worst_goal']:.2f}", str(s["under"]), s["worst_line"],
        ]
        for s in summary(lines, switch)
    ]  # fmt: skip
    common.print_table(headers, rows, markdown)


def clocks() -> str:
    query = "clocks.sm,clocks.max.sm,power.draw,power.limit,temperature.gpu"
    command = ["nvidia-smi", f"--query-gpu={query}", "--format=csv,noheader"]
    return subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()


def write(path: str | None, lines: list[Line], switch: bool) -> None:
    found = summary(lines, switch)
    results = {"clocks": clocks(), "summary": found, "lines": [asdict(x) for x in lines]}
    common.write_json(path, results)


def main() -> None:
    parser = common.parser(__doc__, markdown=True)
    parser.add_argument("--only", metavar="GROUP,...", help=f"of {', '.join(GOALS)}")
    parser.add_argument("--budget", type=float, default=50, help="milliseconds a short line (50)")
    parser.add_argument("--lines", action="store_true", help="print every line")
    parser.add_argument("--batch-invariant", action="store_true", help="what that mode costs")
    options = parser.parse_args()
    common.require_gpu()
    switch = options.batch_invariant
    beside = "inside batch_invariant() beside outside" if switch else "beside torch.matmul"
    common.print_machine(f"torch.ops.cubin.matmul {beside}, by goal (GPU time, graphs)")
    torch.manual_seed(0)
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
    torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction = False
    only = options.only.split(",") if options.only else list(GOALS)
    operands = Operands(torch.device("cuda", torch.cuda.current_device()))
    lines, failures = [], []
    with torch.no_grad():
        for group, members in itertools.groupby(products(), key=lambda pair: pair[0]):
            if group not in only or (switch and group == "epilogues"):
                continue
            for _, product in members:
                try:
                    for line in measure(group, product, operands, options.budget, switch):
                        lines.append(line)
                        if options.lines:
                            label = f"{line.product} {line.what}".strip()
                            print(f"{line.ratio:6.3f} {line.cubin_us:9.1f} us  {group:9} {label}")
                    if torch.cuda.memory_reserved() > 2**35:
                        torch.cuda.empty_cache()  # free the memory of graphs of large products
                except Exception as error:  # keep the numbers of the other lines
                    failures.append(f"{group} {product}: {type(error).__name__}: {error}")
            write(options.json, lines, switch)  # a run that is ended early keeps whole groups
    print_summary(lines, options.markdown, switch)
    print(f"clocks and power at the end: {clocks()}")
    common.end_with(failures)


if __name__ == "__main__":
    main()
