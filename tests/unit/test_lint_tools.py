"""What `make lint`, `make docs` and .ci/run read: links, sources for clang-tidy, names of tests."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.append(str(ROOT / "tools"))

import compile_commands  # noqa: E402
import docs_site  # noqa: E402
import links  # noqa: E402
import paragraphs  # noqa: E402
import tidy  # noqa: E402
import words  # noqa: E402


def test_no_link_is_dead() -> None:
    assert links.dead_links() == []


def test_dead_links_are_found(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(links, "ROOT", tmp_path)
    (tmp_path / "docs").mkdir()
    (tmp_path / "README.md").write_text(
        "# Top\n[a](docs/a.md) [b](docs/a.md#a-heading-of-two-words) [c](#top) [d](docs/none.md)\n"
        "[e](docs/a.md#none) [f](https://example.com/none) `[g](none.md)`\n```\n[h](none.md)\n```\n"
    )
    (tmp_path / "docs" / "a.md").write_text("## A heading, of `two` words\n[x](../none.py)\n")
    (tmp_path / "csrc").mkdir()
    (tmp_path / "csrc" / "a.cpp").write_text("// 2026-01-02_h200_a.json, 2026-01-02_h200_b.json\n")
    (tmp_path / "benchmarks" / "results").mkdir(parents=True)
    (tmp_path / "benchmarks" / "results" / "2026-01-02_h200_b.json").touch()
    assert links.dead_links() == [
        "README.md: no file none.md",
        "README.md: no heading #none in a.md",
        "docs/a.md: no file none.py",
        "csrc/a.cpp: no record 2026-01-02_h200_a.json",
    ]


def test_every_page_of_the_tree_is_on_the_site() -> None:
    """mkdocs refuses a page that its navigation lacks; this says so without mkdocs."""
    navigation = (ROOT / "mkdocs.yml").read_text().split("\nnav:\n")[1]
    pages = [path.relative_to(ROOT).as_posix() for path in links.pages()]
    pages += [f"api/{name}.md" for name in docs_site.reference()]
    assert [page for page in pages if page not in navigation] == []


def test_the_site_renders_the_same_blocks_as_github() -> None:
    """The site's Markdown needs blank lines around nested lists, indented by four."""
    markdown, markdown_it = map(pytest.importorskip, ("markdown", "markdown_it"))
    github = markdown_it.MarkdownIt("gfm-like", {"linkify": False})
    extensions = ["tables", "fenced_code", "toc"]

    def blocks(html: str) -> list[str]:
        return re.findall(r"<(?:ul|ol|li|pre|table|h\d)\b", html)

    for page in links.pages():
        text = docs_site.site_text(page.read_text())
        site = markdown.markdown(text, extensions=extensions)
        assert blocks(site) == blocks(github.render(page.read_text())), page


@pytest.mark.parametrize(
    ("changed", "read"),
    [
        ("cubin/elf.cpp", "cubin/elf.cpp"),
        ("cubin/elf.h", "cubin/elf.cpp"),
        ("kernels/matmul/sm90.cu", None),
    ],
)
def test_clang_tidy_reads_a_source_for_a_changed_file(changed: str, read: str | None) -> None:
    wanted = [] if read is None else [ROOT / "csrc" / read]
    assert tidy.read_for(ROOT / "csrc" / changed) == wanted


def test_clang_tidy_reads_a_source_that_includes_a_header_without_one() -> None:
    (found,) = tidy.read_for(ROOT / "csrc" / "cubin" / "hex.h")
    assert '#include "cubin/hex.h"' in found.read_text()


def test_every_source_has_a_command() -> None:
    sources = set(compile_commands.sources())
    assert {path.name for path in (ROOT / "csrc").glob("*.cpp")} <= {p.name for p in sources}
    assert not any("kernels" in path.relative_to(ROOT).parts for path in sources)


def test_a_file_of_more_than_500_lines_says_why() -> None:
    """In its first comment."""
    reason = re.compile(r"over 500 lines|longer than|is long(er)? because|long file|single header")
    silent = [
        name
        for name, text in words.tree().items()
        if Path(name).suffix in {".py", ".c", ".h", ".cpp", ".cu", ".cuh"}
        and not name.endswith(".cubin.cpp")  # written by nvcc and bin2c
        and text.count("\n") > 500
        and not reason.search(" ".join(re.sub(r"\s//\s", " ", text[:4000]).split()).lower())
    ]
    assert silent == []


def test_the_files_that_the_architecture_names_exist() -> None:
    page = (ROOT / "docs" / "architecture.md").read_text()
    named = set(re.findall(r"`([\w./-]+\.(?:py|pyi|cpp|h|c|cu|cuh|txt|json))`", page))
    assert len(named) > 60
    known = [f"/{name}" for name in words.git("ls-files").decode().split()]
    missing = {
        name
        for name in named
        if not any(one.endswith(f"/{name.removeprefix('../')}") for one in known)
    }
    assert missing == set()


def exists(path: Path, name: str) -> bool:
    return path.is_file() and (not name or f"def {name}(" in path.read_text())


def missing_tests(script: str) -> list[str]:
    found = re.findall(r"--deselect=([^\s:)]+)(?:::(\w+))?", script)
    return [f"{path}::{name}" for path, name in found if not exists(ROOT / path, name)]


def test_the_tests_that_ci_leaves_to_the_night_exist() -> None:
    """pytest says nothing of a --deselect that is of no test."""
    script = (ROOT / ".ci" / "run").read_text()
    assert "--deselect=" in script
    assert missing_tests(script) == []
    here = "tests/unit/test_lint_tools.py"
    gone = "--deselect=tests/gone.py --deselect=tests/gone.py::test_a"
    others = f"--deselect={here}::test_gone[a] --deselect={here}::missing_tests --deselect={here}"
    assert missing_tests(f"{gone} {others})") == [
        "tests/gone.py::", "tests/gone.py::test_a", f"{here}::test_gone",
    ]  # fmt: skip


def test_paragraphs_are_those_of_comments_and_docstrings() -> None:
    words_of = " ".join(["word"] * 12)
    code = f'"""{words_of}.\n\nShort.\n"""\n# {words_of}\n# more\nx = 1  # {words_of}\n'
    assert paragraphs.paragraphs("a.py", code) == [f"{words_of} more", f"{words_of}."]
    assert paragraphs.paragraphs("a.cpp", f"  // {words_of}\n  // more\n") == [f"{words_of} more"]
    other = f"{words_of} less"
    assert paragraphs.counterpart(f"{words_of} more", ["nothing alike", other]) == other
    assert paragraphs.counterpart(words_of, ["nothing alike"]) is None
