"""Randomised differential tests of grouped_matmul and moe against float64.

Sizes of groups, strides, addresses, dtypes and ids are drawn. Products hold small integers and must
come out bit-exact; the errors of layers are pooled and compared with those of PyTorch's ops in the
same dtype (numerics.Judge). A failure prints the seed and the case.
"""

from __future__ import annotations

import random
from collections.abc import Callable

import numerics
import pytest
import torch
import torch.nn.functional as F
from gpu.seeds import seeds
from torch import Tensor

import torch_cubin

pytestmark = pytest.mark.usefixtures("nan_memory")

CASES = 25  # a seed and test
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
LAYOUTS = ("dense", "dense", "transposed", "wide", "shifted", "transposed shifted")


def placed(tensor: Tensor, layout: str) -> Tensor:
    """The same matrices with other strides, or an address that is no multiple of 16 bytes."""
    if layout.startswith("transposed"):
        rest = layout.removeprefix("transposed").strip() or "dense"
        return placed(tensor.mT.contiguous(), rest).mT
    before, after = {"dense": (0, 0), "wide": (0, 24), "shifted": (3, 2)}[layout]
    wide = F.pad(tensor, (before, after), value=torch.nan)
    return wide[..., before : before + tensor.shape[-1]]


def integers(shape: tuple[int, ...], dtype: torch.dtype, generator: torch.Generator) -> Tensor:
    return torch.randint(-3, 4, shape, generator=generator, device="cuda").to(dtype)


def by_groups(mode: str, a: Tensor, b: Tensor, parts: list[tuple[int, int]]) -> Tensor:
    if mode == "contraction":
        return torch.stack([a[:, i:j] @ b[i:j] for i, j in parts])
    if mode == "columns":
        return by_groups("rows", b.mT, a.mT, parts).mT
    return torch.cat([a[i:j] @ own for (i, j), own in zip(parts, b, strict=True)])


@pytest.mark.parametrize("seed", seeds(6))
def test_products_of_random_groups_are_exact(seed: int) -> None:
    source, generator = random.Random(seed), torch.Generator("cuda").manual_seed(seed)
    for index in range(CASES):
        mode = source.choice(["rows", "rows", "columns", "contraction"])
        sizes = source.choices([0, 0, 1, 3, 16, 40, 64, 100, 257], k=source.randint(1, 100))
        n = source.choice([1, 8, 51, 64, 129, 256, 640])
        k, dtype = (
            source.choice([1, 8, 57, 64, 72, 200, 512]),
            source.choice((*DTYPES, torch.float64)),
        )
        layouts = source.choices(LAYOUTS, k=2)
        total, groups = sum(sizes) + source.choice([0, 0, 5, 200]), len(sizes)
        shapes = {
            "rows": ((total, k), (groups, k, n)),
            "columns": ((groups, n, k), (k, total)),
            "contraction": ((n, total), (total, k)),
        }[mode]
        a, b = (
            placed(integers(shape, dtype, generator), layout)
            for shape, layout in zip(shapes, layouts, strict=True)
        )
        offs = torch.tensor(sizes, device="cuda").cumsum(0)
        ends = offs.tolist()
        parts = list(zip([0, *ends], ends, strict=False))
        expected = by_groups(mode, a.double(), b.double(), parts)
        offs = offs.to(source.choice([torch.int32, torch.int64]))
        out = torch.ops.cubin.grouped_matmul(a, b, offs=offs)
        if mode != "contraction":  # what follows the last end belongs to no group
            out = out[: ends[-1]] if mode == "rows" else out[:, : ends[-1]]
        label = f"seed {seed}, case {index}: {mode} {dtype} {layouts} {sizes} {total} {n} {k}"
        numerics.check_exact(out, expected, label)


def layer(x: Tensor, ids: Tensor, weights: Tensor, w13: Tensor, w2: Tensor) -> Tensor:
    """In the tensors' dtypes, with sums over experts in that of the weights."""
    out = torch.zeros(x.shape, dtype=weights.dtype, device="cuda")
    for expert, (first, second) in enumerate(zip(w13, w2, strict=True)):
        token, place = torch.where(ids == expert)
        gate, up = (x[token] @ first.t()).chunk(2, -1)
        rows = (F.silu(gate) * up) @ second.t()
        out.index_add_(0, token, rows * weights[token, place, None])
    return out.to(x.dtype)


def with_gradients(function: Callable[..., Tensor], ids: Tensor, *tensors: Tensor) -> list[Tensor]:
    """The output and the gradients of x, the tokens' weights, w13 and w2, for a gradient that is
    the last tensor."""
    x, weights, w13, w2 = inputs = [tensor.detach().requires_grad_() for tensor in tensors[:4]]
    out = function(x, ids, weights, w13, w2)
    return [out.detach(), *torch.autograd.grad(out, inputs, tensors[4])]


@pytest.mark.parametrize("seed", seeds(2))
def test_random_layers_match_pytorch(seed: int) -> None:
    source, generator = random.Random(seed), torch.Generator("cuda").manual_seed(seed)
    made = {"generator": generator, "device": "cuda"}
    judges = {dtype: numerics.Judge(dtype, by_spread=True) for dtype in DTYPES}
    for index in range(CASES):
        tokens, experts = source.choice([1, 2, 7, 64, 129, 300, 700]), source.choice([1, 3, 8, 40])
        k, dtype = source.randint(1, min(experts, 8)), source.choice(DTYPES)
        hidden, inner = (source.choice([8, 51, 64, 136, 256, 520]) for _ in range(2))
        layouts = source.choices(LAYOUTS, k=3)
        numbers = torch.rand(tokens, experts + 2, **made).argsort(-1)[:, :k] - 1
        ids = numbers.to(source.choice([torch.int32, torch.int64]))
        weights = torch.rand(tokens, k, **made)
        x, w13, w2 = (
            placed((torch.randn(shape, **made) * scale).to(dtype), layout)
            for shape, scale, layout in zip(
                ((tokens, hidden), (experts, 2 * inner, hidden), (experts, hidden, inner)),
                (1, hidden**-0.5, inner**-0.5),
                layouts,
                strict=True,
            )
        )
        label = f"seed {seed}, case {index}: {dtype} {layouts} {tokens} {experts} {k} {hidden}"
        args = x, weights, w13, w2
        wide = [tensor.double() for tensor in args]
        if index % 2:
            grad = torch.randn(x.shape, **made).to(dtype)
            outs = with_gradients(torch_cubin.moe, ids, *args, grad)
            peers = with_gradients(layer, ids, *args, grad)
            rights = with_gradients(layer, ids, *wide, grad.double())
        else:
            with torch.no_grad():
                outs = [torch_cubin.moe(x, ids, *args[1:])]
            peers, rights = [layer(x, ids, *args[1:])], [layer(wide[0], ids, *wide[1:])]
        for out, peer, right in zip(outs, peers, rights, strict=True):
            relative = 8 * torch.finfo(dtype).eps if dtype == torch.float32 else 0.0
            judges[out.dtype].add(f"{label} {inner}", out, peer, right, 1.0, relative)
    for judge in judges.values():
        judge.finish()
