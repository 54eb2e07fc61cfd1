"""tools/words.py: retired words are found if they come back; `make lint` asks it of the tree."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.append(str(ROOT / "tools"))

import words  # noqa: E402


@pytest.mark.parametrize(
    ("name", "text", "old"),
    [
        ("csrc/a.cpp", "class MatmulSeamOf;", "seam"),
        ("csrc/a.cpp", "int kWays = 2;", "way"),
        ("csrc/a.cpp", "find_room();", "room"),
        ("csrc/a.cuh", "slot<C::kWorks>(number)", "works (noun)"),
        ("csrc/a.cuh", "// The producer is two works ahead.", "works (noun)"),
        ("csrc/a.cpp", "deal_work<C>(p);", "deal (of tiles)"),
        ("torch_cubin/a.py", "# as it was told", "told"),
        ("torch_cubin/a.py", "_WITHOUT_TWIN = ()", "twin"),
        ("tests/a.py", '"""Those are left\nout."""', "leave out"),
        ("csrc/a.cpp", "// Those are left\n// out.", "leave out"),
        ("docs/a.md", "its keys are shared\nout", "share out"),
        ("docs/a.md", "Refuses what is no tensor", "what is (noun)"),
    ],
)
def test_a_retired_word_is_found(name: str, text: str, old: str) -> None:
    assert [word.old for word, _, _ in words.found(name, text)] == [old]


@pytest.mark.parametrize(
    "text",
    [
        "always, anyway, halfway; mushrooms; a workspace; it works (here), and works with any",
        'line.at("way")',
        "deallocate(); dealloc; the total; determine sharing\nout.resize(2);",
        "<object> <what is wrong>",
    ],
)
def test_other_words_are_not_taken_for_one(text: str) -> None:
    assert list(words.found("csrc/a.cpp", text)) == []


def test_counts_compare_a_revision_with_the_work_tree(tmp_path: Path, monkeypatch) -> None:
    def git(*arguments: str) -> None:
        subprocess.run(["git", "-c", "user.name=a", "-c", "user.email=a", *arguments],
                       cwd=tmp_path, check=True, capture_output=True)  # fmt: skip

    monkeypatch.setattr(words, "ROOT", tmp_path)
    (tmp_path / "csrc").mkdir()
    source = tmp_path / "csrc" / "a.cpp"
    source.write_text("// a seam, a seam\n")
    git("init", "-q")
    git("add", "-A")
    git("commit", "-q", "-m", "a")
    source.write_text("// a backend\n")
    (tmp_path / "README.md").write_text("No room.\n")
    rows = {row.split(" | ")[0]: row for row in words.table("HEAD").split("\n")}
    assert rows["| seam"].split(" | ")[2:4] == ["2 -> 0", "0 -> 0"]
    assert rows["| room"].endswith("0 -> 1 | 0 -> 1 |")


def test_each_exception_has_a_reason() -> None:
    assert all(reason for *_, reason in words.ALLOWED)
    assert all((ROOT / name).is_file() for name in words.NOT_READ)
