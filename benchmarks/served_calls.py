"""The products and attentions of a whole model, each by PyTorch's kernel and by ours: where a
model's time changes (bench_models.py --models --calls).

A dispatch mode records the operators of aten above our kernels, with their arguments. Each distinct
call is then timed with both kernels, alternating; C++ switches between them
(csrc/ops/common/serving.h).
"""

from __future__ import annotations

import collections
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import common
import torch
from served_share import has_formula
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

import torch_cubin
from torch_cubin._native import library

PYTORCHS, OURS = 1, 2
REPEATS, ROUNDS, BLOCK_MS = 10, 3, 3.0


@dataclass(frozen=True)
class Line:
    call: str
    times: int  # in one call of the model
    torch_us: float
    cubin_us: float

    @property
    def lost_us(self) -> float:
        return self.times * (self.cubin_us - self.torch_us)


class _Recording(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.calls: dict[str, Callable[[], object]] = {}
        self.times = collections.Counter[str]()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if has_formula(func):
            tensors = pytree.tree_leaves((args, kwargs))
            described = [_described(x) for x in tensors if x is not None]
            name = f"{func.name().removeprefix('aten::')} {' '.join(described)}"
            self.times[name] += 1
            self.calls.setdefault(name, lambda: func(*args, **kwargs))
        return func(*args, **kwargs)


def _described(value: Any) -> str:
    if not isinstance(value, torch.Tensor):
        return str(value)
    size = "x".join(map(str, value.shape))
    return size if value.is_contiguous() else f"{size}/{'x'.join(map(str, value.stride()))}"


def lines_of(call: Callable[[], object]) -> list[Line]:
    """The calls of the model, those that lose most first."""
    with torch_cubin.install(), _Recording() as recording:
        call()
    found = []
    for name, once in recording.calls.items():
        with torch.no_grad():
            found.append(Line(name, recording.times[name], *_microseconds(once)))
    return sorted(found, key=lambda line: -line.lost_us)


def _microseconds(call: Callable[[], object]) -> tuple[float, float]:
    """By CUDA graphs, so that the host's time does not count."""
    graphs = {}
    try:
        for state in (PYTORCHS, OURS):
            library.set_measuring(state)
            graphs[state], _ = common.graph_of([call] * REPEATS)
    finally:
        library.set_measuring(0)
    runs = {str(state): graph.replay for state, graph in graphs.items()}
    times = common.interleaved(runs, BLOCK_MS, ROUNDS, settle_ms=BLOCK_MS)
    return times[str(PYTORCHS)] / REPEATS, times[str(OURS)] / REPEATS


def print_lines(title: str, lines: list[Line]) -> None:
    print(f"\n{title}: calls of one forward or step; above 0, ours take longer")
    rows = [
        [f"{x.lost_us:.0f}", str(x.times), f"{x.torch_us:.1f}", f"{x.cubin_us:.1f}", x.call]
        for x in lines
    ]
    common.print_table(["lost us", "times", "torch us", "cubin us", "call"], rows, False)
