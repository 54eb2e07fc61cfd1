"""Products on the stand-in driver: the call, and the configs that its plan had to choose from."""

from __future__ import annotations

import contextlib

import torch
from fake_driver import tensors
from faults.forked import forked

import torch_cubin
from torch_cubin._native import library


def multiply(a: tuple, b: tuple, batch_invariant: bool = False) -> list[torch.Tensor]:
    """The operands, each made of its sizes, strides and maybe a dtype, and their product."""
    operands = [tensors.strided(*each) for each in (a, b)]
    with torch_cubin.batch_invariant() if batch_invariant else contextlib.nullcontext():
        return [*operands, torch.ops.cubin._matmul(*operands)]


def launched(
    driver,
    a: tuple,
    b: tuple,
    config: str = "",
    batch_invariant: bool = False,
    tf32: bool | None = None,  # as it is
) -> list:
    """Of a product, in a process of its own: the addresses of the operands and of the result, and
    what was launched."""

    def run() -> list:
        if tf32 is not None:
            torch.backends.cuda.matmul.allow_tf32 = tf32
        library.watch_plans(True)
        library.force_config(config)
        found = multiply(a, b, batch_invariant)
        return [*(x.data_ptr() for x in found), driver.launches()]

    return forked(run)


def configs_of(kind: str, a: tuple, b: tuple, batch_invariant: bool = False) -> set[str]:
    """Those whose names begin with `kind`, of the product itself, not of its copies."""

    def run() -> list[str]:
        library.watch_plans(True)
        x, *_ = multiply(a, b, batch_invariant)
        plans = library.watched_plans()
        plan = next(p for p in plans if p["product"]["m"] == x.shape[-2])
        return [c["name"] for c in plan["configs"] if c["name"].startswith(kind)]

    return set(forked(run))
