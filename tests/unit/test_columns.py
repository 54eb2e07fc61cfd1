"""tools/columns.py: which lines are too long, and that wrapping them changes no page."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.append(str(ROOT / "tools"))

import columns  # noqa: E402

LONG = "word " * 19 + "0123456789"  # 105 columns


def test_no_prose_of_the_tree_is_too_long() -> None:
    assert columns.check() == []


@pytest.mark.parametrize(
    ("name", "text", "lines"),
    [
        ("a.md", f"{LONG}\n", [1]),
        ("a.md", f"# {LONG}\n\n| {LONG} |\n|---|\n\n```\n{LONG}\n```\n", []),
        ("a.md", f"- short\n- {LONG}\n", [2]),
        ("a.md", f"See\n<https://example.com/{'x' * 100}>\n", []),
        ("a.cpp", f"  // {LONG}\n  int a;  // {LONG}\n", [1]),
        ("a.py", f'# {LONG}\na = """{LONG}"""\n', [1]),
        ("a.cpp", f"  // NOLINTNEXTLINE(a-check): {LONG}\n", []),
        ("a.txt", f"{LONG}\n", []),
    ],
)
def test_lines_that_are_too_long_are_found(name: str, text: str, lines: list[int]) -> None:
    assert columns.long_lines(name, text) == lines


@pytest.mark.parametrize(
    "text",
    [
        f"{LONG} and more\nof it.\n\nAnother.\n",
        f"1. {LONG} more\n   of it\n   - {LONG}\n     of that\n2. next\n",
        f"- a\n\n  {LONG} more\n  of it\n\n```\n{LONG}\n```\n{LONG}\n",
        f"{'word ' * 19}`code {'of words ' * 5}` [a link](https://example.com) more\n",
        f"{'word ' * 19} 2^30 - 256 + 1 # 2. > 3 more\n",
        f"| a |\n|---|\n| {LONG} |\n\n{LONG}\n",
    ],
)
def test_a_wrapped_page_renders_to_the_same_html(text: str) -> None:
    pytest.importorskip("markdown")
    pytest.importorskip("markdown_it")
    new = columns.wrap_markdown(text)
    assert new != text
    assert columns.long_lines("a.md", new) == []
    assert columns.rendered(new) == columns.rendered(text)


def test_the_comparison_of_pages_sees_a_change() -> None:
    pytest.importorskip("markdown")
    pytest.importorskip("markdown_it")
    assert columns.rendered("a\n- b\n") != columns.rendered("a - b\n")
    # The lines of an indented code block must not be joined.
    assert columns.rendered("a\n\n    b\n    c\n") != columns.rendered("a\n\n    b c\n")
    assert columns.rendered("a b\n") == columns.rendered("a\nb\n")


def test_comments_are_wrapped_with_their_mark_and_indentation() -> None:
    text = f"  // {LONG}\n  // more\n  int a;\n"
    assert columns.wrap_comments(text, "//") == (
        f"  // {LONG.removesuffix(' 0123456789')}\n  // 0123456789 more\n  int a;\n"
    )
