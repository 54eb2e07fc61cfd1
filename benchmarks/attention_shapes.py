"""Attention at the shapes of models, for bench_attention_goals.py: grouped heads, head dims between
the powers of two, short rows of large batches, query, key and value as views of one tensor, and
each model of models.py.

Rows of all heads lie side by side, as a projection writes them. A direction of a shape is one CUDA
graph, and the contenders are interleaved. Training is a forward and its gradients.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import bench_attention
import common
import torch
from models import MODELS

DIRECTIONS = ("forward", "training")
PEERS = {"cuDNN": bench_attention.CUDNN, "flash": bench_attention.FLASH}
LIMIT = 2e-2  # of the peer's norm


@dataclass(frozen=True)
class Shape:
    batch: int
    length: int
    heads: int
    kv_heads: int
    head_dim: int
    causal: bool = False
    name: str = ""
    packed: bool = False  # query, key and value are views of one tensor

    def __str__(self) -> str:
        heads = f"{self.heads}/{self.kv_heads}" if self.kv_heads != self.heads else f"{self.heads}"
        shape = f"{self.batch} x {self.length}, {heads} x {self.head_dim}"
        rest = f"{' causal' if self.causal else ''}{' packed' if self.packed else ''}"
        return f"{self.name} {shape}{rest}".strip()

    def flops(self, direction: str) -> float:
        products = 2 if direction == "forward" else 7
        scores = self.batch * self.heads * self.length**2 * (0.5 if self.causal else 1)
        return 2 * products * scores * self.head_dim


SHAPES = {
    "grouped heads": (
        Shape(1, 512, 64, 8, 128, causal=True),
        Shape(1, 1024, 28, 4, 128, causal=True),
        Shape(1, 2048, 32, 8, 128, causal=True),
        Shape(2, 4096, 32, 8, 128, causal=True),
        Shape(1, 2048, 16, 2, 64, causal=True),
        Shape(2, 1024, 8, 1, 64),
        Shape(4, 2048, 8, 1, 256, causal=True),
        Shape(1, 2048, 8, 4, 256, causal=True),
    ),
    "head dims between": (
        Shape(64, 256, 16, 16, 72),
        Shape(8, 1024, 16, 16, 72),
        Shape(8, 4096, 8, 8, 40),
        Shape(16, 1024, 8, 8, 80),
        Shape(4, 2048, 32, 32, 80, causal=True),
        Shape(4, 2048, 32, 32, 96, causal=True),
        Shape(4, 2048, 16, 16, 112, causal=True),
        Shape(32, 256, 8, 8, 160),
    ),
    "short rows": tuple(
        Shape(batch, length, heads, heads, 64)
        for batch, length, heads in (
            (128, 128, 12), (64, 197, 12), (64, 256, 12), (32, 257, 16), (64, 384, 12),
            (32, 512, 16), (32, 577, 16),
        )
    ),
    "views of one tensor": tuple(
        Shape(batch, length, heads, heads, width, packed=True)
        for batch, length, heads, width in (
            (64, 256, 12, 32), (64, 197, 12, 64), (64, 512, 12, 64), (64, 256, 16, 72),
            (8, 1024, 25, 64),
        )
    ),
    "models": tuple(
        Shape(x.batch, x.length, x.heads, x.keys, x.width, x.causal, x.name) for x in MODELS
    ),
}  # fmt: skip


@dataclass(frozen=True)
class Timed:
    group: str
    case: str
    value: float  # what the group's goal is about, such as the faster peer's time over ours
    microseconds: float
    rate: float  # TFLOP/s, or GB/s of keys and values


Results = tuple[torch.Tensor, ...]


def graph_of(
    shape: Shape, direction: str, attention: Callable[..., torch.Tensor]
) -> tuple[torch.cuda.CUDAGraph, Results, Results]:
    """A graph of the direction, its results, and its inputs, which have the same values in each
    call. Replays read the inputs, so the caller keeps them."""
    torch.manual_seed(0)

    def made(heads: int) -> torch.Tensor:
        sizes = (shape.batch, shape.length, heads, shape.head_dim)
        return torch.randn(sizes, device="cuda", dtype=torch.bfloat16).transpose(1, 2)

    heads = (shape.heads, shape.kv_heads, shape.kv_heads)
    leaves = (
        list(made(sum(heads)).split(heads, 1)) if shape.packed else [made(own) for own in heads]
    )
    grad = made(shape.heads)
    options = {"is_causal": shape.causal, "enable_gqa": shape.kv_heads != shape.heads}

    def run() -> Results:
        if direction == "forward":
            return (attention(*leaves, **options),)
        with torch.enable_grad():
            given = [x.detach().requires_grad_() for x in leaves]
            out = attention(*given, **options)
        return (out.detach(), *torch.autograd.grad(out, given, grad))

    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        results = run()
    return graph, results, (*leaves, grad)


def check(ours: Results, theirs: Results, what: str) -> None:
    for own, other in zip(ours, theirs, strict=True):
        difference = ((own.float() - other.float()).norm() / other.float().norm()).item()
        if not difference < LIMIT:
            raise AssertionError(f"{what}: differs by {difference:.3g} of its norm")


def measured(shape: Shape, direction: str, budget_ms: float) -> tuple[float, float]:
    """The faster peer's time over ours, and our microseconds."""
    graphs, results, inputs = {}, {}, {}
    for name, backend in PEERS.items():
        # A backend that does not support the shape is skipped.
        with contextlib.suppress(RuntimeError):
            graphs[name], results[name], inputs[name] = graph_of(
                shape, direction, bench_attention.stock(backend)
            )
    ours = torch.ops.cubin.scaled_dot_product_attention
    graphs["cubin"], own, inputs["cubin"] = graph_of(shape, direction, ours)
    for graph in graphs.values():
        graph.replay()
    for other in results.values():
        check(own, other, f"{direction} {shape}")
    times = common.interleaved(
        {name: graph.replay for name, graph in graphs.items()}, budget_ms / 12, settle_ms=1
    )
    return min(times[name] for name in results) / times["cubin"], times["cubin"]


def lines(group: str, budget_ms: float) -> Iterator[Timed]:
    for shape in SHAPES[group]:
        for direction in DIRECTIONS:
            value, us = measured(shape, direction, budget_ms)
            rate = shape.flops(direction) / us / 1e6
            yield Timed(f"{group}: {direction}", str(shape), value, us, rate)
        torch.cuda.empty_cache()
