"""Checks that the links of the Markdown files lead to files and headings of the tree, and that
records which they or sources name are in benchmarks/results.

    python tools/links.py       # what `make lint` runs: names each dead link, and exits with 1

Links to other servers are not followed: lint needs no network.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PAGES = ("*.md", "docs/*.md", "benchmarks/**/*.md", "csrc/kernels/*.md", "examples/kernels/*.md")
LINK = re.compile(r"\]\((?!\w+:)([^)\s#]*)(?:#([^)\s]*))?\)")
SOURCES = ("csrc/**/*.h", "csrc/**/*.cpp", "csrc/**/*.cu*", "torch_cubin/**/*.py")
RECORD = re.compile(r"\b20\d\d-\d\d-\d\d_\w+\.jsonl?\b")
CODE = re.compile(r"^(```+).*?^\1|`[^`\n]*`", re.MULTILINE | re.DOTALL)


def pages(patterns: tuple[str, ...] = PAGES) -> list[Path]:
    return sorted({path for pattern in patterns for path in ROOT.glob(pattern)})


def targets(page: Path) -> Iterator[tuple[Path, str]]:
    """The file and the anchor ("" for none) of each link within the tree."""
    for match in LINK.finditer(CODE.sub("", page.read_text())):
        name, anchor = match[1], match[2] or ""
        yield ((page.parent / name).resolve() if name else page), anchor


def anchors(page: Path) -> set[str]:
    """The anchors of a page's headings, as Python-Markdown and GitHub both make them."""
    headings = re.findall(r"^#+ (.*)$", CODE.sub(_keep_words, page.read_text()), re.MULTILINE)
    found = set()
    for heading in headings:
        words = re.sub(r"[^\w\s-]", "", heading).strip().lower()
        found.add(re.sub(r"[\s]", "-", words))
    return found


def _keep_words(match: re.Match[str]) -> str:
    return "" if match[1] else match[0].strip("`")


def dead_links() -> list[str]:
    found = []
    for page in pages():
        for target, anchor in targets(page):
            name = page.relative_to(ROOT)
            if not target.exists():
                found.append(f"{name}: no file {target.name}")
            elif anchor and target.suffix == ".md" and anchor not in anchors(target):
                found.append(f"{name}: no heading #{anchor} in {target.name}")
    for file in pages(PAGES + SOURCES):
        for record in sorted(set(RECORD.findall(file.read_text()))):
            if not (ROOT / "benchmarks" / "results" / record).exists():
                found.append(f"{file.relative_to(ROOT)}: no record {record}")
    return found


if __name__ == "__main__":
    print("\n".join(dead := dead_links()), end="\n" * bool(dead))
    sys.exit(bool(dead))
