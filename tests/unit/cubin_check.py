"""Builds and drives tests/unit/cubin_check.cpp: csrc/cubin alone, under sanitizers.

Needs g++, and the headers of nlohmann-json, neither torch nor CUDA.
"""

from __future__ import annotations

import functools
import hashlib
import json
import os
import resource
import shutil
import subprocess
import sysconfig
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from built_once import BUILD, ROOT, built_once

CSRC = ROOT / "csrc"
# AddressSanitizer reports a use of a null pointer as well: without a check of each pointer for it,
# and of each object's type, the compiler needs less time.
SANITIZE = (
    "-fsanitize=address,undefined",
    "-fno-sanitize=null,vptr",
    "-fno-sanitize-recover=all",
)
FLAGS = ("-std=c++17", "-O1", "-g1", "-Wall", "-Wextra", "-Werror")
# What drives csrc/cubin runs shorter than it takes to optimise.
OF_MAINS = ("-O0",)


def json_include() -> Path:
    """The headers of the PyPI package nlohmann-json."""
    for key in ("purelib", "platlib"):
        folder = Path(sysconfig.get_paths()[key]) / "nlohmann_json" / "include"
        if folder.is_dir():
            return folder
    raise FileNotFoundError("nlohmann_json is not installed: pip install nlohmann-json")


def sources() -> list[Path]:
    return sorted((CSRC / "cubin").glob("*.cpp"))


def compile_cpp(*words: object, sanitize: bool = True) -> None:
    """Runs g++, with sanitizers if it has them."""
    command = ["g++", *FLAGS, f"-I{CSRC}", f"-isystem{json_include()}", *map(str, words)]
    options = SANITIZE if sanitize else ()
    found = subprocess.run([*command, *options], capture_output=True, text=True)
    if found.returncode != 0 and "asan" in found.stderr:  # no runtime of the sanitizers
        found = subprocess.run(command, capture_output=True, text=True)
    assert found.returncode == 0, f"{' '.join(command)}\n{found.stderr}"


def cubin_object() -> Path:
    """csrc/cubin as one object file: the headers, which all its files include, are read once."""
    headers = sorted((CSRC / "cubin").glob("*.h"))
    # JSON's templates would take a third of the compiler's time.
    text = '#pragma GCC push_options\n#pragma GCC optimize ("O0")\n'
    text += "#include <nlohmann/json.hpp>\n#pragma GCC pop_options\n"
    text += "".join(f'#include "cubin/{path.name}"\n' for path in sources())
    digest = hashlib.sha256(repr((FLAGS, SANITIZE, text)).encode())
    for path in [*sources(), *headers]:
        digest.update(path.name.encode() + b"\0" + path.read_bytes())
    output = BUILD / f"cubin-{digest.hexdigest()[:16]}.o"
    with built_once(output) as unfinished:
        if unfinished:
            unit = unfinished.with_suffix(".cpp")
            unit.write_text(text)
            compile_cpp("-c", unit, "-o", unfinished)
            unit.unlink()
    return output


def build(main: Path, extra: Sequence[str] = (), more: Sequence[Path] = ()) -> Path:
    """The program of `main`, csrc/cubin and `more`, with sanitizers where the compiler has them."""
    cubin = cubin_object()
    headers = [path for folder in ("declared", "pytorch") for path in (CSRC / folder).glob("*.h")]
    digest = hashlib.sha256(repr((cubin.name, OF_MAINS, list(extra))).encode())
    for path in [main, *more, *sorted(headers if more else [])]:
        digest.update(path.name.encode() + b"\0" + path.read_bytes())
    program = BUILD / f"{main.stem}-{digest.hexdigest()[:16]}"
    with built_once(program) as unfinished:
        if unfinished:
            # All in one: the headers are read once.
            unit = unfinished.with_suffix(".cpp")
            unit.write_text("".join(f'#include "{path}"\n' for path in (*more, main)))
            compile_cpp(*OF_MAINS, *extra, unit, cubin, "-o", unfinished)
            unit.unlink()
    return program


@functools.cache
def program() -> Path:
    assert shutil.which("g++"), "g++ is missing: the C++ of csrc/cubin cannot be tested"
    return build(Path(__file__).with_suffix(".cpp"))


def processor_seconds() -> float:
    """What the program's runs have taken: neither the machine's other work nor this process's."""
    program()  # its compilation counts as well
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def run(*commands: Sequence[object], timeout: float = 300) -> list[str]:
    """The lines that the program answers to `commands`. A sanitizer's finding fails the test."""
    lines = "".join("\t".join(str(word) for word in command) + "\n" for command in commands)
    # The leak check stops a traced process; the errors below do not depend on it. Most inputs need
    # less than 16 MB in all: to keep the usual 256 of freed memory takes a fifth of the time.
    options = "detect_leaks=0:allocator_may_return_null=0:quarantine_size_mb=16"
    environment = dict(os.environ, ASAN_OPTIONS=options)
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
