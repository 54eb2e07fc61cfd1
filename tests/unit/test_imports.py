"""Actions on modules that are imported before or after they are asked for."""

from __future__ import annotations

import importlib
import importlib.machinery
import sys
import zipfile
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


def test_every_import_asks_one_finder(package: Callable[[str], object]) -> None:
    others = len(sys.meta_path)
    for name in ("folder.first", "folder.second", "folder.third"):
        when_imported(name, lambda module: None)
    assert len(sys.meta_path) <= others + 1


def test_the_finder_stays_the_first_and_alone(package: Callable[[str], object]) -> None:
    """Where others come before it, before each of two calls."""
    for name in ("folder.first", "folder.second"):
        when_imported(name, lambda module: None)
        other = importlib.machinery.BuiltinImporter
        sys.meta_path.insert(0, other)
    when_imported("folder.third", lambda module: None)
    ours = sys.meta_path[0]
    assert sys.meta_path.count(ours) == 1
    assert sys.meta_path.count(other) >= 2


def test_modules_of_an_archive_share_a_loader(
    package: Callable[[str], object], tmp_path: Path
) -> None:
    """The action of one is not run for others, and nobody meets another loader than Python's."""
    with zipfile.ZipFile(tmp_path / "archive.zip", "w") as archive:
        for name in ("__init__", "first", "second"):
            archive.writestr(f"folder/{name}.py", "LOADER = type(__loader__).__name__")
    sys.path.insert(0, str(tmp_path / "archive.zip"))
    importlib.invalidate_caches()
    seen: list[str] = []
    when_imported("folder.first", lambda module: seen.append(module.__name__))
    for name in ("folder.first", "folder.second"):
        module = package(name)
        assert module.LOADER == type(module.__spec__.loader).__name__ == "zipimporter"
        assert "archive.zip" in module.__file__
        assert module.__spec__.loader is module.__loader__
    importlib.reload(sys.modules["folder.first"])
    assert seen == ["folder.first", "folder.first"]


def test_a_finder_that_imports_another_module(
    package: Callable[[str], object], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Below the search for the first one, whose action runs, too."""
    seen: list[str] = []

    class Importing:
        def find_spec(self, fullname: str, path: object = None, target: object = None) -> None:
            if fullname == "folder.first":
                package("folder.second")

    sys.meta_path.insert(0, Importing())  # type: ignore[arg-type]
    for name in ("folder.first", "folder.second"):
        when_imported(name, lambda module: seen.append(module.__name__))
    package("folder.first")
    assert seen == ["folder.second", "folder.first"]


def test_two_actions_on_a_module_run_in_their_order(package: Callable[[str], object]) -> None:
    seen: list[int] = []
    for number in range(3):
        when_imported(["folder.none", "folder.first"], lambda module, n=number: seen.append(n))
    package("folder.first")
    assert seen == [0, 1, 2]
