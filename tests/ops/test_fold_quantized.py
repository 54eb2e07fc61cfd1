"""The fold pass on graphs with products of 8-bit floats: an input is quantised once, and SwiGLU of
one product's columns, or of two products, is one op where it is quantised."""

from __future__ import annotations

import collections
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._inductor.decomposition import select_decomp_table
from torch.fx.experimental.proxy_tensor import make_fx

import torch_cubin
from torch_cubin import ops
from torch_cubin._inductor import fold
from torch_cubin._ops.scaled import BLOCK_1X128, BLOCK_128X128

OURS = ("_quantize", "_scaled_matmul", "_scaled_gated_matmul")
ROWS, K, N = 6, 160, 200
Weight = tuple[Tensor, Tensor]


def folded(function: Callable[..., Tensor], *args: Any, tolerance: float = 0.02) -> dict[str, int]:
    """How many of our ops the function's graph has after the pass, whose results are compared."""
    functional, table = torch.func.functionalize(function), select_decomp_table()
    with torch.no_grad():
        graph = make_fx(functional, decomposition_table=table, tracing_mode="fake")(*args)
        fold.fold(graph.graph)
        graph.recompile()
        out, wanted = graph(*args), function(*args)
    assert (out.dtype, out.shape) == (wanted.dtype, wanted.shape)
    assert (out - wanted).norm() <= tolerance * wanted.norm()
    return ours(graph.graph)


def ours(graph: torch.fx.Graph) -> dict[str, int]:
    names = [str(node.target).removeprefix("cubin.") for node in graph.nodes]
    own = [name.removesuffix(".default") for name in names]
    return dict(collections.Counter(name for name in own if name in OURS))


def weight(rows: int, k: int) -> Weight:
    generator = torch.Generator().manual_seed(rows)
    data, scale = ops.quantize(torch.randn(rows, k, generator=generator), BLOCK_128X128)
    return data.t(), scale


def product(x: Tensor, own: Weight, bias: Tensor | None = None) -> Tensor:
    """As Float8Linear computes it."""
    data, scale = ops.quantize(x.reshape(-1, x.shape[-1]), BLOCK_1X128)
    out = ops.scaled_matmul(
        *(data, own[0], scale, BLOCK_1X128, own[1], BLOCK_128X128), bias=bias, output_dtype=x.dtype
    )
    return out.view(*x.shape[:-1], own[0].shape[1])


def x_of(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0))


W13, W2 = weight(2 * N, K), weight(K, N)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("shape", [(ROWS, K), (2, 3, K)], ids=str)
@pytest.mark.parametrize("order", ["gate first", "up first"])
def test_the_gate_of_one_product(shape: tuple[int, ...], dtype: torch.dtype, order: str) -> None:
    def layer(x: Tensor, w13: Weight, w2: Weight) -> Tensor:
        gate, up = product(x, w13).chunk(2, -1)
        return product(F.silu(gate) * up if order == "gate first" else up * F.silu(gate), w2)

    seen = folded(layer, x_of(*shape).to(dtype), W13, W2)
    assert seen == {"_quantize": 1, "_scaled_gated_matmul": 1, "_scaled_matmul": 1}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("shape", [(ROWS, K), (2, 3, K)], ids=str)
def test_a_gate_and_ups_of_two_layers(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    def layer(x: Tensor, w1: Weight, w3: Weight, w2: Weight) -> Tensor:
        return product(F.silu(product(x, w1)) * product(x, w3), w2)

    weights = [weight(N, K), weight(N, K), weight(K, N)]
    seen = folded(layer, x_of(*shape).to(dtype), *weights)
    assert seen == {"_quantize": 1, "_scaled_gated_matmul": 1, "_scaled_matmul": 1}


def test_two_layers_of_which_one_is_read_or_has_another_input_stay() -> None:
    def read(x: Tensor, w1: Weight, w3: Weight, w2: Weight) -> Tensor:
        up = product(x, w3)
        return product(F.silu(product(x, w1)) * up, w2) + up.sum()

    def other_input(x: Tensor, w1: Weight, w3: Weight, w2: Weight) -> Tensor:
        return product(F.silu(product(x, w1)) * product(x + 1, w3), w2)

    weights = [weight(N, K), weight(N, K), weight(K, N)]
    assert folded(read, x_of(ROWS, K), *weights) == {"_quantize": 2, "_scaled_matmul": 3}
    assert folded(other_input, x_of(ROWS, K), *weights) == {"_quantize": 3, "_scaled_matmul": 3}


NOT_FOLDED: dict[str, Callable[[Tensor], Tensor]] = {
    "the halves in the other order": lambda h: F.silu(h[:, N:]) * h[:, :N],
    "another activation": lambda h: F.gelu(h[:, :N]) * h[:, N:],
    "one half alone": lambda h: F.silu(h[:, :N]) * h[:, :N],
    "columns that are no halves": lambda h: F.silu(h[:, : N - 40]) * h[:, N : 2 * N - 40],
    "a factor": lambda h: 2 * F.silu(h[:, :N]) * h[:, N:],
    "rows in another order": lambda h: (F.silu(h[:, :N]) * h[:, N:]).flip(0),
    "one row of ups for all": lambda h: F.silu(h[:, :N]) * h[:1, N:],
    "rows as columns": lambda h: (F.silu(h[:, :N]) * h[:, N:]).reshape(N, -1),
}


@pytest.mark.parametrize("name", NOT_FOLDED)
def test_other_products_of_halves(name: str) -> None:
    def layer(x: Tensor, w13: Weight, w2: Weight) -> Tensor:
        return product(NOT_FOLDED[name](product(x, w13)), w2)

    width = {"columns that are no halves": N - 40, "rows as columns": ROWS}.get(name, N)
    seen = folded(layer, x_of(ROWS, K), W13, weight(K, width))
    assert seen == {"_quantize": 2, "_scaled_matmul": 2}


def test_a_product_with_a_bias_or_another_reader_stays() -> None:
    def biased(x: Tensor, w13: Weight, w2: Weight, bias: Tensor) -> Tensor:
        gate, up = product(x, w13, bias).chunk(2, -1)
        return product(F.silu(gate) * up, w2)

    def read(x: Tensor, w13: Weight, w2: Weight, bias: Tensor) -> Tensor:
        h = product(x, w13)
        gate, up = h.chunk(2, -1)
        return product(F.silu(gate) * up, w2) + h.sum() + bias.sum()

    def read_gate(x: Tensor, w13: Weight, w2: Weight, bias: Tensor) -> Tensor:
        h = product(x, w13)
        gate = F.silu(h[:, :N])
        return product(gate * h[:, N:], w2) + gate.sum() + bias.sum()

    for layer in (biased, read, read_gate):
        seen = folded(layer, x_of(ROWS, K), W13, W2, x_of(2 * N))
        assert seen == {"_quantize": 2, "_scaled_matmul": 2}


@pytest.mark.parametrize(
    ("options", "folds"),
    [({"power_of_two": True}, True), ({"dtype": torch.float8_e5m2}, False)],
    ids=str,
)
def test_quantisations_of_a_gate(options: dict[str, Any], folds: bool) -> None:
    def layer(x: Tensor, w13: Weight) -> Tensor:
        gate, up = product(x, w13).chunk(2, -1)
        data, scale = ops.quantize(F.silu(gate) * up, BLOCK_1X128, **options)
        return data.float() * scale.repeat_interleave(128, 1)[:, :N]

    folded_ops = {"_quantize": 1, "_scaled_gated_matmul": 1}
    kept_ops = {"_quantize": 2, "_scaled_matmul": 1}
    assert folded(layer, x_of(ROWS, K), W13, tolerance=0.04) == (folded_ops if folds else kept_ops)


def test_an_input_is_quantised_once() -> None:
    """As by query, key and value."""

    def layer(x: Tensor, *weights: Weight) -> Tensor:
        return torch.cat([product(x, own) for own in weights], -1)

    weights = [weight(n, K) for n in (64, 72, 80)]
    seen = folded(layer, x_of(2, 3, K), *weights, tolerance=0)
    assert seen == {"_quantize": 1, "_scaled_matmul": 3}


def test_other_quantisations_of_an_input_stay() -> None:
    def several(x: Tensor) -> Tensor:
        parts = [
            ops.quantize(x, BLOCK_1X128), ops.quantize(x, BLOCK_1X128, power_of_two=True),
            ops.quantize(x, BLOCK_128X128), ops.quantize(x.reshape(K, -1), BLOCK_1X128),
            ops.quantize(x + 1, BLOCK_1X128), ops.quantize(x, BLOCK_1X128),
        ]  # fmt: skip
        return torch.stack([data.float().sum() + scale.sum() for data, scale in parts])

    assert folded(several, x_of(ROWS, K), tolerance=1e-6) == {"_quantize": 5}


class OneLayer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate_up = nn.Linear(K, 2 * N, bias=False)
        self.down = nn.Linear(N, K, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.gate_up(x).chunk(2, -1)
        return self.down(F.silu(gate) * up)


class TwoLayers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate, self.up = (nn.Linear(K, N, bias=False) for _ in range(2))
        self.down = nn.Linear(N, K, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.silu(self.gate(x)) * self.up(x))


@pytest.mark.parametrize("mlp", [OneLayer, TwoLayers])
def test_a_compiled_model_of_8_bit_floats(mlp: type[nn.Module], monkeypatch) -> None:
    graphs: list[dict[str, int]] = []
    run = fold.fold

    def recorded(graph: torch.fx.Graph) -> None:
        run(graph)
        graphs.append(ours(graph))

    monkeypatch.setattr(fold, "fold", recorded)
    torch.manual_seed(0)
    model, x = torch_cubin.float8(mlp().bfloat16()), x_of(2, 3, K).bfloat16()
    options = {"fx_graph_cache": False}  # whose graphs do not come to the pass
    compiled = torch.compile(model, fullgraph=True, dynamic=True, options=options)
    with torch.no_grad():
        out, wanted = compiled(x), model(x)
    assert (out - wanted).norm() < 0.03 * wanted.norm()
    assert graphs == [{"_quantize": 1, "_scaled_gated_matmul": 1, "_scaled_matmul": 1}]
