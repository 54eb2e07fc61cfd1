"""Keeps prose within 100 columns: Markdown, and comments that have lines of their own.

    python tools/columns.py             # wraps the paragraphs that have a longer line
    python tools/columns.py --check     # what `make lint` runs: names each such line

Tables, headings, code and single words (URLs) may be longer, and so may CHANGELOG.md, which has one
line a change. A page is written only if it still renders to the same HTML, for which
wrapping needs the packages of requirements-docs.txt.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path

import words

COLUMNS = 100
ROOT = words.ROOT
NOT_READ = re.compile(r"CHANGELOG\.md")  # one line a change
MARKS = {"//": (".c", ".h", ".cpp", ".cu", ".cuh"), "#": (".py", ".pyi", ".sh", ".toml", ".yml",
         ".yaml", ".cmake", "Makefile", "CMakeLists.txt")}  # fmt: skip

ITEM = re.compile(r"\s*(?:[-*+]|\d+[.)])\s+")
# Pieces that stay on one line: code spans, links with short texts, other words.
PIECE = re.compile(r"(?:`[^`]+`|!?\[[^\]]*\]\([^)]*\)|\S)+")
# A line that begins with this would be a list, a heading, a quote, a table or a rule.
STARTS_A_BLOCK = re.compile(r"(?:[-+*]|#+|\d+[.)])$|[>|]|[=-]+$|```|~~~")


def wrapped(text: str, first: str, rest: str) -> list[str]:
    """The words of a paragraph as lines; the first begins with `first`, the others with `rest`."""
    lines: list[list[str]] = [[]]
    for match in PIECE.finditer(text):
        piece = re.sub(r"\s*\n\s*", " ", match[0])
        prefix = rest if len(lines) > 1 else first
        if lines[-1] and len(prefix + " ".join([*lines[-1], piece])) > COLUMNS:
            begins = [piece]
            while STARTS_A_BLOCK.match(begins[0]) and len(lines[-1]) > 1:
                begins.insert(0, lines[-1].pop())
            lines.append(begins)
        else:
            lines[-1].append(piece)
    return [(rest if i else first) + " ".join(line) for i, line in enumerate(lines)]


def paragraphs(lines: list[str]) -> Iterator[tuple[int, int, str, str]]:
    """Markdown's paragraphs and list items: first line, end, and the prefixes of their lines."""
    fence, start, end = "", 0, 0
    while start < len(lines):
        line = lines[start]
        opened = re.match(r"\s*(```+|~~~+)", line)
        if fence or opened:
            fence = "" if fence and line.strip().startswith(fence) else fence or opened[1]
            start += 1
            continue
        if not line.strip() or _is_block(line):
            start += 1
            continue
        item = ITEM.match(line)
        first = item[0] if item else re.match(r"\s*", line)[0]
        end = start + 1
        while end < len(lines) and lines[end].strip() and not lines[end - 1].endswith("  "):
            if _is_block(lines[end]) or ITEM.match(lines[end]) or re.match(r"\s*```", lines[end]):
                break
            end += 1
        follows = re.match(r"\s*", lines[start + 1])[0] if end > start + 1 else " " * len(first)
        yield start, end, first, follows
        start = end


def _is_block(line: str) -> bool:
    return re.match(r"\s*(?:\||#{1,6}\s|>|<)|.*\|\s*$|\s*[-=]{3,}\s*$", line) is not None


def wrap_markdown(text: str) -> str:
    lines = text.split("\n")
    for start, end, first, rest in reversed(list(paragraphs(lines))):
        if any(len(line) > COLUMNS for line in lines[start:end]):
            words_of = "\n".join(lines[start:end])[len(first) :]
            lines[start:end] = wrapped(words_of, first, rest)
    return "\n".join(lines)


def comment(mark: str) -> re.Pattern[str]:
    """Matches a comment line, except directives that tools read."""
    return re.compile(rf"(\s*{mark} )((?!NOLINT|clang-format|noqa|fmt:|type:|ruff:)\S.*)")


def wrap_comments(text: str, mark: str) -> str:
    lines = text.split("\n")
    pattern = comment(mark)
    at = len(lines)
    while at > 0:
        at -= 1
        found = pattern.match(lines[at])
        if found is None or len(lines[at]) <= COLUMNS:
            continue
        end = at + 1
        while end < len(lines) and (more := pattern.match(lines[end])) and more[1] == found[1]:
            if ITEM.match(more[2]):
                break
            end += 1
        words_of = " ".join(line[len(found[1]) :] for line in lines[at:end])
        lines[at:end] = wrapped(words_of, found[1], found[1])
    return "\n".join(lines)


def long_lines(name: str, text: str) -> list[int]:
    """The numbers of lines of prose that are too long and can be wrapped."""
    lines = text.split("\n")
    found = []
    if name.endswith(".md"):
        for start, end, first, _ in paragraphs(lines):
            found += [n for n in range(start, end) if _is_long(lines[n], first)]
    elif (mark := mark_of(name)) is not None:
        pattern = comment(mark)
        found = [n for n, line in enumerate(lines) if pattern.match(line) and _is_long(line, mark)]
    return [n + 1 for n in found]


def _is_long(line: str, first: str) -> bool:
    pieces = PIECE.findall(line.strip().removeprefix(first.strip()))
    return len(line) > COLUMNS and len(pieces) > 1


def mark_of(name: str) -> str | None:
    return next((mark for mark, ends in MARKS.items() if name.endswith(ends)), None)


def rendered(text: str) -> str:
    """The HTML of a page as GitHub and as the site render it; spaces count only in code blocks."""
    import markdown
    import markdown_it

    pages = (
        markdown_it.MarkdownIt("gfm-like", {"linkify": False}).render(text),
        markdown.markdown(text, extensions=["tables", "fenced_code", "toc"]),
    )
    return re.sub(r"(<pre>.*?</pre>)|\s+", lambda part: part[1] or " ", " ".join(pages), flags=re.S)


def files() -> dict[str, str]:
    return {name: text for name, text in words.tree().items() if not NOT_READ.fullmatch(name)}


def check() -> list[str]:
    return [
        f"{name}:{line}: prose of more than {COLUMNS} columns (python tools/columns.py wraps it)"
        for name, text in sorted(files().items())
        for line in long_lines(name, text)
    ]


def main() -> int:
    if sys.argv[1:] == ["--check"]:
        print("\n".join(lines := check()), end="\n" * bool(lines))
        return bool(lines)
    for name, text in files().items():
        is_page, mark = name.endswith(".md"), mark_of(name)
        if not long_lines(name, text):
            continue
        new = wrap_markdown(text) if is_page else wrap_comments(text, mark) if mark else text
        if is_page and rendered(new) != rendered(text):
            print(f"{name}: would render otherwise; wrap it by hand")
            continue
        Path(ROOT / name).write_text(new)
        print(f"{name}: wrapped")
    return 0


if __name__ == "__main__":
    sys.exit(main())
