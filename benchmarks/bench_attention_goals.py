"""torch.ops.cubin's attention over the cases of the project's goals, by group.

    python benchmarks/bench_attention_goals.py --lines --json result.json    # about four minutes
    python benchmarks/bench_attention_goals.py --only windows,paged
    python benchmarks/bench_attention_goals.py --only forward --fa3 LIBRARY

`forward` and `backward` are bf16, 16,384 tokens, heads * head_dim = 2,048, sequences of 512 to
16,384 rows, alternating with cuDNN (common.py): cuDNN's time over ours. `forward, best` is the time
of the faster of cuDNN and FlashAttention-3 over ours. LIBRARY registers sgl_kernel::fwd, which is
FlashAttention-3's forward: `sgl_kernel/flash_ops.abi3.so` of PyPI's sglang-kernel for the same
PyTorch (0.4.2 for 2.11). Without it, and for `backward, FA3`, the ratio to cuDNN is divided by the
speedup of FlashAttention-3 over cuDNN that was measured on an H200 with PyTorch's cuDNN of that
time (FA3_OVER_CUDNN), the forward's only where FlashAttention-3 was faster.
The other groups are fractions of our dense rate per visible score (bench_attention_options.py), of
a copy's bandwidth, or of our contiguous cache, or ratios to the faster of cuDNN and flash
(bench_attention.py, sections kvcache and paged). Groups of e4m3 are those of attention_e4m3.py;
`grouped heads`, `head dims between`, `short rows` and the groups after it are shapes of models
(attention_shapes.py). Outputs are checked. The goal of a group is a geometric mean and a minimum.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import asdict

import attention_e4m3
import attention_shapes
import bench_attention
import bench_attention_options
import common
import torch
from attention_shapes import Timed
from goals import ATTENTION as GOALS

MEASURED = {  # values of --only: the groups that each produces
    "forward": ("forward", "forward, best"),
    "backward": ("backward", "backward, FA3"),
    "options": ("windows, packed, GQA", "boolean masks"),
    "caches": ("decode, of a copy", "decode, one sequence", "paged"),
    "e4m3": attention_e4m3.GROUPS,
} | {
    group: tuple(f"{group}: {direction}" for direction in attention_shapes.DIRECTIONS)
    for group in attention_shapes.SHAPES
}
# (head_dim, causal): FlashAttention-3's rate over cuDNN's, per length of bench_attention.LENGTHS.
FA3_OVER_CUDNN = {
    (64, False): (316 / 375, 363 / 411, 465 / 426, 489 / 441, 534 / 445, 544 / 449),
    (64, True): (216 / 252, 285 / 320, 399 / 368, 455 / 401, 511 / 418, 529 / 433),
    (128, False): (476 / 480, 528 / 507, 618 / 576, 653 / 597, 681 / 609, 685 / 614),
    (128, True): (309 / 310, 454 / 382, 555 / 439, 627 / 479, 676 / 513, 696 / 533),
    (256, False): (494 / 480, 584 / 516, 676 / 601, 709 / 629, 739 / 652, 749 / 654),
    (256, True): (322 / 308, 463 / 409, 577 / 476, 673 / 521, 728 / 551, 753 / 565),
}
# The same for the backward, at 16,384 rows.
FA3_OVER_CUDNN_BACKWARD = {
    (64, False): 535 / 437,
    (64, True): 549 / 410,
    (128, False): 600 / 532,
    (128, True): 599 / 518,
    (256, False): 459 / 351,
    (256, True): 447 / 377,
}
# The lines of bench_attention_options.py that have a goal.
BANDED = ("packed", "window", "GQA")
MASKED = ("all visible", "as a mask", "documents", "padding", "random")


def measure_dense(
    backward: bool,
    head_dim: int,
    length: int,
    causal: bool,
    budget_ms: float,
    peer: Callable[..., torch.Tensor] | None = None,
) -> common.Ratio:
    """Measures the peer's time over ours: cuDNN's if none is given."""
    q, k, v, grad = bench_attention.tensors(head_dim, length, torch.bfloat16)
    functions = (peer or bench_attention.stock(bench_attention.CUDNN), bench_attention.cubin)
    runs: list[Callable[[], object]]
    if backward:
        runs = [bench_attention.gradients_of(f, q, k, v, grad, causal) for f in functions]
        bench_attention.check_gradients(runs[1](), runs[0](), 2e-2)
    else:
        runs = [lambda f=f: f(q, k, v, is_causal=causal) for f in functions]
        bench_attention.check_forward(runs[1](), runs[0](), q, k, v, causal)
    return common.alternate(runs[0], runs[1], 1, budget_ms)


def flash_attention_3(library: str) -> Callable[..., torch.Tensor]:
    """FlashAttention-3's forward, of (batch, heads, rows, head_dim) like the other contenders."""
    torch.ops.load_library(library)
    between = [None] * 20  # of value and the scale: caches, offsets, rotary embeddings, descales

    def run(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, is_causal: bool) -> torch.Tensor:
        out, *_ = torch.ops.sgl_kernel.fwd(
            *(x.transpose(1, 2) for x in (q, k, v)), *between, q.shape[-1] ** -0.5, is_causal,
            -1, -1, 0, 0.0, is_rotary_interleaved=False, scheduler_metadata=None, num_splits=1,
            pack_gqa=False, sm_margin=0, sinks=None,
        )  # fmt: skip
        return out.transpose(1, 2)

    return run


def dense(backward: bool, budget_ms: float, library: str | None = None) -> Iterator[Timed]:
    fa3 = flash_attention_3(library) if library else None
    lengths = list(enumerate(bench_attention.LENGTHS))
    for head_dim, causal, (i, length) in itertools.product((64, 128, 256), (False, True), lengths):
        timed = measure_dense(backward, head_dim, length, causal, budget_ms)
        values = {"backward" if backward else "forward": timed.ratio}
        if fa3:
            beside = measure_dense(False, head_dim, length, causal, budget_ms, fa3)
            values["forward, best"] = min(timed.ratio, beside.ratio)
        elif not backward:
            better = max(1.0, FA3_OVER_CUDNN[head_dim, causal][i])
            values["forward, best"] = timed.ratio / better
        elif length == bench_attention.LENGTHS[-1]:
            values["backward, FA3"] = timed.ratio / FA3_OVER_CUDNN_BACKWARD[head_dim, causal]
        case = f"d{head_dim} s{length}{' causal' if causal else ''}"
        rate = bench_attention.tflops(length, causal, backward, timed.second_us)
        for group, value in values.items():
            yield Timed(group, case, value, timed.second_us, rate)


def options() -> Iterator[Timed]:
    for section, head_dim in itertools.product(("packed", "bands", "masks"), (64, 128, 256)):
        for direction in ("forward", "backward"):
            # Masks that only the portable kernels serve have no goal and would take half the time.
            skipped = ("added", "random") if direction == "backward" else ("added",)
            for row in bench_attention_options.rows_of(section, head_dim, direction, skipped):
                named = [w for w in BANDED + MASKED if w in row.case]
                if row.share is None or not named:
                    continue
                group = "windows, packed, GQA" if named[0] in BANDED else "boolean masks"
                case = f"{direction} d{head_dim} {row.case}"
                yield Timed(group, case, row.share, row.microseconds, row.tflops)


def caches(budget_ms: float) -> Iterator[Timed]:
    copies = bench_attention.copy_rate()
    for batch, length in bench_attention.CACHES:
        row = bench_attention.measure_cache("kvcache", batch, length, 0, copies, budget_ms)
        if batch == 1:
            yield Timed("decode, one sequence", f"{row.case}, to {row.peer}", row.ratio,
                       row.cubin_us, row.cubin_rate)  # fmt: skip
        else:
            yield Timed(
                "decode, of a copy", row.case, row.copy or 0.0, row.cubin_us, row.cubin_rate
            )
    for batch, length, page_size in bench_attention.PAGED:
        row = bench_attention.measure_cache("paged", batch, length, page_size, copies, budget_ms)
        yield Timed("paged", row.case, row.ratio, row.cubin_us, row.cubin_rate)


def print_groups(lines: list[Timed], markdown: bool) -> None:
    table = []
    for group, goal in GOALS.items():
        values = [line for line in lines if line.group == group]
        if not values:
            continue
        worst = min(values, key=lambda line: line.value)
        reached = common.geometric_mean([line.value for line in values])
        table.append([
            group, str(len(values)), f"{reached:.3f}", f"{goal.mean:.2f}",
            f"{worst.value:.3f} ({worst.case})", f"{goal.worst:.2f}",
            "met" if reached >= goal.mean and worst.value >= goal.worst else "missed",
        ])  # fmt: skip
    headers = ["group", "lines", "mean", "goal", "worst", "goal", ""]
    common.print_table(headers, table, markdown)


def print_line(x: Timed) -> None:
    print(f"{x.group:28} {x.case:44} {x.value:6.3f} {x.microseconds:9.1f} us {x.rate:5.0f}",
          flush=True)  # fmt: skip


def main() -> None:
    parser = common.parser(__doc__, markdown=True)
    parser.add_argument("--only", metavar="PART,...", help=f"of {', '.join(MEASURED)}")
    parser.add_argument("--fa3", metavar="LIBRARY", help="runs FlashAttention-3 of this library")
    parser.add_argument("--budget", type=float, default=60, help="milliseconds a line (60)")
    parser.add_argument("--lines", action="store_true", help="print each line when it is measured")
    chosen = parser.parse_args()
    parts = chosen.only.split(",") if chosen.only else list(MEASURED)
    if not set(parts) <= set(MEASURED):
        parser.error(f"--only takes {', '.join(MEASURED)}")
    common.begin("torch.ops.cubin's attention beside the project's goals")
    torch.manual_seed(0)
    measures: dict[str, Callable[[], Iterator[Timed]]] = {
        "forward": lambda: dense(False, chosen.budget, chosen.fa3),
        "backward": lambda: dense(True, chosen.budget),
        "options": options,
        "caches": lambda: caches(chosen.budget),
        "e4m3": lambda: attention_e4m3.lines(chosen.budget),
    } | {
        group: lambda group=group: attention_shapes.lines(group, chosen.budget)
        for group in attention_shapes.SHAPES
    }
    lines: list[Timed] = []
    failures: list[str] = []
    with torch.no_grad():
        bench_attention.warm_up()
        for part in parts:
            try:
                for line in measures[part]():
                    lines.append(line)
                    if chosen.lines:
                        print_line(line)
            except Exception as error:  # keep the numbers of the other parts
                failures.append(f"{part}: {type(error).__name__}: {error}")
            torch.cuda.empty_cache()
    print_groups(lines, chosen.markdown)
    common.write_json(chosen.json, [asdict(line) for line in lines])
    common.end_with(failures)


if __name__ == "__main__":
    main()
