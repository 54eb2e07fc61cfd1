"""The fuzz targets over their committed inputs, without the fuzzer: what failed stays mended."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
from pathlib import Path

import built_once
import containers
import cubin_check
import pytest
import real_cubins

FUZZ = cubin_check.ROOT / "tests" / "fuzz"
sys.path.insert(0, str(FUZZ))
import fuzz  # noqa: E402

REPLAY = ("-DTORCH_CUBIN_REPLAY", f"-I{FUZZ}")


def corpus(formats: list[str]) -> list[str]:
    """FORMAT=FILE of every committed input."""
    return [
        f"{name}={path}" for name in formats for path in sorted((FUZZ / "corpus" / name).iterdir())
    ]


def replay(program: Path, inputs: list[str]) -> None:
    found = subprocess.run(
        [program, *inputs],
        capture_output=True,
        text=True,
        timeout=300,
        env=dict(os.environ, ASAN_OPTIONS="detect_leaks=0"),
    )
    assert found.returncode == 0, found.stderr[-4000:]
    assert found.stdout == f"{len(inputs)} inputs\n"


def test_the_corpus_is_small_and_whole() -> None:
    files = [path for path in (FUZZ / "corpus").rglob("*") if path.is_file()]
    assert {path.parent.name for path in files} == set(fuzz.FORMATS)
    assert len(files) < 300
    assert sum(path.stat().st_size for path in files) < 500_000


def test_replay_of_bytes() -> None:
    formats = [name for name in fuzz.FORMATS if name not in fuzz.DECLARED]
    real = [f"inspect={path}" for path in real_cubins.COMMITTED + containers.COMMITTED]
    headers = b"".join(path.read_bytes() for path in sorted(FUZZ.glob("*.h")))
    main, *more = (path for path in fuzz.sources("bytes") if path.parent == FUZZ)
    extra = (*REPLAY, f"-DFUZZ_HEADERS={hashlib.sha256(headers).hexdigest()[:8]}")
    replay(cubin_check.build(main, extra, more), corpus(formats) + real)


def test_replay_of_declared_ops() -> None:
    if fuzz.headers_of_torch() is None:
        pytest.skip("needs the CUDA toolkit's headers")
    headers = [*FUZZ.glob("*.h"), *cubin_check.CSRC.rglob("*.h")]
    sources = [path for path in fuzz.sources("declared") if path.parent.name != "cubin"]
    digest = hashlib.sha256(cubin_check.cubin_object().name.encode())
    parts = {part for source in sources for part in fuzz.parts_of(source)}
    for path in sorted({*headers, *parts}):
        digest.update(path.name.encode() + b"\0" + path.read_bytes())
    program = built_once.BUILD / f"fuzz_declared-{digest.hexdigest()[:16]}"
    with built_once.built_once(program) as unfinished:
        if unfinished:
            # The last -std, -O and -g count. All in one: PyTorch's headers are read once.
            unit = unfinished.with_suffix(".cpp")
            unit.write_text("".join(f'#include "{path}"\n' for path in sources))
            flags = [*REPLAY, *fuzz.headers_of_torch(), f'-DFUZZ_DATA="{real_cubins.DATA}"']
            flags += [
                "-std=c++20",
                "-O0",
                "-g0",
                "-Wno-unused-parameter",
                "-Wno-maybe-uninitialized",
            ]
            cubin_check.compile_cpp(*flags, unit, cubin_check.cubin_object(), "-o", unfinished)
            unit.unlink()
    replay(program, corpus(list(fuzz.DECLARED)))
