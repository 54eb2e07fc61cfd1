"""Runs clang-tidy, configured by .clang-tidy, on the C++ of csrc/, each file separately.

    python tools/tidy.py               # every file: some minutes on two cores
    python tools/tidy.py --changed     # those that differ from main: what `make lint` runs

A changed header is checked with the source of the same name, or the first that includes it. On main
itself, the last commit counts as the change.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import compile_commands

ROOT = Path(__file__).resolve().parents[1]


def git(*arguments: str) -> str | None:
    done = subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True)
    return done.stdout if done.returncode == 0 else None


def base() -> str | None:
    """The commit to compare with; None if git cannot determine it."""
    head = git("rev-parse", "HEAD")
    for branch in ("main", "origin/main"):
        found = git("merge-base", "HEAD", branch)
        if found is not None and found != head:
            return found.strip()
    return "HEAD~1" if git("rev-parse", "HEAD~1") else None


def changed() -> set[Path]:
    """Sources that differ from the base, committed or not; all of them if git cannot determine
    it."""
    start = base()
    if start is None:
        return set(compile_commands.sources())
    listed = git("diff", "--name-only", start, "--", "csrc") or ""
    listed += git("ls-files", "--others", "--exclude-standard", "--", "csrc") or ""
    paths = {ROOT / name for name in listed.split() if (ROOT / name).is_file()}
    return {path for name in paths for path in read_for(name)}


def read_for(path: Path) -> list[Path]:
    """The sources to check for a changed file."""
    known = compile_commands.sources()
    if path in known:
        return [path]
    if path.suffix != ".h":
        return []
    include = f'#include "{path.relative_to(ROOT / "csrc")}"'
    same = path.with_suffix(".cpp")
    return [same] if same in known else [p for p in known if include in p.read_text()][:1]


def tidy(path: Path) -> str:
    """clang-tidy's findings for a file; "" if there are none."""
    words = [sys.executable, "-c", "from clang_tidy import clang_tidy; clang_tidy()"]
    options = ["-p", str(compile_commands.TARGET.parent), "--quiet", str(path)]
    done = subprocess.run([*words, *options], capture_output=True, text=True, cwd=ROOT)
    return "" if done.returncode == 0 else done.stdout + done.stderr


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--changed", action="store_true")
    paths = sorted(changed() if parser.parse_args().changed else compile_commands.sources())
    if not paths:
        return 0
    compile_commands.main()
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        found = [text for text in pool.map(tidy, paths) if text]
    print("\n".join(found), end="")
    print(f"clang-tidy: {len(paths)} files, {len(found)} with findings")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
