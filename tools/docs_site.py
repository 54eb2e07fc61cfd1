"""Builds the documentation site, offline: `make docs` calls it.

    python tools/docs_site.py

The site's pages are the Markdown files of the tree, copied to build/site_sources with the same
relative paths, together with the files that they link to, so links work in both. The reference is
generated from the docstrings of the exported names.
"""

from __future__ import annotations

import ast
import re
import shutil
import subprocess
import sys
from pathlib import Path

import links

ROOT = Path(__file__).resolve().parents[1]
SOURCES = ROOT / "build" / "site_sources"


def exported() -> dict[str, str]:
    """Maps each public name of torch_cubin to the module that defines it, without importing it."""
    found = {}
    for node in ast.walk(ast.parse((ROOT / "torch_cubin" / "__init__.py").read_text())):
        if isinstance(node, ast.ImportFrom) and node.module is not None:
            for alias in node.names:
                found[alias.asname or alias.name] = f"{node.module}.{alias.name}"
    return {name: path for name, path in sorted(found.items()) if not name.startswith("_")}


def reference() -> dict[str, str]:
    """The pages of the reference: the objects that mkdocstrings renders on each."""
    producers = (ROOT / "torch_cubin" / "producers").glob("[a-z]*.py")
    pages = {
        "python": ("torch_cubin", exported().values()),
        "ops": ("torch_cubin.ops", ["torch_cubin.ops"]),
        "producers": (
            "torch_cubin.producers",
            [f"torch_cubin.producers.{path.stem}" for path in sorted(producers)],
        ),
    }
    return {
        name: f"# {title}\n\n" + "".join(f"::: {path}\n\n" for path in paths)
        for name, (title, paths) in pages.items()
    }


def site_text(text: str) -> str:
    """A page for the site, whose Markdown accepts a language after a fence but no other words."""
    return re.sub(r"^(```\w+) .*$", r"\1", text, flags=re.M)


def copy_sources() -> None:
    shutil.rmtree(SOURCES, ignore_errors=True)
    files = set(links.pages())
    for page in links.pages():
        files |= {target for target, _ in links.targets(page) if target.is_file()}
    for path in files:
        copy = SOURCES / path.relative_to(ROOT)
        copy.parent.mkdir(parents=True, exist_ok=True)
        if path.suffix == ".md":
            copy.write_text(site_text(path.read_text()))
        else:
            shutil.copyfile(path, copy)
    (SOURCES / "api").mkdir()
    for name, text in reference().items():
        (SOURCES / "api" / f"{name}.md").write_text(text)


def main() -> int:
    copy_sources()
    return subprocess.call(
        [sys.executable, "-m", "mkdocs", "build", "--quiet", "--strict"], cwd=ROOT
    )


if __name__ == "__main__":
    sys.exit(main())
