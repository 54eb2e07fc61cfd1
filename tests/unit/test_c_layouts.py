"""The stored layouts are those of the headers."""

from __future__ import annotations

import importlib.util
import json

import c_layouts
import pytest

pytest.importorskip("clang.cindex", reason="needs libclang, found none")


def test_stored_layouts_are_the_headers(monkeypatch: pytest.MonkeyPatch) -> None:
    stored = json.loads(c_layouts.STORED.read_text())
    assert stored == c_layouts.stored(), "run python tests/c_layouts.py"
    read = {key: c_layouts.layout(*key.split(":")) for key in stored}
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert {key: c_layouts.layout(*key.split(":")) for key in stored} == read
