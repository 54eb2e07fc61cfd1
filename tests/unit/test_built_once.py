"""tests/built_once.py: what tests build is built by one process, and kept until it changes."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
from built_once import built_once


def make(output: Path, text: str = "made") -> bool:
    """Whether it had to be built."""
    with built_once(output) as unfinished:
        if unfinished:
            assert unfinished != output
            unfinished.write_text(text)
        return unfinished is not None


def test_is_built_once_and_replaces_older_ones_of_its_kind(tmp_path: Path) -> None:
    for name in ("program-1", "programs-1", "folder-1"):
        assert make(tmp_path / name)
        assert not make(tmp_path / name)
    assert make(tmp_path / "program-2")
    with built_once(tmp_path / "folder-2") as unfinished:
        unfinished.mkdir()
    found = {path.name for path in tmp_path.iterdir() if path.name[0] != "."}
    assert found == {"program-2", "programs-1", "folder-2"}


def test_a_failed_build_is_repeated(tmp_path: Path) -> None:
    output = tmp_path / "folder-1"
    with pytest.raises(ZeroDivisionError), built_once(output) as unfinished:
        unfinished.mkdir()
        (unfinished / "half").touch()
        _ = 1 // 0
    assert not output.exists()
    with built_once(output) as unfinished:
        unfinished.mkdir()
    assert list(output.iterdir()) == []


def test_a_second_builder_waits_for_the_first(tmp_path: Path) -> None:
    output, entered, built = tmp_path / "program-1", threading.Event(), []

    def second() -> None:
        entered.set()
        built.append(make(output, "second"))

    with built_once(output) as unfinished:
        other = threading.Thread(target=second)
        other.start()
        entered.wait(10)
        other.join(0.2)
        assert other.is_alive()
        unfinished.write_text("first")
    other.join(10)
    assert built == [False]
    assert output.read_text() == "first"
