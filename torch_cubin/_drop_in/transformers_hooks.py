"""The policy that wrapped functions of transformers follow, and when they are wrapped: at the first
install() or drop_in(), or later when transformers is imported."""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import ModuleType

from torch_cubin._pytorch.imports import when_imported

# The name of a module, or the beginning of names, what wraps its functions, and which of the two.
Hook = tuple[str, Callable[[ModuleType], None], bool]

policy = "off"  # install()'s: wrappers call transformers' own functions then


def set_policy(now: str, hooks: tuple[Hook, ...]) -> None:
    """Called whenever install() begins or ends."""
    global policy
    if now != "off":
        add(hooks)
    policy = now


@functools.cache
def add(hooks: tuple[Hook, ...]) -> None:
    for hook in hooks:
        _add(*hook)


@functools.cache
def _add(name: str, action: Callable[[ModuleType], None], is_prefix: bool) -> None:
    """Once: the wrappers stay."""
    when_imported(name, action, is_prefix=is_prefix)
