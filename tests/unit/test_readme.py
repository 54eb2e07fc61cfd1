"""The README stays a first screen, its links lead somewhere, and every variable is explained."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGES = sorted([ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").glob("*.md")])
VARIABLE = re.compile(r'(?:environ\b[^"\n]{0,12}|getenv\()"(TORCH_CUBIN_\w+)"')


def test_readme_is_a_first_screen() -> None:
    assert len((ROOT / "README.md").read_text().splitlines()) <= 120


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_to_files(page: Path) -> None:
    links = re.findall(r"\]\(([^)#\s]+)(?:#[^)]*)?\)", page.read_text())
    files = [link for link in links if not link.startswith("http")]
    assert [link for link in files if not (page.parent / link).exists()] == []


def test_the_page_of_ops_explains_every_environment_variable() -> None:
    sources = [ROOT / "setup.py"]
    for folder in ("torch_cubin", "csrc", "tests"):
        sources += [p for p in (ROOT / folder).rglob("*") if p.suffix in (".py", ".cpp", ".h")]
    read = {name for path in sources for name in VARIABLE.findall(path.read_text())}
    explained = set(
        re.findall(r"^\| `(TORCH_CUBIN_\w+)` \|", (ROOT / "docs/ops.md").read_text(), re.M)
    )
    assert len(read) > 6
    assert read - explained == set()
