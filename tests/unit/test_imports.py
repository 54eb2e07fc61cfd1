"""Actions on modules that are imported before or after they are asked for."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from torch_cubin._pytorch.imports import when_imported


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], object]]:
    """Imports a module of a package `folder` by its name."""
    folder = tmp_path / "folder"
    folder.mkdir()
    for name in ("__init__", "first", "second"):
        (folder / f"{name}.py").write_text("")
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    monkeypatch.setattr(sys, "meta_path", list(sys.meta_path))
    importlib.invalidate_caches()
    yield importlib.import_module
    for name in [name for name in sys.modules if name.split(".")[0] == "folder"]:
        del sys.modules[name]


def test_a_module_imported_before_and_after(package: Callable[[str], object]) -> None:
    seen: list[str] = []
    package("folder.first")
    for name in ("folder.first", "folder.second"):
        when_imported(name, lambda module: seen.append(module.__name__))
    assert seen == ["folder.first"]
    package("folder.second")
    importlib.reload(sys.modules["folder.first"])
    assert seen == ["folder.first", "folder.second", "folder.first"]


def test_every_module_with_a_prefix(
    package: Callable[[str], object], monkeypatch: pytest.MonkeyPatch
) -> None:
    """But for what some programs put in place of a module."""
    seen: list[str] = []
    package("folder.first")
    monkeypatch.setitem(sys.modules, "folder.none", None)  # type: ignore[arg-type]
    when_imported("folder.", lambda module: seen.append(module.__name__), is_prefix=True)
    assert seen == ["folder.first"]
    package("folder.second")
    package("folder")
    assert seen == ["folder.first", "folder.second"]
