"""Hooks for large modules, PyTorch's and transformers', that most processes never import."""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import sys
import threading
from collections.abc import Callable, Collection
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
        sys.meta_path.insert(0, _FINDER)


class _AfterImport(importlib.abc.MetaPathFinder):
    """One for all actions, because every import of the process asks it. It stays installed: a
    search need not lead to an import, and a reload searches again."""

    def __init__(self) -> None:
        self._of_names: dict[str, list[Action]] = {}
        self._of_prefixes: list[tuple[tuple[str, ...], Action]] = []
        self._prefixes: tuple[str, ...] = ()
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
        if fullname not in self._of_names and not fullname.startswith(self._prefixes):
            return None
        searching = self._here.__dict__.setdefault("names", set())
        if fullname in searching:
            return None
        searching.add(fullname)
        try:
            spec = self._search(fullname, path, target)
        finally:
            searching.discard(fullname)
        if spec is not None and spec.loader is not None:
            execute, actions = spec.loader.exec_module, self._actions(fullname)

            def exec_module(module: ModuleType) -> None:
                execute(module)
                for action in actions:
                    action(module)

            spec.loader.exec_module = exec_module  # type: ignore[method-assign]
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
