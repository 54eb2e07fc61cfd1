"""Hooks for large modules, PyTorch's and transformers', that most processes never import."""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import sys
import threading
from collections.abc import Callable, Collection
from types import ModuleType
from typing import Any


def when_imported(
    name: str | Collection[str],
    action: Callable[[ModuleType], None],
    *,
    is_prefix: bool = False,
) -> None:
    """Runs `action` with the module, at once or when somebody imports it, and at each reload; with
    each of several; for a prefix, with each module whose name begins so."""
    finder = _AfterImport(name, action, is_prefix)
    # Not a search for one name: there are a thousand modules, and an import has six of these calls.
    names = [name] if isinstance(name, str) else [*name]
    if is_prefix:
        names = [each for each in list(sys.modules) if finder.is_for(each)]
    for each in names:
        module = sys.modules.get(each)
        if isinstance(module, ModuleType):
            action(module)
    sys.meta_path.insert(0, finder)


class _AfterImport(importlib.abc.MetaPathFinder):
    """It stays installed: a search need not lead to an import, and a reload searches again."""

    def __init__(
        self, name: str | Collection[str], action: Callable[[ModuleType], None], is_prefix: bool
    ) -> None:
        self._names = (name,) if isinstance(name, str) else tuple(name)
        self._action, self._is_prefix = action, is_prefix
        self._here = threading.local()  # another finder may restart the search within ours

    def is_for(self, name: str) -> bool:
        return name.startswith(self._names) if self._is_prefix else name in self._names

    def find_spec(
        self, fullname: str, path: Any = None, target: Any = None
    ) -> importlib.machinery.ModuleSpec | None:
        if not self.is_for(fullname) or getattr(self._here, "searching", False):
            return None
        self._here.searching = True
        try:
            spec = self._search(fullname, path, target)
        finally:
            self._here.searching = False
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module

            def exec_module(module: ModuleType) -> None:
                execute(module)
                self._action(module)

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
