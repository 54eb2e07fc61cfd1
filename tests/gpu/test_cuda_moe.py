"""torch_cubin.moe on a GPU: the numbers of a loop over experts, gradients, determinism, graphs."""

from __future__ import annotations

import numerics
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import torch_cubin

pytestmark = pytest.mark.usefixtures("nan_memory")


def layer(tokens: int, dtype: torch.dtype, generator: torch.Generator) -> list[Tensor]:
    """x, ids of which some are no expert's, weights, w13, w2."""
    hidden, inner, experts, k = 256, 384, 16, 4
    made = {"generator": generator, "device": "cuda"}
    ids = torch.rand(tokens, experts + 2, **made).argsort(-1)[:, :k]
    shapes = ((experts, 2 * inner, hidden), (experts, hidden, inner))
    return [
        torch.randn(tokens, hidden, dtype=dtype, **made),
        ids,
        torch.rand(tokens, k, dtype=torch.float32, **made),
        *(torch.randn(shape, dtype=dtype, **made) * shape[-1] ** -0.5 for shape in shapes),
    ]


def by_experts(x: Tensor, ids: Tensor, weights: Tensor, w13: Tensor, w2: Tensor) -> Tensor:
    out = torch.zeros_like(x, dtype=weights.dtype)
    for expert, (first, second) in enumerate(zip(w13, w2, strict=True)):
        gate, up = (x @ first.t()).chunk(2, -1)
        weight = torch.where(ids == expert, weights, 0).sum(-1, keepdim=True)
        out = out + weight * ((F.silu(gate) * up) @ second.t())
    return out.to(x.dtype)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("tokens", [1, 7, 300, 5000])
def test_outputs_and_gradients(tokens, dtype, generator: torch.Generator) -> None:
    args = layer(tokens, dtype, generator)
    grad = torch.randn(tokens, 256, device="cuda", generator=generator).to(dtype)

    def run(function, tensors: list[Tensor], grad: Tensor) -> list[Tensor]:
        tensors = [x.clone().requires_grad_(x.is_floating_point()) for x in tensors]
        wanted = [x for x in tensors if x.requires_grad]
        out = function(*tensors)
        return [out.detach(), *torch.autograd.grad(out, wanted, grad)]

    ours, again = (run(torch_cubin.moe, args, grad) for _ in range(2))
    own = run(by_experts, args, grad)
    wide = [x.double() if x.is_floating_point() else x for x in args]
    reference = run(by_experts, wide, grad.double())
    for name, out, same, peer, right in zip(
        ("out", "x", "weights", "w13", "w2"), ours, again, own, reference, strict=True
    ):
        judge = numerics.Judge(out.dtype)
        judge.add(f"{name} {tokens}", out, peer, right)
        judge.finish()
        assert torch.equal(out, same), name


def test_a_graph_serves_other_ids(generator: torch.Generator) -> None:
    args = layer(64, torch.bfloat16, generator)
    with torch.no_grad():
        torch_cubin.moe(*args)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = torch_cubin.moe(*args)
        for _ in range(3):
            args[1].copy_(layer(64, torch.bfloat16, generator)[1])
            graph.replay()
            assert torch.equal(out, torch_cubin.moe(*args))
