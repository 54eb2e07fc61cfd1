"""Speed of the kernels of a folder compared with torch.matmul (cuBLAS), several configs of each.

    python benchmarks/sm90/bench.py FOLDER [--plan large|middle|gradients|training] [--zeros]
        [--seconds 60] [--json FILE]

One process. Every contender is a CUDA graph over inputs that rotate through at least 240 MB of
random normal data. Each round draws the contenders' order at random, lets each settle, then
measures it; the ratio is the median over the rounds of torch's time over ours. The last output of
every contender is compared with torch's.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import statistics
import subprocess
import time
from dataclasses import replace
from pathlib import Path

import torch
from harness import TYPES, How, Launch, Workspace, load


def plans(which: str):
    """Yields (shape, layout, [(tile, how)])."""
    big, wide = How("n", stream=True, pdl=True), How("m", blocks=128, pdl=True)
    if which == "large":
        for size in (2048, 4096, 8192, 16384):
            configs = [("256x192", big), ("128x256", wide), ("128x256", replace(wide, pdl=False))]
            if size == 2048:
                configs += [("128x256", How(blocks=128, pdl=True))]
            if size == 8192:
                configs += [
                    ("256x192", replace(big, **change))
                    for change in (
                        {"serpentine": False},
                        {"skew": False},
                        {"group": 4},
                        {"group": 16},
                        {"group_n": True},
                        {"stream": False},
                    )
                ]
            yield (size, size, size), "nt", configs
        configs = [("256x192", big), ("128x256", wide), ("128x256", How(pdl=True)),
                ("256x128", How("n", pdl=True, blocks=128))]  # fmt: skip
        for shape in ((8192, 4096, 4096), (4096, 4096, 14336), (1024, 4096, 4096),
                      (1024, 28672, 4096), (1024, 4096, 14336)):  # fmt: skip
            yield shape, "nt", configs
        for layout in ("nn", "tn", "tt"):
            yield (4096, 4096, 4096), layout, [("256x192", big), ("128x256", wide)]
    if which == "gradients":  # weight gradients of examples/train_transformer.py --size large
        configs = [("128x256", How(pdl=True)), ("128x256", How("m", pdl=True)),
                ("256x128", How("n", pdl=True)), ("192x192", How("n", pdl=True)),
                ("256x192", replace(big, cluster="m"))]  # fmt: skip
        for m, n in ((6144, 2048), (2048, 2048), (8192, 2048), (2048, 8192)):
            yield (m, n, 16384), "tn", configs
    if which == "training":  # most products of such a training step with 16,384 tokens
        for layout, shapes in (
            ("tn", ((6144, 2048, 16384), (2048, 2048, 16384), (8192, 2048, 16384))),
            ("nn", ((16384, 2048, 6144), (16384, 2048, 8192), (16384, 8192, 2048))),
            ("nt", ((16384, 6144, 2048), (16384, 2048, 8192))),
        ):
            configs = [
                (tile, How(cluster, pdl=True, stream=tile == "256x192"))
                for tile in ("128x256", "256x128", "192x192", "256x192")
                for cluster in ("", "m", "n")
            ]
            for shape in shapes:
                yield shape, layout, configs
    if which == "middle":
        first = [("64x128", How(pdl=True)), ("64x128", How()), ("128x128", How("k", pdl=True)),
                 ("128x64", How(pdl=True)), ("64x64", How(pdl=True))]  # fmt: skip
        yield (1024, 1024, 1024), "nt", first
        configs = [
            ("128x64", How("k", pdl=True)), ("128x64", How(pdl=True)),
            ("128x128", How("k", pdl=True)), ("128x128", How("m", pdl=True)),
            ("128x224", How(pdl=True)), ("128x224", How("m", pdl=True)),
            ("128x160", How(pdl=True)), ("128x256", How(pdl=True, stream=True)),
            ("64x128", How(pdl=True)), ("256x128", How(pdl=True)), ("128x192", How(pdl=True)),
        ]  # fmt: skip
        for m in (128, 256, 512):
            for n, k in ((4096, 4096), (28672, 4096), (4096, 14336), (6144, 4096)):
                yield (m, n, k), "nt", configs


def sets_of(kind: str, layout: str, shape: tuple[int, int, int], spread: float):
    m, n, k = shape
    dtype = TYPES[kind][1]
    size = (m * k + k * n) * dtype.itemsize
    count = max(2, min(64, math.ceil(240e6 / size)))
    sets = []
    for _ in range(count):
        a = torch.randn((k, m) if layout[0] == "t" else (m, k), device="cuda").to(dtype) * spread
        b = torch.randn((n, k) if layout[1] == "t" else (k, n), device="cuda").to(dtype) * spread
        outs = torch.empty(m, n, device="cuda", dtype=dtype) if count <= 64 else None
        sets.append((a.mT if layout[0] == "t" else a, b.mT if layout[1] == "t" else b, outs))
    return sets


def graph(calls) -> torch.cuda.CUDAGraph:
    calls[0]()
    torch.cuda.synchronize()
    g = torch.cuda.CUDAGraph()
    with torch.cuda.graph(g):
        for call in calls:
            call()
    return g


def milliseconds(g, count: int) -> float:
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    for _ in range(count):
        g.replay()
    end.record()
    end.synchronize()
    return start.elapsed_time(end)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    plan_names = ("large", "middle", "gradients", "training")
    parser.add_argument("--plan", default="large", choices=plan_names)
    parser.add_argument("--type", default="bf16")
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--settle-ms", type=float, default=60)
    parser.add_argument("--measure-ms", type=float, default=60)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--zeros", action="store_true", help="data that takes little power")
    parser.add_argument("--json")
    arguments = parser.parse_args()
    begin = time.time()
    kernels = load(arguments.folder)
    workspace = Workspace()
    workspace.need(2 * 132 * 256 * 192)
    random.seed(1)
    torch.manual_seed(1)
    torch.backends.cuda.matmul.allow_tf32 = True
    results = []
    plan_list = list(plans(arguments.plan))
    for index, (shape, layout, configs) in enumerate(plan_list):
        if time.time() - begin > arguments.seconds:
            print(f"out of time: {len(plan_list) - index} of {len(plan_list)} shapes left")
            break
        m, n, k = shape
        sets = sets_of(arguments.type, layout, shape, 0 if arguments.zeros else 1)
        once_us = max(2.0, 2 * m * n * k / 650e6)
        repeats = len(sets) * max(1, round(4000 / once_us / len(sets)))
        own = torch.empty_like(sets[0][2])
        labels, graphs = ["cublas"], []
        rotation = [sets[i % len(sets)] for i in range(repeats)]
        graphs.append(graph([lambda s=s: torch.matmul(s[0], s[1], out=s[2]) for s in rotation]))
        graphs[0].replay()
        own.copy_(rotation[-1][2])
        for tile, how in configs:
            name = f"{arguments.type}_{layout}_{tile}"
            if name not in kernels:
                continue
            try:
                launches = [Launch(kernels[name], how, *s, workspace) for s in sets]
            except AssertionError:
                continue
            for s in sets:
                s[2].fill_(float("nan"))
            g = graph([launches[i % len(sets)] for i in range(repeats)])
            g.replay()
            torch.cuda.synchronize()
            out = rotation[-1][2]
            difference = (out.float() - own.float()).abs().max().item() / math.sqrt(k)
            verdict = "" if difference < 0.05 else f" DIFFERS {difference:.3g}"
            labels.append(f"{tile} {how}{verdict}")
            graphs.append(g)
        once = [min(milliseconds(g, 1) for _ in range(2)) for g in graphs]
        times: list[list[float]] = [[] for _ in graphs]
        for _ in range(arguments.rounds):
            order = list(range(len(graphs)))
            random.shuffle(order)
            for i in order:
                for _ in range(max(1, round(arguments.settle_ms / once[i]))):
                    graphs[i].replay()
                count = max(1, round(arguments.measure_ms / once[i]))
                times[i].append(milliseconds(graphs[i], count) / count / repeats * 1e3)
        flops = 2 * m * n * k
        base = statistics.median(times[0])
        row = {"shape": shape, "layout": layout, "cublas_us": base, "configs": {}}
        parts = [f"{m},{n},{k} {layout}: cublas {base:.1f} us {flops / base / 1e6:.0f} TF"]
        for label, own_times in list(zip(labels, times, strict=True))[1:]:
            ratios = [c / o for c, o in zip(times[0], own_times, strict=True)]
            us = statistics.median(own_times)
            row["configs"][label] = {
                "us": us, "tflops": flops / us / 1e6, "ratio": statistics.median(ratios),
                "low": min(ratios), "high": max(ratios),
            }  # fmt: skip
            spread = f"{statistics.median(ratios):.3f} ({min(ratios):.3f}-{max(ratios):.3f})"
            parts.append(f"   {spread} {flops / us / 1e6:.0f} TF {label}")
        print("\n".join(parts), flush=True)
        results.append(row)
        del graphs, sets, rotation, own
    query = ["nvidia-smi", "--query-gpu=name,driver_version,clocks.sm,power.draw,temperature.gpu",
             "--format=csv,noheader"]  # fmt: skip
    print(subprocess.run(query, capture_output=True, text=True, check=False).stdout.strip())
    if arguments.json:
        Path(arguments.json).write_text(json.dumps(results, indent=1))
    print(f"{time.time() - begin:.0f} s")


if __name__ == "__main__":
    main()
