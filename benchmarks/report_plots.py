"""The plots of docs/, drawn from the same results as the tables.

The input of a plot is plain data (`data`), whose digest is stored in the PNG. So a test can check
whether a plot is up to date without drawing it; pixels differ between machines.
"""

from __future__ import annotations

import functools
import hashlib
import json
import random
import statistics
import struct
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import goals
import report_results
import report_sections

KEYWORD = "Data"  # of the PNG's text chunk with the digest
COLORS = {"H200": "tab:blue", "H100": "tab:orange"}
HEAD_DIMS = (64, 128, 256)


def matmul_data() -> dict[str, Any]:
    """Ratios by GPU and group."""
    found = report_results.measured("goals", report_results.products)
    return {
        gpu: {group: [line.value for line in run.lines] for group, run in groups.items()}
        for gpu, groups in found.items()
    }


def attention_data() -> dict[str, Any]:
    """(rows, our TFLOP/s, cuDNN's) of the first GPU by direction, head_dim and mask."""
    found = report_results.measured("attention_goals", report_results.listed)
    gpu, groups = next(iter(found.items()))
    data: dict[str, Any] = {}
    for direction in ("forward", "backward"):
        for line in groups[direction].lines:
            head_dim, length, *causal = line.case.split()
            mask = causal[0] if causal else "full"
            series = data.setdefault(f"{direction} {head_dim.removeprefix('d')} {mask}", [])
            assert line.rate is not None, "a line of attention has a rate"
            series.append([int(length.removeprefix("s")), line.rate, line.rate / line.value])
    return {"gpu": gpu, "series": data}


def models_data() -> dict[str, Any]:
    """Ratios by case and mode of the first GPU."""
    found = report_results.measured("whole_models", report_results.whole_models)
    gpu, groups = next(iter(found.items()))
    cases: dict[str, dict[str, float]] = {}
    for group, run in groups.items():
        mode = group.partition(",")[0]
        for line in run.lines:
            cases.setdefault(line.case, {})[mode] = line.value
    return {"gpu": gpu, "cases": cases}


def draw_models(data: dict[str, Any]) -> Any:
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(9, 4.6), layout="constrained")
    colors = {"eager": "tab:blue", "compiled": "tab:orange", "CUDA graph": "tab:green"}
    cases = list(data["cases"])
    for place, case in enumerate(cases):
        modes = data["cases"][case]
        for number, (mode, ratio) in enumerate(modes.items()):
            at = place + (number - (len(modes) - 1) / 2) * 0.25
            axes.barh(at, ratio - 1, 0.22, left=1, color=colors[mode])
            axes.text(max(ratio, 1), at, f" {ratio:.2f}", va="center", fontsize=7)
    for mode, color in colors.items():
        axes.barh(0, 0, left=1, color=color, label=mode)
    axes.axvline(1, color="gray", linewidth=1)
    axes.set_yticks(range(len(cases)), cases, fontsize=8)
    axes.invert_yaxis()
    axes.set_xlabel("speed over stock PyTorch in the same mode", fontsize=9)
    axes.set_title(f"Whole models under torch_cubin.install(), one {data['gpu']}", fontsize=10)
    axes.legend(fontsize=8)
    return figure


def symmetric_data() -> dict[str, Any]:
    """(rows, ratio) of squares of bfloat16, by GPU and product."""
    data: dict[str, Any] = {}
    for gpu, groups in report_results.measured("symmetric", report_results.listed).items():
        for line in (line for run in groups.values() for line in run.lines):
            product, _, sizes = line.case.partition(" bfloat16 ")
            if sizes and len(set(sizes.split(" x "))) == 1:
                point = [int(sizes.split(" x ")[0]), line.value]
                data.setdefault(gpu, {}).setdefault(product, []).append(point)
    return data


def training_data(results: str) -> dict[str, Any]:
    """The first GPU, and the losses of both trainings."""
    found = report_results.measured(results, report_results.listed)
    gpu, groups = next(iter(found.items()))
    (run,) = groups.values()
    return {"gpu": gpu, "losses": json.loads(run.file.read_text())["losses"]}


def fp8_data() -> dict[str, Any]:
    """(rows, mean ratio) by GPU and kind of scales and sums."""
    data: dict[str, Any] = {}
    for gpu, groups in report_results.measured("fp8", report_results.scaled).items():
        for group, run in groups.items():
            kind = group.partition(",")[0]
            ratios: dict[int, list[float]] = {}
            for line in run.lines if kind != "quantize" else ():
                ratios.setdefault(int(line.case.split()[1]), []).append(line.value)
            points = [[rows, statistics.geometric_mean(own)] for rows, own in ratios.items()]
            data.setdefault(gpu, {}).setdefault(kind, []).extend(points)
        data[gpu] = {kind: sorted(points) for kind, points in data[gpu].items() if points}
    return data


def groups_data() -> dict[str, Any]:
    """The lines' numbers, by GPU and group."""
    section = report_sections.GROUPS
    return {
        gpu: {group: [line.value for line in run.lines] for group, run in groups.items()}
        for gpu, groups in section.measured().items()
    }


def same_bits_data() -> dict[str, Any]:
    """Speeds of the first GPU with the switch, by case, over those without it and PyTorch's."""
    found = report_results.measured("same_bits", report_results.listed)
    gpu, groups = next(iter(found.items()))
    cases: dict[str, dict[str, float]] = {}
    for group, run in groups.items():
        kind, _, peer = group.partition(", ")
        for line in run.lines:
            cases.setdefault(f"{kind}, {line.case}", {})[peer or "install()"] = line.value
    return {"gpu": gpu, "cases": cases}


def draw_same_bits(data: dict[str, Any]) -> Any:
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(8, 4), layout="constrained")
    cases = data["cases"]
    for i, peer in enumerate(("install()", "PyTorch")):
        places = [place + 0.4 * i for place in range(len(cases))]
        axes.barh(places, [of[peer] for of in cases.values()], 0.4, label=f"over {peer}")
    axes.set_yticks([place + 0.2 for place in range(len(cases))], cases, fontsize=8)
    axes.invert_yaxis()
    axes.axvline(1, color="gray", linewidth=1, linestyle="--")
    axes.set_xlabel("speed of install(batch_invariant=True)", fontsize=9)
    axes.set_title(f"The same bits for a row in every batch, one {data['gpu']}", fontsize=10)
    axes.legend(fontsize=8)
    return figure


def draw_matmul(data: dict[str, Any]) -> Any:
    from matplotlib import pyplot

    groups = list(goals.PRODUCTS)
    figure, axes = pyplot.subplots(figsize=(9, 4.2), layout="constrained")
    scatter = random.Random(0)
    for shift, (gpu, ratios) in zip((-0.2, 0.2), data.items(), strict=False):
        axes.plot([], [], "o", markersize=4, color=COLORS[gpu], label=gpu)
        for place, group in enumerate(groups):
            if group not in ratios:
                continue
            at = [place + shift + scatter.uniform(-0.13, 0.13) for _ in ratios[group]]
            axes.plot(at, ratios[group], "o", markersize=3, alpha=0.45, color=COLORS[gpu])
            mean = statistics.geometric_mean(ratios[group])
            ends = [place + shift - 0.16, place + shift + 0.16]
            axes.plot(ends, [mean, mean], color="black", linewidth=2)
    axes.axhline(1, color="gray", linewidth=1, linestyle="--")
    axes.set_yscale("log", base=2)
    axes.set_yticks([0.5, 1, 2, 4, 8], ["0.5", "1", "2", "4", "8"])
    labels = [textwrap.fill(goals.PRODUCTS[group].title, 18) for group in groups]
    axes.set_xticks(range(len(groups)), labels, fontsize=8)
    axes.set_ylabel("speed over cuBLAS's\n(bias, activation: over our plain product's)", fontsize=9)
    axes.set_title("torch.ops.cubin.matmul: a dot a product, a bar a group's mean", fontsize=10)
    axes.legend(fontsize=8)
    return figure


def draw_attention(data: dict[str, Any]) -> Any:
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(2, 3, figsize=(10, 6), sharex=True, layout="constrained")
    colors = {"full": "tab:blue", "causal": "tab:orange"}
    for name, series in data["series"].items():
        direction, head_dim, mask = name.split()
        axis = axes[int(direction == "backward")][HEAD_DIMS.index(int(head_dim))]
        rows, ours, cudnn = zip(*series, strict=True)
        axis.plot(rows, ours, "o-", markersize=3, color=colors[mask], label=mask)
        axis.plot(rows, cudnn, "--", color=colors[mask], label=f"{mask}, cuDNN")
        axis.set_title(f"{direction}, head_dim {head_dim}", fontsize=9)
        axis.set_xscale("log", base=2)
        axis.set_xticks(rows, [f"{row // 1024}k" if row >= 1024 else str(row) for row in rows])
    for axis in axes.flat:
        axis.set_ylim(bottom=0)
    for axis in axes[:, 0]:
        axis.set_ylabel("TFLOP/s", fontsize=9)
    for axis in axes[1]:
        axis.set_xlabel("rows of a sequence", fontsize=9)
    axes[0][0].legend(fontsize=8)
    figure.suptitle(f"Attention of bfloat16, 16,384 tokens, one {data['gpu']}", fontsize=10)
    return figure


def draw_symmetric(data: dict[str, Any]) -> Any:
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(8, 4), layout="constrained")
    for gpu, products in data.items():
        for style, (product, points) in zip(("o-", "s--"), products.items(), strict=False):
            rows, ratios = zip(*sorted(points), strict=True)
            label = f"{product}, {gpu}"
            axes.plot(rows, ratios, style, markersize=3, color=COLORS[gpu], label=label)
    axes.axhline(1, color="gray", linewidth=1, linestyle="--")
    axes.set_xscale("log", base=2)
    axes.set_xlabel("rows and columns", fontsize=9)
    axes.set_ylabel("speed over cuBLAS's", fontsize=9)
    axes.set_title("Symmetric products of bfloat16 matrices", fontsize=10)
    axes.legend(fontsize=8)
    return figure


def draw_training(how: str, data: dict[str, Any]) -> Any:
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(8, 4), layout="constrained")
    for style, (name, losses) in zip(("-", "--"), data["losses"].items(), strict=True):
        axes.plot(losses, style, linewidth=1.2, label=name)
    axes.set_xlabel("step", fontsize=9)
    axes.set_ylabel("loss", fontsize=9)
    axes.set_title(f"A transformer trained {how}, one {data['gpu']}", fontsize=10)
    axes.legend(fontsize=8)
    return figure


def draw_fp8(data: dict[str, Any]) -> Any:
    from matplotlib import pyplot

    titles = {
        "fast": "row scales (few rows: over PyTorch's row scales)",
        "exact": "row scales, exact sums",
        "block": "block scales",
    }
    figure, axes = pyplot.subplots(figsize=(8, 4), layout="constrained")
    for gpu, kinds in data.items():
        for style, (kind, points) in zip(("o-", "^:", "s--"), kinds.items(), strict=False):
            rows, ratios = zip(*points, strict=True)
            label = f"{titles[kind]}, {gpu}"
            axes.plot(rows, ratios, style, markersize=3, color=COLORS[gpu], label=label)
    axes.axhline(1, color="gray", linewidth=1, linestyle="--")
    axes.set_xscale("log", base=2)
    axes.set_xlabel("rows (M)", fontsize=9)
    axes.set_ylabel("speed over the better of PyTorch's", fontsize=9)
    axes.set_title("Products of float8_e4m3fn, means of nine weights", fontsize=10)
    axes.legend(fontsize=8)
    return figure


def draw_groups(data: dict[str, Any]) -> Any:
    from matplotlib import pyplot

    titles = report_sections.GROUPS.groups
    figure, axes = pyplot.subplots(figsize=(8, 4.5), layout="constrained")
    for shift, (gpu, ratios) in zip((-0.15, 0.15), data.items(), strict=False):
        axes.plot([], [], "o", markersize=4, color=COLORS[gpu], label=gpu)
        for place, group in enumerate(titles):
            own = ratios.get(group, [])
            at = [place + shift] * len(own)
            axes.plot(own, at, "o", markersize=3, alpha=0.45, color=COLORS[gpu])
            if own:
                mean = statistics.geometric_mean(own)
                axes.plot([mean, mean], [at[0] - 0.2, at[0] + 0.2], color="black", linewidth=2)
    axes.axvline(1, color="gray", linewidth=1, linestyle="--")
    axes.set_xscale("log", base=2)
    axes.set_xticks([0.9, 1, 1.25, 1.5, 2, 3, 6], ["0.9", "1", "1.25", "1.5", "2", "3", "6"])
    axes.set_yticks(range(len(titles)), list(titles.values()), fontsize=8)
    axes.invert_yaxis()
    axes.set_xlabel("speed over the best other one's", fontsize=9)
    axes.set_title("Products of groups: a dot a case, a bar a group's mean", fontsize=10)
    axes.legend(fontsize=8)
    return figure


PLOTS: dict[str, tuple[Callable[[], dict[str, Any]], Callable[[dict[str, Any]], Any]]] = {
    "matmul": (matmul_data, draw_matmul),
    "attention": (attention_data, draw_attention),
    "models": (models_data, draw_models),
    "symmetric": (symmetric_data, draw_symmetric),
    "training": (
        functools.partial(training_data, "muon_training"),
        functools.partial(draw_training, "by torch.optim.Muon"),
    ),
    "float8_training": (
        functools.partial(training_data, "float8_training"),
        functools.partial(draw_training, "with layers of torch_cubin.float8"),
    ),
    "fp8": (fp8_data, draw_fp8),
    "moe": (groups_data, draw_groups),
    "same_bits": (same_bits_data, draw_same_bits),
}


def digest(name: str) -> str:
    data, _ = PLOTS[name]
    return hashlib.sha256(json.dumps(data()).encode()).hexdigest()


def digest_in(png: Path) -> str | None:
    """The text chunk that draw() wrote to the file."""
    content, at = png.read_bytes(), 8  # after the signature
    while at < len(content):
        size, kind = struct.unpack_from(">I4s", content, at)
        keyword, _, text = content[at + 8 : at + 8 + size].partition(b"\0")
        if kind == b"tEXt" and keyword.decode("latin-1") == KEYWORD:
            return text.decode("latin-1")
        at += size + 12
    return None


def draw(name: str, target: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    data, draw_data = PLOTS[name]
    metadata = {KEYWORD: digest(name), "Software": None}
    draw_data(data()).savefig(target, dpi=110, metadata=metadata)
