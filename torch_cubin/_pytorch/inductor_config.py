"""Inductor's options, set for all threads.

Since torch 2.13 an option that is assigned is the thread's own; but backward() compiles in a thread
of autograd's, and a program may compile in threads that it starts. So the values are set that
environment variables would set.
"""

from __future__ import annotations

from contextvars import ContextVar
from typing import Any

from torch_cubin._pytorch.internals import Feature

REDUCTIONS = Feature(
    "install(batch_invariant=True) for the sums that torch.compile generates",
    "Inductor chooses their order by all sizes of a call",
)

# Sums in one order (torch 2.13); and rounding as eager code rounds. Without that, results depend on
# which operators a kernel fuses, which Inductor chooses by sizes and by the number of ranks.
_OPTIONS = ("batch_invariant", "emulate_precision_casts")
# Which of an option's values is set: one that precedes an assigned value, or one that follows it.
_FORCED, _DEFAULT = "env_value_force", "env_value_default"
# What each thread knows of the options' hash, and the values that make it compute the hash again.
_HASHES = {"_hash_dirty_var": True, "_get_dict_dirty_keys_var": None}


def _set(config: Any, which: str, values: dict[str, Any]) -> dict[str, Any]:
    """Sets the options that this PyTorch has, and returns their values before. They are part of the
    key of Inductor's caches, and apply to functions compiled from now on."""
    entries = {name: config._config[name] for name in values if hasattr(config, name)}
    before = {name: getattr(entry, which) for name, entry in entries.items()}
    for name, entry in entries.items():
        setattr(entry, which, values[name])
    if hasattr(config, "_is_dirty"):  # before torch 2.13
        config._is_dirty = True
    for name, outdated in _HASHES.items():
        if hasattr(config, name):
            setattr(config, name, ContextVar(name, default=outdated))
    return before


def set_default(config: Any, name: str, value: Any) -> None:
    """The option's value where nobody has assigned it. `config` is torch._inductor.config."""
    _set(config, _DEFAULT, {name: value})


def set_batch_invariant(values: dict[str, Any] | None = None) -> dict[str, Any]:
    """Forces the options, or sets `values` that this has returned before. Returns the values
    before. Imports Inductor."""
    config: Any = REDUCTIONS.find("_inductor.config", None)
    return _set(config, _FORCED, dict.fromkeys(_OPTIONS, True) if values is None else values)


__all__ = ["REDUCTIONS", "set_batch_invariant", "set_default"]
