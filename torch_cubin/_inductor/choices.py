"""Inductor's choices for a product that install() serves: PyTorch's own kernel beside ours.

Inductor's choice "mm" is aten's operator, which install() serves. So without another choice,
max-autotune would never time PyTorch's own kernel; and compiled C++, which calls that kernel past
the dispatcher, would have been chosen by the time of ours.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from torch_cubin._drop_in import install, report
from torch_cubin._inductor import keys, lowerings
from torch_cubin._native import library
from torch_cubin._pytorch import inductor

PRODUCTS = ("mm", "addmm", "bmm", "baddbmm")
_REASON = "measured by max-autotune to be quicker"
_PYTORCHS = 1  # Measuring in csrc/ops/common/serving.h


def _pytorchs_own(name: str) -> Callable[..., Any]:
    function, operator = getattr(torch, name), f"aten::{name}.out"

    def run(*args: Any, out: torch.Tensor, **factors: Any) -> torch.Tensor:
        library.set_measuring(_PYTORCHS)
        try:
            result = function(*args, out=out, **factors)
        finally:
            library.set_measuring(0)
        report.count_declined(operator, _REASON)
        return result

    run.__name__ = f"cubin_pytorchs_{name}"
    return run


@functools.cache
def register() -> dict[str, Any]:
    """PyTorch's own kernels as extern kernels. NOTE: their names are in cached graphs of other
    processes."""
    return {
        name: inductor.extern_choice(
            _pytorchs_own(name), f"at::{name}_out", getattr(torch.ops.aten, name).out
        )
        for name in PRODUCTS
    }


def choices(op: str, theirs: list[Any]) -> list[Any]:
    """Inductor's choices for a product, and PyTorch's own kernel where aten's is served by ours."""
    own = register().get(op)
    atens = [choice for choice in theirs if inductor.name_of_extern(choice) == op]
    if own is None or not atens or not install.serves_graph(inductor.example_of(atens[0])):
        return theirs
    pytorchs = [inductor.like_extern(choice, own) for choice in atens]
    if not inductor.compiles_cpp():
        # A single choice is taken without being timed, and served when it runs.
        return [*theirs, *pytorchs] if inductor.times_products() else theirs
    ours = lowerings.choice_of(op)
    others = [choice for choice in theirs if choice not in atens]
    if ours is None:
        return [*pytorchs, *others]
    keywords = {"beta": 1, "alpha": 1} if "add" in op else {}
    mine = [inductor.like_extern(choice, ours, keywords) for choice in atens]
    return [*mine, *pytorchs, *others] if inductor.times_products() else mine


def key() -> Any:
    return ("torch_cubin.choices", *keys.of_graphs(), install.graph_policy())


__all__ = ["choices", "key", "register"]
