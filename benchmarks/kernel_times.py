"""Where the GPU's time of a whole model goes: its kernels by kind, for each contender
(bench_models.py --models --kernels)."""

from __future__ import annotations

import collections
import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path

import common
import torch

import torch_cubin

CALLS = 3
# The kinds of PyTorch's kernels, by their names; the first that matches.
KINDS = {
    "attention": r"flash|fmha|attention|sdpa|cudnn",
    "products": r"nvjet|gemm|cutlass|cublas|splitk|grouped_mm|xmma",
    "fused": r"^triton_",
}
_OURS_BY_FAMILY = {"attention": "attention", "rows": "rows"}


def _ours() -> dict[str, str]:
    path = Path(torch_cubin.__file__).parent / "cubins" / "manifest.json"
    return {
        kernel["symbol"]: _OURS_BY_FAMILY.get(kernel["family"], "products")
        for kernel in json.loads(path.read_text())["kernels"]
    }


def _kind(name: str, ours: dict[str, str]) -> str:
    if name in ours:
        return ours[name]
    return next((kind for kind, names in KINDS.items() if re.search(names, name, re.I)), "others")


def lines_of(call: Callable[[], object]) -> Iterator[tuple[str, str, float, float]]:
    """Kind, kernel, launches and microseconds, of one call."""
    ours = _ours()
    activities = torch.profiler.ProfilerActivity
    on_gpu = torch.cuda.is_available()  # without one, nothing is found
    with torch.profiler.profile(
        activities=[activities.CUDA if on_gpu else activities.CPU]
    ) as profile:
        for _ in range(CALLS):
            call()
        if on_gpu:
            torch.cuda.synchronize()
    times, counts = collections.Counter[str](), collections.Counter[str]()
    for event in profile.events():
        if event.device_type == torch.autograd.DeviceType.CUDA:
            times[event.name] += event.time_range.elapsed_us()
            counts[event.name] += 1
    for name, us in times.most_common():
        yield _kind(name, ours), name, counts[name] / CALLS, us / CALLS


def print_lines(title: str, call: Callable[[], object], most: int = 12) -> None:
    lines = list(lines_of(call))
    print(f"\n{title}: {sum(us for *_, us in lines):.0f} us of kernels")
    rows = [
        [
            kind,
            f"{sum(us for each, _, _, us in lines if each == kind):.0f}",
            f"{sum(count for each, _, count, _ in lines if each == kind):.0f}",
        ]
        for kind in dict.fromkeys(kind for kind, *_ in lines)
    ]
    common.print_table(["kind", "us", "launches"], rows, False)
    rows = [[kind, f"{us:.0f}", f"{n:.0f}", name[:90]] for kind, name, n, us in lines[:most]]
    common.print_table(["kind", "us", "launches", "kernel"], rows, False)
