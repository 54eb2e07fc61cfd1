"""Inductor's option for sums whose order does not depend on the batch (torch 2.13)."""

from __future__ import annotations

from typing import Any

from torch_cubin._pytorch.internals import Feature

REDUCTIONS = Feature(
    "install(batch_invariant=True) for the sums that torch.compile generates",
    "Inductor chooses their order by all sizes of a call",
)
_config: Any = REDUCTIONS.find("_inductor.config", None)


def set_batch_invariant(on: bool) -> bool | None:
    """Sets the option; returns its previous value, or None for a PyTorch without it.

    It is part of the key of Inductor's caches, and applies to functions compiled from now on.
    """
    before: bool | None = getattr(_config, "batch_invariant", None)
    if before is not None:
        _config.batch_invariant = on
    return before


__all__ = ["REDUCTIONS", "set_batch_invariant"]
