"""Builds and drives tests/unit/cubin_check.cpp: csrc/cubin alone, under sanitizers.

Needs g++, and the headers of nlohmann-json, neither torch nor CUDA. The program is built once for
its sources, under build/unit/, and reused.
"""

from __future__ import annotations

import functools
import hashlib
import json
import os
import shutil
import subprocess
import sysconfig
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
BUILD = ROOT / "build" / "unit"
SANITIZE = ("-fsanitize=address,undefined", "-fno-sanitize-recover=all")
FLAGS = ("-std=c++17", "-O1", "-g", "-Wall", "-Wextra", "-Werror")


def json_include() -> Path:
    """The headers of the PyPI package nlohmann-json."""
    for key in ("purelib", "platlib"):
        folder = Path(sysconfig.get_paths()[key]) / "nlohmann_json" / "include"
        if folder.is_dir():
            return folder
    raise FileNotFoundError("nlohmann_json is not installed: pip install nlohmann-json")


def sources() -> list[Path]:
    return sorted((ROOT / "csrc" / "cubin").glob("*.cpp"))


def build(
    main: Path, compiler: str = "g++", extra: Sequence[str] = (), more: Sequence[Path] = ()
) -> Path:
    """The program of `main`, csrc/cubin and `more`, with sanitizers where the compiler has them."""
    headers = sorted((ROOT / "csrc" / "cubin").glob("*.h"))
    digest = hashlib.sha256(repr((compiler, FLAGS, SANITIZE, list(extra))).encode())
    for path in [main, *more, *sources(), *headers]:
        digest.update(path.name.encode() + b"\0" + path.read_bytes())
    program = BUILD / f"{main.stem}-{digest.hexdigest()[:16]}"
    if program.exists():
        return program
    BUILD.mkdir(parents=True, exist_ok=True)
    for old in BUILD.glob(f"{main.stem}-*"):
        old.unlink()
    unfinished = BUILD / f".{program.name}.{os.getpid()}"
    command = [compiler, *FLAGS, *extra, f"-I{ROOT / 'csrc'}", f"-isystem{json_include()}"]
    command += [str(path) for path in (main, *more, *sources())] + ["-o", str(unfinished)]
    found = subprocess.run([*command, *SANITIZE], capture_output=True, text=True)
    if found.returncode != 0 and "asan" in found.stderr:  # no runtime of the sanitizers
        found = subprocess.run(command, capture_output=True, text=True)
    assert found.returncode == 0, f"{' '.join(command)}\n{found.stderr}"
    unfinished.replace(program)  # whole or not there, whoever builds at the same time
    return program


@functools.cache
def program() -> Path:
    assert shutil.which("g++"), "g++ is missing: the C++ of csrc/cubin cannot be tested"
    return build(Path(__file__).with_suffix(".cpp"))


def run(*commands: Sequence[object], timeout: float = 300) -> list[str]:
    """The lines that the program answers to `commands`. A sanitizer's finding fails the test."""
    lines = "".join("\t".join(str(word) for word in command) + "\n" for command in commands)
    # The leak check stops a traced process; the errors below do not depend on it.
    environment = dict(os.environ, ASAN_OPTIONS="detect_leaks=0:allocator_may_return_null=0")
    found = subprocess.run(
        [program()],
        input=lines.encode("utf-8", "surrogateescape"),
        capture_output=True,
        timeout=timeout,
        env=environment,
    )
    assert found.returncode == 0, f"{commands}\n{found.stderr.decode(errors='replace')[-4000:]}"
    return found.stdout.decode().splitlines()


def facts(path: Path) -> dict[str, Any]:
    """The image in a file, or {"error": {"tag", "message"}}."""
    return json.loads(run(("facts", path))[0])


def inspect(path: Path) -> dict[str, Any]:
    """What inspect_to_json finds in a file, or {"error": {"tag", "message"}}."""
    return json.loads(run(("inspect", path))[0])
