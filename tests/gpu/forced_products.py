"""Products of operands whose rows begin anywhere, by every config of one backend: for its tests."""

from __future__ import annotations

import numerics
import torch

import torch_cubin
from torch_cubin._native import library
from torch_cubin._tuning import measure

REPEATS = 20


def among_nan(shape: tuple[int, ...], gap: int, offset: int, dtype: torch.dtype) -> torch.Tensor:
    """Small integers with NaN between the rows, and before and after all."""
    *batch, rows, columns = shape
    pitch = columns + gap
    strides = [rows * pitch + offset] * len(batch) + [pitch, 1]
    count = offset + sum((size - 1) * step for size, step in zip(shape, strides, strict=True)) + 1
    memory = torch.full((count + 8,), torch.nan, device="cuda", dtype=dtype)
    value = memory.as_strided(shape, strides, offset)
    return value.copy_(torch.randint(-3, 4, shape, device="cuda"))


def offered(backend: str, a: torch.Tensor, b: torch.Tensor) -> set[str]:
    """A backend's configs of a product of these sizes, whose plans are watched."""
    library.watch_plans(True)
    torch.ops.cubin.matmul(a, b)
    sizes = {"m": a.shape[-2], "n": b.shape[-1], "k": a.shape[-1]}
    plans = [p for p in library.watched_plans() if sizes.items() <= p["product"].items()]
    names = {c["name"] for plan in plans for c in plan["configs"]}
    return {name for name in names if name.startswith(backend)}


def check_integers(backend: str, a: torch.Tensor, b: torch.Tensor) -> tuple[set[str], list[str]]:
    """The configs that ran, and what was wrong: sums of small integers are exact, and so are they
    with a bias. Plans are watched."""
    wrong = []
    exact = a.double() @ b.double()
    bias = torch.randint(-3, 4, (b.shape[-1],), device="cuda").to(a.dtype)
    configs = offered(backend, a, b)
    for config in configs:
        library.force_config(config)
        name = f"{tuple(a.shape)} {tuple(b.shape)} {config}"
        if not torch.equal(torch.ops.cubin.matmul(a, b), exact.to(a.dtype)):
            wrong.append(name)
        if a.dim() == 2:
            linear = torch.ops.cubin.linear(a, b.mT, bias)
            if not torch.equal(linear, (exact + bias).to(a.dtype)):
                wrong.append(f"{name} bias")
    return configs, wrong


def check_random_numbers(backend: str, a: torch.Tensor, b: torch.Tensor, own: torch.Tensor) -> None:
    """Each config is as exact as PyTorch, whose product is `own`, and has the same bits again."""
    reference = numerics.reference_matmul(a, b)
    with torch.no_grad(), measure.watching():
        configs = offered(backend, a, b)
        for config in configs:
            library.force_config(config)
            first = torch.ops.cubin.matmul(a, b)
            numerics.check_close(first, own, reference, config)
            for _ in range(REPEATS):
                assert torch.equal(torch.ops.cubin.matmul(a, b), first), config
    assert configs


def check_not_batch_invariant(backend: str, a: torch.Tensor, b: torch.Tensor) -> None:
    """The backend's bits depend on the number of rows: it serves such a product, but not where
    that may not be."""
    with torch.no_grad(), measure.watching():
        assert offered(backend, a, b)
        with torch_cubin.batch_invariant():
            assert offered(backend, a, b) == set()
