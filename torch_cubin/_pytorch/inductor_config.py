"""Inductor's options for results that do not depend on the batch, nor on what it fuses."""

from __future__ import annotations

from typing import Any

from torch_cubin._pytorch.internals import Feature

REDUCTIONS = Feature(
    "install(batch_invariant=True) for the sums that torch.compile generates",
    "Inductor chooses their order by all sizes of a call",
)
_config: Any = REDUCTIONS.find("_inductor.config", None)


# Sums in one order (torch 2.13); and rounding as eager code rounds. Without that, results depend on
# which operators a kernel fuses, which Inductor chooses by sizes and by the number of ranks.
_OPTIONS = ("batch_invariant", "emulate_precision_casts")


def set_batch_invariant(values: dict[str, bool] | None = None) -> dict[str, bool]:
    """Sets the options that this PyTorch has, to True if no values are given; returns those before.

    They are part of the key of Inductor's caches, and apply to functions compiled from now on.
    """
    before = {name: getattr(_config, name) for name in _OPTIONS if hasattr(_config, name)}
    for name in before:
        setattr(_config, name, True if values is None else values[name])
    return before


__all__ = ["REDUCTIONS", "set_batch_invariant"]
