"""The policy that the functions of transformers which install() wraps follow, and when they are
wrapped: at the first install(), or later when transformers is imported."""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import ModuleType

from torch_cubin._pytorch.imports import when_imported

# The name of a module, or the beginning of names, what wraps its functions, and which of the two.
Hook = tuple[str, Callable[[ModuleType], None], bool]

policy = "off"  # wrappers call transformers' own functions then


def set_policy(now: str, hooks: tuple[Hook, ...]) -> None:
    """Called whenever install() begins or ends."""
    global policy
    if now != "off":
        _add(hooks)
    policy = now


@functools.cache
def _add(hooks: tuple[Hook, ...]) -> None:
    """Once: the wrappers stay."""
    for name, action, is_prefix in hooks:
        when_imported(name, action, is_prefix=is_prefix)
