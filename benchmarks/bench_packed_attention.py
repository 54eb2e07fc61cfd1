"""Attention of packed sequences, as PyTorch calls it, with and without install().

    python benchmarks/bench_packed_attention.py [--json FILE] [--markdown]    # under 20 seconds

`aten::_flash_attention_forward` and its backward, which `varlen_attn` and nested tensors call: the
time of PyTorch's kernels over that under `install(policy="all")`, in CUDA graphs, interleaved.
"fastest" says whether that policy serves the call. Outputs and gradients are compared.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import asdict, dataclass

import common
import torch
from torch import Tensor

import torch_cubin

aten = torch.ops.aten
LIMIT = 2e-2  # of the norm of PyTorch's result


@dataclass(frozen=True)
class Case:
    name: str
    lengths: tuple[int, ...]
    heads: int
    kv_heads: int
    head_dim: int
    causal: bool = False
    queries: int = 0  # of each sequence; 0: as many as keys

    def ends(self, of_queries: bool) -> tuple[Tensor, int]:
        """The sequences' offsets, and the longest of them."""
        lengths = [self.queries if of_queries and self.queries else n for n in self.lengths]
        ends = list(itertools.accumulate(lengths, initial=0))
        return torch.tensor(ends, dtype=torch.int32, device="cuda"), max(lengths)


MIXED = (4096, 37, 1000, 2048, 300, 700, 3000)
CASES = (
    Case("16 x 512", (512,) * 16, 16, 16, 64),
    Case("7 of 37 to 4096, causal", MIXED, 32, 8, 128, causal=True),
    Case("64 of 32 to 158", tuple(range(32, 160, 2)), 12, 12, 64),
    Case("4 x 2048, causal", (2048,) * 4, 32, 32, 128, causal=True),
    Case("1 row of 16 x 512", (512,) * 16, 16, 16, 64, queries=1),
    Case("8 x 200", (200,) * 8, 12, 12, 64),
    Case("2 x 32", (32,) * 2, 12, 12, 64),
)


@dataclass(frozen=True)
class Row:
    case: str
    keys: int
    direction: str
    torch_us: float
    cubin_us: float
    ratio: float
    fastest: bool


def calls_of(case: Case) -> dict[str, Callable[[], tuple[Tensor, ...]]]:
    """The forward, and the backward of its results."""
    (ends_q, longest_q), (ends_k, longest_k) = case.ends(True), case.ends(False)
    shapes = [(ends_q[-1].item(), case.heads)] + [(ends_k[-1].item(), case.kv_heads)] * 2
    tensors = [
        torch.randn(*shape, case.head_dim, device="cuda", dtype=torch.bfloat16) for shape in shapes
    ]
    lengths = (ends_q, ends_k, longest_q, longest_k)
    grad = torch.randn_like(tensors[0])

    def forward() -> tuple[Tensor, ...]:
        return aten._flash_attention_forward(*tensors, *lengths, 0.0, case.causal, False)

    out, sums, seed, unused, _ = forward()

    def backward() -> tuple[Tensor, ...]:
        return aten._flash_attention_backward(
            grad, *tensors, out, sums, *lengths, 0.0, case.causal, seed, unused
        )

    return {"forward": lambda: forward()[:1], "backward": backward}


def rows_of(case: Case, budget_ms: float) -> list[Row]:
    rows = []
    for direction, call in calls_of(case).items():
        graphs, results = {}, {}
        graphs["torch"], results["torch"] = common.graph_of([call])
        with torch_cubin.install(policy="all"):
            graphs["cubin"], results["cubin"] = common.graph_of([call])
        with torch_cubin.install(policy="fastest"):
            torch_cubin.report(reset=True)
            call()
            fastest = bool(torch_cubin.report().served)
        for graph in graphs.values():
            graph.replay()
        for own, other in zip(results["cubin"], results["torch"], strict=True):
            difference = (own.float() - other.float()).norm() / other.float().norm()
            if not difference < LIMIT:
                raise AssertionError(f"{case.name}, {direction}: {difference:.3g} of the norm")
        runs = {name: graph.replay for name, graph in graphs.items()}
        us = common.interleaved(runs, budget_ms, settle_ms=budget_ms)
        ratio = us["torch"] / us["cubin"]
        keys = sum(case.lengths)
        rows.append(Row(case.name, keys, direction, us["torch"], us["cubin"], ratio, fastest))
    return rows


def main() -> None:
    parser = common.parser(__doc__, markdown=True)
    parser.add_argument("--budget", type=float, default=4, help="milliseconds of a block (4)")
    chosen = parser.parse_args()
    common.begin("aten's attention of packed sequences with install()")
    torch.manual_seed(0)
    with torch.no_grad():
        rows = [row for case in CASES for row in rows_of(case, chosen.budget)]
    table = [
        [r.case, str(r.keys), r.direction, f"{r.torch_us:.1f}", f"{r.cubin_us:.1f}",
         f"{r.ratio:.2f}", "yes" if r.fastest else "no"]
        for r in rows
    ]  # fmt: skip
    headers = ["sequences", "keys", "direction", "torch us", "cubin us", "ratio", "fastest"]
    common.print_table(headers, table, chosen.markdown)
    common.write_json(chosen.json, [asdict(row) for row in rows])


if __name__ == "__main__":
    main()
