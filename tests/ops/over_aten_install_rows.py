"""Rows of compiled graphs whose columns are apart, as a convolution leaves them, are copied once
before their first norm under install(). Results are compared with those of stock PyTorch."""

from __future__ import annotations

import collections
import random
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from installed import installed
from torch import Tensor, nn
from torch._dynamo.exc import BackendCompilerFailed
from torch._inductor import config
from torch._inductor.custom_graph_pass import CustomGraphPass

import torch_cubin
from torch_cubin._inductor import fold, reductions, rows

WIDTH = 32
COPY = "cubin._rows_together.default"


@pytest.fixture(autouse=True)
def _few_bytes(monkeypatch) -> Iterator[None]:
    """Small tensors are copied, too."""
    torch._dynamo.reset()
    monkeypatch.setattr(rows, "_BYTES", 0)
    yield
    torch._dynamo.reset()


class Seen(Exception):
    """Ends a compilation after the pass."""


class Watch(CustomGraphPass):
    def __init__(self, ends: bool = False) -> None:
        self.copies, self._ends = 0, ends

    def __call__(self, graph: torch.fx.Graph) -> None:
        fold.fold(graph)
        self.copies += collections.Counter(str(node.target) for node in graph.nodes)[COPY]
        if self._ends:
            raise Seen

    def uuid(self) -> None:
        return None


def apart(batch: int = 2, length: int = 5, width: int = WIDTH) -> Tensor:
    return torch.randn(batch, width, length).transpose(1, 2)


class Layer(nn.Module):
    """A layer of Whisper's encoder."""

    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2))
        self.linears = nn.ModuleList(nn.Linear(width, width) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for norm, linear in zip(self.norms, self.linears, strict=True):
            x = x + linear(norm(x))
        return x


def compiled(function: Callable[..., Any], *given: Any) -> Any:
    """What the compiled function returns, and how many copies its graphs have."""
    watch = Watch()
    with config.patch(post_grad_custom_pre_pass=watch), installed():
        return torch.compile(function)(*given), watch.copies


def copies_of(function: Callable[..., Any], *given: Any, policy: str = "all") -> int:
    """The same, of a graph that is not compiled further."""
    watch = Watch(ends=True)
    ended = pytest.raises(BackendCompilerFailed)
    with config.patch(post_grad_custom_pre_pass=watch), installed(policy), ended:
        torch.compile(function)(*given)
    return watch.copies


def same(own: Tensor, want: Tensor) -> None:
    torch.testing.assert_close(own, want)
    assert own.stride() == want.stride()


@torch.no_grad()
def test_a_layer_copies_once_and_keeps_the_results_strides() -> None:
    layer, x = Layer(), apart()
    result, copies = compiled(layer, x)
    assert copies == 1
    same(result, layer(x))


@torch.no_grad()
def test_two_layers_copy_once_what_the_graph_computes() -> None:
    layers, x = nn.Sequential(Layer(), Layer()), torch.randn(2, WIDTH, 5)
    assert copies_of(lambda x: layers(F.gelu(x).transpose(1, 2)), x) == 1


@torch.no_grad()
def test_dynamic_sizes() -> None:
    call = torch.compile(summed, dynamic=True)
    with installed():
        for batch, length in ((2, 5), (3, 7)):
            x = apart(batch, length)
            same(call(x), summed(x))


def summed(x: Tensor) -> Tensor:
    """An RMS norm of its own making."""
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-5)


def read_by_its_strides(x: Tensor) -> Tensor:
    return F.layer_norm(x, x.shape[-1:]) + torch.as_strided(x, (2,), (1,)).sum()


@torch.no_grad()
@pytest.mark.parametrize(
    ("case", "copies"),
    [
        *(("rms", 1), ("together", 0), ("no norm", 0), ("another dim", 0), ("one column", 0)),
        *(("many columns", 0), ("few bytes", 0), ("fastest", 0), ("batch invariance", 0)),
        *(("strides read", 0), ("broadcast", 0)),
    ],
)
def test_which_are_copied(case: str, copies: int, monkeypatch) -> None:
    norm: Callable[[Tensor], Tensor] = lambda x: F.layer_norm(x, x.shape[-1:])  # noqa: E731
    x, policy = apart(), "all"
    if case == "rms":
        norm = summed
    elif case == "together":
        x = x.contiguous()
    elif case == "no norm":
        norm = F.gelu
    elif case == "another dim":
        norm = lambda x: x - x.mean(1, keepdim=True)  # noqa: E731
    elif case == "one column":
        x = apart(width=1)
    elif case == "many columns":
        x = apart(width=reductions.COLUMNS + 8)
    elif case == "few bytes":
        monkeypatch.undo()
    elif case == "fastest":  # which knows no CPU
        policy = "fastest"
    elif case == "strides read":
        norm = read_by_its_strides
    elif case == "broadcast":
        x = torch.randn(1, WIDTH, 5).expand(2, -1, -1).transpose(1, 2)
    with torch_cubin.batch_invariant(case == "batch invariance"):
        assert copies_of(norm, x, policy=policy) == copies


def test_graphs_of_training_keep_all_strides() -> None:
    watch = Watch()
    x = apart().requires_grad_()
    with config.patch(post_grad_custom_pre_pass=watch), installed():
        torch.compile(summed)(x).sum().backward()
    assert watch.copies == 0


@torch.no_grad()
def test_an_input_that_is_written_to() -> None:
    def function(x: Tensor) -> Tensor:
        result = F.layer_norm(x, x.shape[-1:])
        x.add_(1)
        return result

    x = apart()
    own, want = x.clone(), x.clone()
    result, _ = compiled(function, own)
    same(result, function(want))
    torch.testing.assert_close(own, want)


@torch.no_grad()
@pytest.mark.parametrize("seed", range(2))
def test_random_blocks(seed: int) -> None:
    draw = random.Random(seed)
    parts = [draw.choice(("norm", "rms", "gelu", "add", "scale", "linear")) for _ in range(7)]
    layer, other = nn.Linear(WIDTH, WIDTH), apart() if draw.random() < 0.5 else apart().contiguous()

    def function(x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
        seen = []
        for part in parts:
            if part == "norm":
                x = F.layer_norm(x, x.shape[-1:])
            elif part == "rms":
                x = summed(x)
            elif part == "gelu":
                x = F.gelu(x)
            elif part == "add":
                x = x + y
            elif part == "scale":
                x = x * y[:, :1]
            else:
                x = x + layer(x)
            seen.append(x)
        return seen[3], x

    x = apart()
    results, _ = compiled(function, x, other)
    for own, want in zip(results, function(x, other), strict=True):
        same(own, want)
