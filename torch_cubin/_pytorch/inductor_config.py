"""Inductor's options for results that do not depend on the batch, nor on what it fuses."""

from __future__ import annotations

from contextvars import ContextVar
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
# What each thread knows of the options' hash, and the values that make it compute the hash again.
_HASHES = {"_hash_dirty_var": True, "_get_dict_dirty_keys_var": None}


def set_batch_invariant(values: dict[str, Any] | None = None) -> dict[str, Any]:
    """Forces the options that this PyTorch has, in all threads, or sets `values` that this has
    returned before. Returns the values before.

    An option that is assigned is the thread's own since torch 2.13, but backward() compiles in a
    thread of autograd's. So the value is set that an environment variable would force. The options
    are part of the key of Inductor's caches, and apply to functions compiled from now on.
    """
    entries = {name: _config._config[name] for name in _OPTIONS if hasattr(_config, name)}
    before = {name: entry.env_value_force for name, entry in entries.items()}
    for name, entry in entries.items():
        entry.env_value_force = True if values is None else values[name]
    if hasattr(_config, "_is_dirty"):  # before torch 2.13
        _config._is_dirty = True
    for name, outdated in _HASHES.items():
        if hasattr(_config, name):
            setattr(_config, name, ContextVar(name, default=outdated))
    return before


__all__ = ["REDUCTIONS", "set_batch_invariant"]
