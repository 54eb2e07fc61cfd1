"""Where the GPU's time of a whole model goes: its kernels by kind, for each contender
(bench_models.py --models --kernels)."""

from __future__ import annotations

import collections
import json
import re
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import common
import torch

import torch_cubin

CALLS = 3
SETTLE_SECONDS = 0.5  # of calls before: contenders are compared at the clocks of long runs
# The kinds of PyTorch's kernels, by their names; the first that matches. Inductor's kernels are
# named after what they are fused from; its templates ("tem") are products.
KINDS = {
    "fused": r"^triton_(?!tem)",
    "attention": r"flash|fmha|attention|sdpa",
    "products": r"nvjet|gemm|cutlass|cublas|splitk|grouped_mm|xmma|^triton_",
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
    end = time.monotonic() + SETTLE_SECONDS
    while on_gpu and time.monotonic() < end:
        call()
        torch.cuda.synchronize()
    with torch.profiler.profile(
        activities=[activities.CUDA if on_gpu else activities.CPU]
    ) as profile:
        for _ in range(CALLS):
            call()
        if on_gpu:
            torch.cuda.synchronize()
    times, counts = collections.Counter[str](), collections.Counter[str]()
    events = [x for x in profile.events() if x.device_type == torch.autograd.DeviceType.CUDA]
    ended = 0.0
    for event in sorted(events, key=lambda event: event.time_range.end):
        # A kernel that begins before the one before it ends (dependent launch) waits for it first.
        begin, end = max(ended, event.time_range.start), event.time_range.end
        times[event.name] += end - begin
        counts[event.name] += 1
        ended = end
    for name, us in times.most_common():
        yield _kind(name, ours), name, counts[name] / CALLS, us / CALLS


def print_lines(title: str, call: Callable[[], object], most: int = 12) -> dict[str, float]:
    """Returns the microseconds of each kind."""
    lines = list(lines_of(call))
    times, counts = collections.Counter[str](), collections.Counter[str]()
    for kind, _, count, us in lines:
        times[kind] += us
        counts[kind] += count
    print(f"\n{title}: {times.total():.0f} us of kernels")
    rows = [[kind, f"{us:.0f}", f"{counts[kind]:.0f}"] for kind, us in times.most_common()]
    common.print_table(["kind", "us", "launches"], rows, False)
    rows = [[kind, f"{us:.0f}", f"{n:.0f}", name[:90]] for kind, name, n, us in lines[:most]]
    common.print_table(["kind", "us", "launches", "kernel"], rows, False)
    return dict(times)


def print_bounds(stock: Mapping[str, float], ours: Mapping[str, float]) -> None:
    """What speed over stock the kernels allow: as they are, and if nothing but products and
    attention took time."""
    largest = sum(us for kind, us in ours.items() if kind in ("products", "attention"))
    if largest:
        all_of_stock = sum(stock.values())
        print(
            f"kernels: {all_of_stock / sum(ours.values()):.3f} of stock's speed, "
            f"{all_of_stock / largest:.3f} with products and attention alone"
        )
