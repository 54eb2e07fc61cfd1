"""Programs packed with Python and PyTorch by PyInstaller: what the package names.

PyInstaller itself takes minutes for PyTorch and is not run here.
"""

from __future__ import annotations

import importlib.metadata
import re
import runpy
import sys
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parents[2]


def test_the_hook_packs_all_of_the_package(monkeypatch: pytest.MonkeyPatch) -> None:
    (given,) = re.findall(r'"pyinstaller40": \["(.+)"\]', (ROOT / "setup.py").read_text())
    name, _, value = given.partition(" = ")
    assert name == "hook-dirs"
    hook_dirs = importlib.metadata.EntryPoint(name, value, "pyinstaller40").load()
    (folder,) = hook_dirs()
    asked: list[str] = []

    def collect_all(package: str) -> tuple[list[str], list[str], list[str]]:
        asked.append(package)
        return ["datas"], ["binaries"], ["hidden"]

    for part in ("PyInstaller", "PyInstaller.utils", "PyInstaller.utils.hooks"):
        monkeypatch.setitem(sys.modules, part, ModuleType(part))
    sys.modules["PyInstaller.utils.hooks"].collect_all = collect_all  # type: ignore[attr-defined]
    hook = runpy.run_path(str(Path(folder) / "hook-torch_cubin.py"))
    assert asked == ["torch_cubin"]
    assert [hook[each] for each in ("datas", "binaries", "hiddenimports")] == [
        ["datas"], ["binaries"], ["hidden"],
    ]  # fmt: skip
    assert hook["module_collection_mode"] == "pyz+py"  # keys.py reads the sources
