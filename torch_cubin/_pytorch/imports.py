"""Hooks for large modules, PyTorch's and transformers', that most processes never import."""

from __future__ import annotations

import contextlib
import importlib.abc
import importlib.machinery
import os
import sys
import threading
import time
from collections.abc import Callable, Collection, Sequence
from contextlib import AbstractContextManager
from types import ModuleType
from typing import Any

Action = Callable[[ModuleType], None]


def when_imported(
    name: str | Collection[str],
    action: Action,
    *,
    is_prefix: bool = False,
) -> None:
    """Runs `action` with the module, at once or when somebody imports it, and at each reload; with
    each of several; for a prefix, with each module whose name begins so."""
    names = [name] if isinstance(name, str) else [*name]
    added = tuple(names)
    # Not a search for one name: there are a thousand modules, and an import has six of these calls.
    if is_prefix:
        names = [each for each in list(sys.modules) if each.startswith(tuple(names))]
    for each in names:
        module = sys.modules.get(each)
        if isinstance(module, ModuleType):
            action(module)
    _FINDER.add(added, action, is_prefix)
    if sys.meta_path[:1] != [_FINDER]:  # first, also before those that others have put there
        sys.meta_path[:] = [_FINDER, *(finder for finder in sys.meta_path if finder is not _FINDER)]


def forks_wait_for(prefix: str) -> None:
    """From now on a fork waits for other threads' imports of such modules: their locks are Python's
    and stay locked in the child, where nobody unlocks them."""
    _FINDER.waited_for += (prefix,)
    os.register_at_fork(before=_IMPORTING.wait_for_others, after_in_child=_IMPORTING.forget_others)


class _Importing:
    """Counts unfinished imports, by thread. Not a lock: an import may wait for one of
    another thread, which would wait for the lock."""

    MOST_SECONDS = 10  # if an import in turn waits for what the forking thread holds

    def __init__(self) -> None:
        self._counts: dict[int, int] = {}

    def __enter__(self) -> None:
        me = threading.get_ident()
        self._counts[me] = self._counts.get(me, 0) + 1

    def __exit__(self, *exception: object) -> None:
        me = threading.get_ident()
        self._counts[me] -= 1
        if not self._counts[me]:
            del self._counts[me]

    def wait_for_others(self) -> None:
        end = time.monotonic() + self.MOST_SECONDS
        while set(self._counts) - {threading.get_ident()} and time.monotonic() < end:
            time.sleep(0.0005)

    def forget_others(self) -> None:
        for thread in set(self._counts) - {threading.get_ident()}:
            del self._counts[thread]


_IMPORTING = _Importing()


class _Loader(importlib.abc.Loader):
    """A module's loader, and the actions after it. Before the module runs, its own takes this one's
    place: some are of a whole archive, or classes."""

    def __init__(
        self, loader: Any, during: AbstractContextManager[None], actions: Sequence[Action]
    ) -> None:
        self._loader, self._during, self._actions = loader, during, actions

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType | None:
        made: ModuleType | None = self._loader.create_module(spec)
        return made

    def exec_module(self, module: ModuleType) -> None:
        spec = module.__spec__
        if spec is not None and spec.loader is self:
            spec.loader = self._loader
        if getattr(module, "__loader__", None) is self:
            module.__loader__ = self._loader
        with self._during:
            self._loader.exec_module(module)
        for action in self._actions:
            action(module)


class _AfterImport(importlib.abc.MetaPathFinder):
    """One for all actions, because every import of the process asks it. It stays installed: a
    search need not lead to an import, and a reload searches again."""

    def __init__(self) -> None:
        self._of_names: dict[str, list[Action]] = {}
        self._of_prefixes: list[tuple[tuple[str, ...], Action]] = []
        self._prefixes: tuple[str, ...] = ()
        self.waited_for: tuple[str, ...] = ()
        self._here = threading.local()  # another finder may restart the search within ours

    def add(self, names: tuple[str, ...], action: Action, is_prefix: bool) -> None:
        if is_prefix:
            self._of_prefixes.append((names, action))
            self._prefixes += names
            return
        for name in names:
            self._of_names.setdefault(name, []).append(action)

    def _actions(self, name: str) -> list[Action]:
        of_prefixes = [action for prefix, action in self._of_prefixes if name.startswith(prefix)]
        return [*self._of_names.get(name, ()), *of_prefixes]

    def find_spec(
        self, fullname: str, path: Any = None, target: Any = None
    ) -> importlib.machinery.ModuleSpec | None:
        is_waited_for = fullname.startswith(self.waited_for)
        if not (is_waited_for or fullname in self._of_names or fullname.startswith(self._prefixes)):
            return None
        searching = self._here.__dict__.setdefault("names", set())
        if fullname in searching:
            return None
        searching.add(fullname)
        during = _IMPORTING if is_waited_for else contextlib.nullcontext()
        try:
            with during:
                spec = self._search(fullname, path, target)
        finally:
            searching.discard(fullname)
        if spec is not None and hasattr(spec.loader, "exec_module"):
            spec.loader = _Loader(spec.loader, during, self._actions(fullname))
        return spec

    def _search(
        self, fullname: str, path: Any, target: Any
    ) -> importlib.machinery.ModuleSpec | None:
        for finder in list(sys.meta_path):
            if finder is not self and hasattr(finder, "find_spec"):
                spec = finder.find_spec(fullname, path, target)
                if spec is not None:
                    return spec
        return None


_FINDER = _AfterImport()
