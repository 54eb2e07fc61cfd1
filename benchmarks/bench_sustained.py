"""Long products at the power limit, beside the short rounds that the planner's costs come from.

    python benchmarks/bench_sustained.py                          # Llama's of 8,192 and 16,384 rows
    python benchmarks/bench_sustained.py --shapes 16384x2048x8192:nt --configs 12 --json FILE

In short rounds all contenders find the same clock. A model runs by itself: its kernels take a
quarter of a second and more, in which the clock falls until the card takes no more than its limit,
and a kernel that takes more energy for a product is slower. So here each contender, torch.matmul
first and last, repeats the product for as long by itself, and is timed after the clock has settled.
"""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Iterator
from dataclasses import asdict, dataclass

import common
import torch

from torch_cubin._native import library
from torch_cubin._tuning import measure, sweep
from torch_cubin._tuning.products import Operands, Product

SHAPES = (
    "16384x8192x2048:nt,16384x2048x8192:nt,16384x2048x2048:nt,8192x8192x2048:nn,8192x2048x8192:nn,"
    "8192x2048x8192:tn,2048x8192x8192:tn,2048x2048x8192:tn"
)
SETTLE_SECONDS, SECONDS, BLOCKS = 0.06, 0.2, 10
NEAR = 1.35  # times the best config's predicted time
SHORT_ROUNDS = measure.Effort(settle_ms=5, rounds=5)


@dataclass
class Line:
    product: str
    contender: str
    sustained_us: float
    sustained: float  # torch.matmul's time over this one's
    short_us: float
    short: float


def names_of(plan: dict, most: int) -> list[str]:
    """The planner's choice, and the best order of tiles of each kernel that is near."""

    def kernel(name: str) -> str:
        return " ".join(word for word in name.split() if not word.startswith("share_"))

    configs = sorted(plan["configs"], key=lambda config: config["microseconds"])
    found = {kernel(plan["chosen"]): plan["chosen"]}
    for config in configs:
        if config["microseconds"] <= NEAR * configs[0]["microseconds"]:
            found.setdefault(kernel(config["name"]), config["name"])
    return list(found.values())[:most]


def sustained(graph: torch.cuda.CUDAGraph) -> float:
    """Microseconds of a replay: the median of blocks."""
    graph.replay()
    seconds = common.milliseconds(graph.replay, 2) / 2 / 1e3
    for _ in range(round(SETTLE_SECONDS / seconds)):
        graph.replay()
    count = max(1, round(SECONDS / seconds / BLOCKS))
    events = [torch.cuda.Event(enable_timing=True) for _ in range(BLOCKS + 1)]
    events[0].record()
    for event in events[1:]:
        for _ in range(count):
            graph.replay()
        event.record()
    events[-1].synchronize()
    times = [begin.elapsed_time(end) for begin, end in itertools.pairwise(events)]
    return statistics.median(times) / count * 1e3


def measured(product: Product, operands: Operands, most: int) -> Iterator[Line]:
    with measure.watching():
        sets = operands.sets(product)
        torch.ops.cubin.matmul(*sets[0])
        plan = measure.plan_of(product)
        about = min(config["microseconds"] for config in plan["configs"])
        repeats = len(sets) * max(1, round(4000 / about / len(sets)))
        pool = torch.cuda.graph_pool_handle()
        graphs = {measure.TORCH: measure._graph(torch.matmul, sets, repeats, pool)[0]}
        for name in names_of(plan, most):
            library.force_config(name)
            function = torch.ops.cubin.matmul.default
            graphs[name] = measure._graph(function, sets, repeats, pool)[0]
            library.force_config("")
    rounds = measure.rounds_of(graphs, repeats, SHORT_ROUNDS, seed=0)
    short = {name: statistics.median(times) for name, times in rounds.items()}
    times = {name: sustained(graph) / repeats for name, graph in graphs.items()}
    again = sustained(graphs[measure.TORCH]) / repeats
    reference = (times[measure.TORCH] + again) / 2
    for name, us in times.items():
        ratios = reference / us, short[measure.TORCH] / short[name]
        yield Line(str(product), name, us, ratios[0], short[name], ratios[1])


def main() -> None:
    parser = common.parser(__doc__, markdown=True)
    parser.add_argument("--shapes", default=SHAPES, metavar="MxNxK:LAYOUT,...")
    parser.add_argument("--configs", type=int, default=7, help="most of a product (7)")
    options = parser.parse_args()
    common.begin("products at the power limit and in short rounds (GPU time, graphs)")
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
    operands = Operands(torch.device("cuda", torch.cuda.current_device()))
    lines: list[Line] = []
    for text in options.shapes.split(","):
        shape, _, layout = text.partition(":")
        product = Product.of_layout(*sweep.shape_of(shape), layout or "nt", "bfloat16")
        found = list(measured(product, operands, options.configs))
        rows = [
            [
                *(line.product, line.contender, f"{line.sustained_us:.1f}"),
                *(f"{line.sustained:.3f}", f"{line.short_us:.1f}", f"{line.short:.3f}"),
            ]
            for line in found
        ]
        headers = ["product", "", "us, sustained", "of torch", "us, short", "of torch"]
        common.print_table(headers, rows, options.markdown)
        lines += found
        common.write_json(options.json, [asdict(line) for line in lines])


if __name__ == "__main__":
    main()
