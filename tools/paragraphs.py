"""Prints random comment paragraphs of an older revision next to their current versions.

    python tools/paragraphs.py SEED REV [COUNT]

A paragraph is part of a comment or docstring of csrc, torch_cubin, tools, benchmarks or examples,
and has at least 12 words. Its counterpart is the most similar paragraph of the same file (under its
current name, as git detects it), or of all files if the file is gone.
"""

from __future__ import annotations

import argparse
import difflib
import random
import re
import sys
import textwrap

import words

FOLDERS = ("csrc/", "torch_cubin/", "tools/", "benchmarks/", "examples/", "setup.py")
COMMENT = re.compile(r"^[ \t]*(?://|#(?!include|pragma|if|el|en|def|un))[ \t]?(.*)$")
DOCSTRING = re.compile(r'^[ \t]*r?"""(.*?)"""', re.DOTALL | re.MULTILINE)
FEWEST_WORDS = 12
SIMILAR = 0.3


def paragraphs(name: str, text: str) -> list[str]:
    """The paragraphs of a file's comments and docstrings, each on one line."""
    blocks: list[list[str]] = [[]]
    for line in text.split("\n"):
        found = COMMENT.match(line)
        if found and found[1].strip():
            blocks[-1].append(found[1].strip())
        elif blocks[-1]:
            blocks.append([])
    if name.endswith(".py"):
        for match in DOCSTRING.finditer(text):
            blocks += [part.split("\n") for part in re.split(r"\n\s*\n", match[1])]
    joined = (" ".join(" ".join(block).split()) for block in blocks)
    return [one for one in joined if len(one.split()) >= FEWEST_WORDS]


def sources(revision: str | None) -> dict[str, list[str]]:
    return {
        name: paragraphs(name, text)
        for name, text in sorted(words.tree(revision).items())
        if name.startswith(FOLDERS) and not name.endswith((".md", ".cubin.cpp"))
    }


def renamed(revision: str) -> dict[str, str]:
    """The current names of files that git detects as renamed since the revision."""
    listed = words.git("diff", "-M40%", "--diff-filter=R", "--name-status", revision).decode()
    return dict(line.split("\t")[1:3] for line in listed.splitlines())


def counterpart(paragraph: str, candidates: list[str]) -> str | None:
    def ratio(other: str) -> float:
        return difflib.SequenceMatcher(None, paragraph.split(), other.split(), False).ratio()

    best = max(candidates, key=ratio, default="")
    return best if best and ratio(best) >= SIMILAR else None


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("seed", type=int)
    parser.add_argument("revision")
    parser.add_argument("count", type=int, nargs="?", default=10)
    options = parser.parse_args()
    old, new, moved = sources(options.revision), sources(None), renamed(options.revision)
    every = [(name, one) for name, found in old.items() for one in found]
    for name, before in random.Random(options.seed).sample(every, options.count):
        now = moved.get(name, name)
        candidates = new.get(now) or [one for found in new.values() for one in found]
        after = counterpart(before, candidates)
        print(f"== {name}" + (f" -> {now}" if now != name else ""))
        for mark, text in (("- ", before), ("+ ", after or "(gone, or said otherwise)")):
            print(textwrap.fill(text, 100, initial_indent=mark, subsequent_indent="  "))
    return 0


if __name__ == "__main__":
    sys.exit(main())
