"""Products on the stand-in driver: the call, and the configs that its plan had to choose from."""

from __future__ import annotations

import contextlib

import torch
from fake_driver import tensors
from faults.forked import forked

import torch_cubin
from torch_cubin._native import library


def multiply(a: tuple, b: tuple, batch_invariant: bool = False) -> list[torch.Tensor]:
    """The operands, each made of its sizes, strides and maybe a dtype, after their product."""
    operands = [tensors.strided(*each) for each in (a, b)]
    with torch_cubin.batch_invariant() if batch_invariant else contextlib.nullcontext():
        torch.ops.cubin._matmul(*operands)
    return operands


def configs_of(kind: str, a: tuple, b: tuple, batch_invariant: bool = False) -> set[str]:
    """Those whose names begin with `kind`, of the product itself, not of its copies."""

    def run() -> list[str]:
        library.watch_plans(True)
        x, _ = multiply(a, b, batch_invariant)
        plans = library.watched_plans()
        plan = next(p for p in plans if p["product"]["m"] == x.shape[-2])
        return [c["name"] for c in plan["configs"] if c["name"].startswith(kind)]

    return set(forked(run))
