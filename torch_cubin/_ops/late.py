"""Rules of ops whose modules are imported at a rule's first call.

A process uses few of the rules, and importing all of them took half of the import. So register.py
lists which module gives which op a rule for which dispatch key, and registers stand-ins.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import os
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import ModuleType
from typing import Any

import torch

from torch_cubin._pytorch import compiler, operators

FAKE = "Fake"  # stands in a list of dispatch keys for the fake kernel
_WITH_KEYSET = "FuncTorchBatched"  # batching rules may ask for the keys of the call

Rule = tuple[Callable[..., Any], bool]  # the kernel, and whether it takes the keys of the call


class Rules:
    """Takes the place of a torch.library.Library in a module's `register()`, and keeps the rules by
    the op's name and the key."""

    def __init__(self) -> None:
        self.found: dict[tuple[str, str], Rule] = {}

    def impl(
        self, name: str, kernel: Callable[..., Any], key: str, *, with_keyset: bool = False
    ) -> None:
        self.found[name.removeprefix("cubin::"), key] = kernel, with_keyset

    def fake(self, name: str, kernel: Callable[..., Any]) -> None:
        self.impl(name, kernel, FAKE)


@functools.cache
def rules_of(module: str) -> dict[tuple[str, str], Rule]:
    """Those of a module of this folder, which is imported."""
    rules = Rules()
    with _lock, _from_this_copy():
        importlib.import_module(f"{__package__}.{module}").register(rules)
    return rules.found


_PACKAGE = __name__.partition(".")[0]
_own_modules: dict[str, ModuleType] = {}
# Python's locks of modules stay locked in a child that is forked while another thread imports one.
# So a fork waits for the imports of rules.
_lock = threading.RLock()
os.register_at_fork(
    before=_lock.acquire, after_in_parent=_lock.release, after_in_child=_lock.release
)


def keep_modules() -> None:
    """Called when the rules are registered: keeps the package's modules, if others forget them."""
    _own_modules.update(_modules())


def _modules() -> dict[str, ModuleType]:
    """Of this package, as sys.modules has them."""
    named = [item for item in [*sys.modules.items()] if item[0].startswith(_PACKAGE)]
    return {name: module for name, module in named if name.partition(".")[0] == _PACKAGE}


@contextlib.contextmanager
def _from_this_copy() -> Iterator[None]:
    """Imports see the modules of this copy of the package, also after somebody has removed them
    from sys.modules and tried to import another copy, which is refused: this one still works."""
    if sys.modules.get(__name__) is _own_modules.get(__name__):
        yield
        return
    theirs = _modules()
    _replace(theirs, _own_modules)
    try:
        yield
    finally:
        _own_modules.update(_modules())
        _replace(_own_modules, theirs)


def _replace(modules: Mapping[str, ModuleType], others: Mapping[str, ModuleType]) -> None:
    for name in modules:
        del sys.modules[name]
    sys.modules.update(others)


@compiler.never_compiled
def _find(module: str, name: str, key: str) -> Callable[..., Any]:
    """The kernel, which for _WITH_KEYSET is called with the keys."""
    kernel, with_keyset = rules_of(module)[name, key]
    if key != _WITH_KEYSET or with_keyset:
        return kernel
    return lambda keyset, *args, **kwargs: kernel(*args, **kwargs)


def _stand_in(module: str, name: str, key: str) -> Callable[..., Any]:
    found: Callable[..., Any] | None = None

    def kernel(*args: Any, **kwargs: Any) -> Any:
        nonlocal found
        if found is None:
            found = _find(module, name, key)
        return found(*args, **kwargs)

    return kernel


def register(
    library: torch.library.Library, module: str, keys: Sequence[str], names: Sequence[str]
) -> None:
    """Registers stand-ins for the rules that this module has for each of the ops and keys."""
    for name in names:
        for key in keys:
            kernel = _stand_in(module, name, key)
            if key == FAKE:
                operators.register_fake(f"cubin::{name}", kernel, library)
            else:
                library.impl(name, kernel, key, with_keyset=key == _WITH_KEYSET)
