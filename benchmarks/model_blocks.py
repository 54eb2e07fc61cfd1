"""One transformer block of each model in a CUDA graph: stock PyTorch compared with drop_in().

Stock PyTorch uses its fastest attention backend for that block and direction. Training is a forward
and the gradients of the input and all parameters.
"""

from __future__ import annotations

import contextlib
import statistics
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import common
import torch
import torch.nn.functional as F
from models import Model
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

import torch_cubin
from torch_cubin._tuning import measure

EFFORT = measure.Effort(settle_ms=30, rounds=30)
BACKENDS = (SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION)
DIRECTIONS = ("forward", "training")


@dataclass(frozen=True)
class Line:
    group: str
    case: str
    value: float  # stock's time over ours
    low: float
    high: float
    cubin_us: float
    torch_us: float
    attention: str  # stock's backend


class Block(nn.Module):
    """Pre-norm attention and MLP, in bfloat16."""

    def __init__(self, model: Model) -> None:
        super().__init__()
        self.model = model
        qkv_bias = model.bias if model.qkv_bias is None else model.qkv_bias
        norm = nn.LayerNorm if model.norm == "layer_norm" else nn.RMSNorm
        self.heads, self.keys, self.width = model.heads, model.keys, model.width
        self.norms = nn.ModuleList(norm(model.hidden) for _ in range(2))
        outputs = (self.heads + 2 * self.keys) * self.width
        self.qkv = nn.Linear(model.hidden, outputs, bias=qkv_bias)
        self.out = nn.Linear(self.heads * self.width, model.hidden, bias=model.bias)
        up = model.intermediate * (2 if model.mlp == "glu" else 1)
        self.up = nn.Linear(model.hidden, up, bias=model.bias)
        self.down = nn.Linear(model.intermediate, model.hidden, bias=model.bias)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.out(self.attention(self.norms[0](x)))
        hidden = self.up(self.norms[1](x))
        if self.model.mlp == "glu":
            gate, value = hidden.chunk(2, dim=-1)
            return x + self.down(F.silu(gate) * value)
        return x + self.down(F.gelu(hidden))

    def attention(self, x: Tensor) -> Tensor:
        batch, length, _ = x.shape
        sizes = [heads * self.width for heads in (self.heads, self.keys, self.keys)]
        q, k, v = (
            part.view(batch, length, -1, self.width).transpose(1, 2)
            for part in self.qkv(x).split(sizes, dim=-1)
        )
        grouped = self.keys != self.heads
        out = F.scaled_dot_product_attention(
            q, k, v, is_causal=self.model.causal, enable_gqa=grouped
        )
        return out.transpose(1, 2).reshape(batch, length, -1)


@dataclass(frozen=True)
class Captured:
    graph: torch.cuda.CUDAGraph
    results: tuple[Tensor, ...]
    read: tuple[object, ...]  # what the graph reads: block, input, gradient


def graph_of_block(
    model: Model, direction: str, context: Callable[[], contextlib.AbstractContextManager]
) -> Captured:
    """A graph of one pass. Weights and input have the same values in each call."""
    torch.manual_seed(0)
    with torch.device("cuda"):
        block = Block(model).to(torch.bfloat16)
        x = torch.randn(model.batch, model.length, model.hidden, dtype=torch.bfloat16)
        x.requires_grad_(direction == "training")
        grad = torch.randn_like(x)

    def run() -> tuple[Tensor, ...]:
        if direction == "forward":
            with torch.no_grad():
                return (block(x),)
        out = block(x)
        return (out.detach(), *torch.autograd.grad(out, (x, *block.parameters()), grad))

    with context():
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            run()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            results = run()
    return Captured(graph, results, (block, x, grad))


def measured(model: Model, direction: str, seed: int) -> Iterator[Line]:
    captured = {}
    for backend in BACKENDS:
        # A backend that does not support this block is skipped.
        with contextlib.suppress(RuntimeError):
            captured[backend.name] = graph_of_block(
                model, direction, lambda b=backend: sdpa_kernel(b)
            )
    stock = list(captured)
    captured["cubin"] = graph_of_block(model, direction, torch_cubin.drop_in)
    graphs = {name: block.graph for name, block in captured.items()}
    rounds = measure.rounds_of(graphs, 1, EFFORT, seed)
    best = min(stock, key=lambda name: statistics.median(rounds[name]))
    for ours, theirs in zip(captured["cubin"].results, captured[best].results, strict=True):
        difference = (ours.float() - theirs.float()).norm() / theirs.float().norm()
        if not difference.item() < 2e-2:
            raise AssertionError(f"differs from stock by {difference.item():.3g} of its norm")
    ratio = common.summarise(list(zip(rounds[best], rounds["cubin"], strict=True)))
    yield Line(
        *(f"blocks: {direction}", f"{model.name} {model.batch} x {model.length}", ratio.ratio),
        *(ratio.low, ratio.high, ratio.second_us, ratio.first_us, best),
    )
