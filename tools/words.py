"""Counts the words that the glossary retired (docs/architecture.md, "Glossary"), by folder.

    python tools/words.py [REV]       # a Markdown table: old word, new word, counts (REV -> now)
    python tools/words.py --check     # what `make lint` runs: names each line with a retired word

Identifiers count too: `kSeamOf`, `find_room` and `the seam` are a word each. CHANGELOG.md tells
what was, and is not read; nor are data (JSON, cubins, corpora).
"""

from __future__ import annotations

import argparse
import dataclasses
import io
import re
import subprocess
import sys
import tarfile
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
FOLDERS = ("csrc", "torch_cubin", "tools", "benchmarks", "tests", "docs")
READ = re.compile(
    r"(?:(?:csrc|torch_cubin|tools|benchmarks|tests|docs|examples)/.*|[^/]*)"
    r"(?:\.(?:py|pyi|c|h|cpp|cu|cuh|md|sh|toml|yml|yaml|cmake)|/?Makefile|CMakeLists\.txt)"
)
NOT_READ = {
    "CHANGELOG.md": "tells what was",
    "tools/words.py": "lists the words",
    "tests/unit/test_words.py": "tests this list",
}


@dataclasses.dataclass(frozen=True)
class Word:
    """`pattern` is matched in lower case, with the parts of identifiers separated by "_"; a match
    must not touch other letters."""

    old: str
    new: str
    pattern: str


WORDS = (
    Word("seam", "backend", r"seams?"),
    Word("way", "config (of a kernel), path (of a call)", r"ways?"),
    Word("room", "capacity, occupancy", r"rooms?"),
    Word(
        "works (noun)", "work items",
        r"(?:k|fetch)_works|\b(?:the|of|all|more|two|between|neighbouring)\sworks|\*\sworks"
        r"|works(?=\s*[][;={]|\s(?:of|are|were|taken|ahead|before)\b)",
    ),
    Word("deal (of tiles)", "tile scheduler", r"deals?|dealt|dealing"),
    Word("told", "reported, passed", r"told"),
    Word("rows of none", "empty rows", r"rows\sof\snone"),
    Word("by turns", "interleaved", r"by turns"),
    Word("twin", "reference, autograd variant", r"twins?"),
    Word("leave out", "skip, omit", r"(?:leaves?|leaving|left)(?:\s(?:it|them|that|this))?\sout"),
    Word("share out", "split, divide", r"shar(?:e|es|ed|ing)\sout"),
    Word("what is (noun)", "name the thing", r"what\sis"),
)  # fmt: skip

# (file, text of the line, reason): both are regular expressions. The list is to stay short.
ALLOWED = (
    (r".*", r"<what is wrong>", "the form of errors, which STYLE and docs/ops.md state"),
    (r".*", r"""["'`]ways?["'`]""", "a field of tuned tables, public since version 1"),
    (r"examples/sentence_encoder\.py", r"told her", "a sentence that a model reads"),
)


def tree(revision: str | None = None) -> dict[str, str]:
    """The text files of a revision, or of the work tree with what git does not ignore."""
    if revision is None:
        listed = git("ls-files", "--cached", "--others", "--exclude-standard").decode().split("\n")
        paths = [name for name in listed if _is_read(name) and (ROOT / name).is_file()]
        return {name: (ROOT / name).read_text(errors="replace") for name in paths}
    with tarfile.open(fileobj=io.BytesIO(git("archive", revision))) as archive:
        return {
            member.name: file.read().decode(errors="replace")
            for member in archive
            if _is_read(member.name) and (file := archive.extractfile(member)) is not None
        }


def git(*arguments: str) -> bytes:
    return subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, check=True).stdout


def _is_read(name: str) -> bool:
    return READ.fullmatch(name) is not None and name not in NOT_READ


def found(name: str, text: str) -> Iterator[tuple[Word, int, str]]:
    """Each retired word in a file, with its line's number and text."""
    lines = text.split("\n")
    plain = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", text).lower()
    # A phrase may go on in the next line: of code, behind the mark of a comment.
    mark = "" if name.endswith((".md", ".py")) else r"(?://|#|\*)"
    for word in WORDS:
        pattern = word.pattern.replace(r"\s", rf"(?:[ \t_]|\n[ \t]*{mark}[ \t]*)")
        for match in re.finditer(rf"(?<![a-z])(?:{pattern})(?![a-z])", plain):
            number = plain.count("\n", 0, match.start())
            if not _is_allowed(name, lines[number]):
                yield word, number + 1, lines[number].strip()


def _is_allowed(name: str, line: str) -> bool:
    return any(re.fullmatch(file, name) and re.search(text, line) for file, text, _ in ALLOWED)


def counts(files: dict[str, str]) -> dict[tuple[str, str], int]:
    """By word and folder; "other" are examples and the files beside the folders."""
    total: dict[tuple[str, str], int] = {}
    for name, text in files.items():
        folder = name.partition("/")[0]
        folder = folder if folder in FOLDERS else "other"
        for word, _, _ in found(name, text):
            total[word.old, folder] = total.get((word.old, folder), 0) + 1
    return total


def table(revision: str | None) -> str:
    now = counts(tree())
    then = counts(tree(revision)) if revision is not None else None
    folders = (*FOLDERS, "other")
    rows = [f"| old | new | {' | '.join(folders)} | all |", "|---|---|" + "---:|" * 8]
    for word in WORDS:
        cells = []
        for names in (*((folder,) for folder in folders), folders):
            after = str(sum(now.get((word.old, name), 0) for name in names))
            if then is not None:
                after = f"{sum(then.get((word.old, name), 0) for name in names)} -> {after}"
            cells.append(after)
        rows.append(f"| {word.old} | {word.new} | {' | '.join(cells)} |")
    return "\n".join(rows)


def check() -> list[str]:
    return [
        f"{name}:{line}: '{word.old}', a retired word (better: {word.new}): {text:.90}"
        for name, content in sorted(tree().items())
        for word, line, text in found(name, content)
    ]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("revision", nargs="?", help="compare with this revision")
    parser.add_argument("--check", action="store_true")
    options = parser.parse_args()
    if options.check:
        print("\n".join(lines := check()), end="\n" * bool(lines))
        return bool(lines)
    print(table(options.revision))
    return 0


if __name__ == "__main__":
    sys.exit(main())
