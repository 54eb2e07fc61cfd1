"""Speed of scaled_grouped_matmul, compared with PyTorch's and with a loop of products.

    python benchmarks/bench_grouped_fp8.py [--json FILE] [--only TEXT] [--deep-gemm FOLDER]
                                           [--layers | --weights]

The cases and the method are bench_grouped.py's. "torch" is torch._scaled_grouped_mm, which has
scales of rows alone, "loop" a torch._scaled_mm for each group, for which the host must know the
sizes. --deep-gemm: also DeepGEMM's products with scales of blocks, by the kernels that deep_gemm.py
built in FOLDER; its groups are padded to multiples of 128 rows, which is not counted.

--weights measures groups that divide K, as in gradients of weights, with scales of rows. Sizes of
groups are rounded up to multiples of 16: for others an assertion of torch's kernel fails.

--layers measures whole layers of experts of 8-bit floats and the same ones in bfloat16, both ours.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

import bench_grouped
import common
import deep_gemm
import moe_layers
import torch

import torch_cubin

op = torch.ops.cubin.scaled_grouped_matmul
E4M3, BF16 = torch.float8_e4m3fn, torch.bfloat16
ROW, BLOCK_1X128, BLOCK_128X128 = 1, 4, 5  # F.ScalingType's numbers
RECIPES = {"fast": (ROW, ROW), "exact": (ROW, ROW), "block": (BLOCK_1X128, BLOCK_128X128)}
Operands = tuple[torch.Tensor, ...]


def operands(recipe: str, rows: int, groups: int, n: int, k: int) -> Operands:
    """a, b (groups, K, N), and their scales."""

    def scales(*shape: int) -> torch.Tensor:
        return torch.rand(shape, device="cuda") + 0.5

    a = torch.randn(rows, k, device="cuda").to(E4M3)
    b = torch.empty(groups, n, k, device="cuda", dtype=E4M3)
    for own in b:
        own.copy_(torch.randn(n, k, device="cuda"))
    if recipe == "block":
        blocks = -(-k // 128)
        return a, b.mT, scales(blocks, rows).t(), scales(groups, -(-n // 128), blocks).mT
    return a, b.mT, scales(rows), scales(groups, n)


def contenders(recipe: str, sizes: list[int], offs: torch.Tensor) -> dict[str, Callable[..., Any]]:
    fast, (of_a, of_b) = recipe == "fast", RECIPES[recipe]

    def loop(a: torch.Tensor, b: torch.Tensor, sa: torch.Tensor, sb: torch.Tensor) -> torch.Tensor:
        parts = zip(a.split(sizes), b, sa.split(sizes), sb, strict=True)
        outs = [
            torch._scaled_mm(x, y, s[:, None], t[None], out_dtype=BF16, use_fast_accum=fast)
            for x, y, s, t in parts
            if len(x)
        ]
        return outs[0]

    found: dict[str, Callable[..., Any]] = {
        "ours": lambda a, b, sa, sb: op(a, b, sa, of_a, sb, of_b, offs=offs, use_fast_accum=fast)
    }
    if recipe != "block":
        found["torch"] = lambda a, b, sa, sb: torch._scaled_grouped_mm(
            a, b, sa, sb, offs=offs, out_dtype=BF16, use_fast_accum=fast
        )
        if all(size % 16 == 0 for size in sizes):  # others' scales are at addresses that it refuses
            found["loop"] = loop
    return found


def graphs(calls: Mapping[str, Callable[..., Any]], sets: list[Operands]) -> dict[str, Any]:
    return {
        who: common.graph_of([functools.partial(call, *own) for own in sets])[0].replay
        for who, call in calls.items()
    }


def measure(case: tuple[str, list[int], int, int, float], peer: deep_gemm.Peer | None) -> list[Any]:
    name, sizes, n, k, *_ = case
    rows, groups = sum(sizes), len(sizes)
    offs = torch.tensor(sizes, device="cuda").cumsum(0).to(torch.int32)
    size = rows * (k + 2 * n) + groups * n * k
    count = max(1, min(4, int(bench_grouped.ROTATED_BYTES / size)))
    runs: dict[str, Callable[[], Any]] = {}
    sets: dict[str, list[Operands]] = {}  # they live as long as the graphs
    for recipe in RECIPES:
        sets[recipe] = [operands(recipe, rows, groups, n, k) for _ in range(count)]
        own = graphs(contenders(recipe, sizes, offs), sets[recipe])
        runs |= {f"{recipe} {who}": run for who, run in own.items()}
    if peer is not None:
        of_rows = deep_gemm.groups_of_rows(sizes)
        sets[deep_gemm.WHO] = [
            (deep_gemm.padded(sizes, a), b.mT,
             deep_gemm.scales_of_rows(deep_gemm.padded(sizes, sa.contiguous())),
             sb.mT.contiguous())
            for a, b, sa, sb in sets["block"]
        ]  # fmt: skip

        def padded(a: torch.Tensor, b: torch.Tensor, *scales: torch.Tensor) -> torch.Tensor:
            return peer.product(a, b, scales, of_rows)

        own = graphs({deep_gemm.WHO: padded}, sets[deep_gemm.WHO])
        runs |= {f"block {who}": run for who, run in own.items()}
    times = common.interleaved(runs, block_ms=8, rounds=5, settle_ms=8)
    times = {who: time / count for who, time in times.items()}
    results = []
    for recipe in RECIPES:
        us = {who.split()[1]: time for who, time in times.items() if who.startswith(recipe)}
        label = f"{recipe} {name}: N {n}, K {k}"
        moved = rows * (k + 2 * n) + sum(size > 0 for size in sizes) * n * k
        results.append({"case": label, "us": us, "bytes": moved,
                        "flops": 2.0 * rows * n * k})  # fmt: skip
    return results


def measure_weights(case: tuple[str, list[int], int, int, float]) -> list[Any]:
    name, sizes, n, k, *_ = case
    sizes = [-(-size // 16) * 16 for size in sizes]
    rows, groups = sum(sizes), len(sizes)
    offs = torch.tensor(sizes, device="cuda").cumsum(0).to(torch.int32)
    a, b = (torch.randn(size, rows, device="cuda").to(E4M3) for size in (n, k))
    sa, sb = (torch.rand(groups, size, device="cuda") + 0.5 for size in (n, k))
    runs: dict[str, Callable[[], Any]] = {}
    for fast in (True, False):
        recipe = "fast" if fast else "exact"

        def ours(fast: bool = fast) -> Any:
            return op(a, b.t(), sa, ROW, sb, ROW, offs=offs, use_fast_accum=fast)

        def torchs(fast: bool = fast) -> Any:
            return torch._scaled_grouped_mm(
                *(a, b.t(), sa.view(-1), sb.view(-1)), offs=offs, out_dtype=BF16,
                use_fast_accum=fast,
            )  # fmt: skip

        calls: dict[str, Callable[..., Any]] = {"ours": ours, "torch": torchs}
        runs |= {f"{recipe} {who}": run for who, run in graphs(calls, [()]).items()}
    times = common.interleaved(runs, block_ms=8, rounds=5, settle_ms=8)
    moved = rows * (n + k) + 2 * groups * n * k
    return [
        {"case": f"{recipe} dW {name}: {n} x {k}", "bytes": moved, "flops": 2.0 * rows * n * k,
         "us": {who.split()[1]: us for who, us in times.items() if who.startswith(recipe)}}
        for recipe in ("fast", "exact")
    ]  # fmt: skip


def measure_layer(sizes: tuple[Any, ...], tokens: int) -> Any:
    name, experts, k, hidden, inner = sizes
    x, ids, weights = moe_layers.routed(tokens, experts, k, hidden)
    shapes = {"w13": (experts, 2 * inner, hidden), "w2": (experts, hidden, inner)}
    wide: dict[str, Any] = {
        name: torch.empty(shape, device="cuda", dtype=BF16) for name, shape in shapes.items()
    }
    narrow: dict[str, Any] = {}
    for name_of, weight in wide.items():
        parts = []
        for own in weight:
            own.normal_(std=own.shape[-1] ** -0.5)
            parts.append(torch.ops.cubin.quantize(own, BLOCK_128X128))
        narrow[name_of] = torch.stack([data for data, _ in parts])
        narrow[f"{name_of}_scale"] = torch.stack([scale.t() for _, scale in parts])
    with torch.no_grad():
        calls = {
            "ours": functools.partial(torch_cubin.moe, **narrow),
            "bfloat16": functools.partial(torch_cubin.moe, **wide),
        }
        times = common.interleaved(graphs(calls, [(x, ids, weights)]), block_ms=20, rounds=3)
    return {"case": f"{name}, 8-bit floats, {tokens} tokens", "us": times,
            "bytes": len(ids.unique()) * 3 * hidden * inner + 4 * tokens * hidden,
            "flops": 6.0 * tokens * k * hidden * inner}  # fmt: skip


def main() -> None:
    parser = common.parser(__doc__)
    parser.add_argument("--only", default="")
    parser.add_argument("--deep-gemm", type=deep_gemm.Peer, metavar="FOLDER")
    parser.add_argument("--layers", action="store_true")
    parser.add_argument("--weights", action="store_true", help="groups that divide K")
    arguments = parser.parse_args()
    common.begin("Groups of 8-bit floats, microseconds a call")
    results: list[Any] = []
    ratios: dict[str, list[float]] = {}

    def add(found: list[Any]) -> None:
        for result in found:
            ratios.setdefault(result["case"].split()[0], []).append(bench_grouped.show(result))
            results.append(result)
        common.write_json(arguments.json, results)  # the next case may be ended
        torch.cuda.empty_cache()

    if arguments.layers:
        for sizes in moe_layers.MODELS[:1]:
            for tokens in moe_layers.TOKENS:
                add([measure_layer(sizes, tokens)])
    elif arguments.weights:
        for case in bench_grouped.CASES:
            if arguments.only in case[0]:
                add(measure_weights(case))
    else:
        for case in bench_grouped.CASES:
            if arguments.only in case[0]:
                add(measure(case, arguments.deep_gemm))
    for recipe, own in ratios.items():
        print(f"{recipe}: mean {common.geometric_mean(own):.3f}, least {min(own):.3f} of the best")


if __name__ == "__main__":
    main()
