"""The fuzz targets over their committed inputs, without the fuzzer: what failed stays mended."""

from __future__ import annotations

import functools
import hashlib
import json
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

MAINS = (FUZZ / "main.cpp", FUZZ / "declared.cpp")
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
    assert len(files) < 350
    assert sum(path.stat().st_size for path in files) < 500_000


def test_the_report_sums_up_the_runs() -> None:
    """`python tests/fuzz/fuzz.py report` writes it; runs.jsonl is committed with it."""
    report = json.loads((FUZZ / "report.json").read_text())
    for name, total in fuzz.totals().items():
        assert total["executions"] > 0, name
        assert {key: report["formats"][name][key] for key in total} == total


def test_replay_of_bytes() -> None:
    formats = [name for name in fuzz.FORMATS if name not in fuzz.DECLARED]
    real = [f"inspect={path}" for path in real_cubins.COMMITTED + containers.COMMITTED]
    headers = b"".join(path.read_bytes() for path in sorted(FUZZ.glob("*.h")))
    main, *more = (path for path in fuzz.sources("bytes") if path.parent == FUZZ)
    extra = (*REPLAY, f"-DFUZZ_HEADERS={hashlib.sha256(headers).hexdigest()[:8]}")
    replay(cubin_check.build(main, extra, more), corpus(formats) + real)


@functools.cache
def declared_parts() -> Path:
    """csrc without what needs PyTorch or a driver, and their stand-ins, as one object file."""
    if fuzz.headers_of_torch() is None:
        pytest.skip("needs the CUDA toolkit's headers")
    sources = [path for path in fuzz.sources("declared") if path.parent.name != "cubin"]
    sources = [path for path in sources if path not in MAINS]
    return compiled("fuzz_parts", sources, ".o", "-c")


def compiled(name: str, sources: list[Path], suffix: str, *words: object) -> Path:
    """These sources as one, since PyTorch's headers take long, with `words` for the compiler."""
    headers = [*FUZZ.glob("*.h"), *cubin_check.CSRC.rglob("*.h")]
    digest = hashlib.sha256(repr([str(word) for word in words]).encode())
    for path in sorted({*headers, *(part for s in sources for part in fuzz.parts_of(s))}):
        digest.update(path.name.encode() + b"\0" + path.read_bytes())
    output = built_once.BUILD / f"{name}-{digest.hexdigest()[:16]}{suffix}"
    with built_once.built_once(output) as unfinished:
        if unfinished:
            # The last -std, -O and -g count.
            unit = unfinished.with_suffix(".cpp")
            unit.write_text("".join(f'#include "{path}"\n' for path in sources))
            flags = [*REPLAY, *fuzz.headers_of_torch(), f'-DFUZZ_DATA="{real_cubins.DATA}"']
            flags += ["-std=c++20", "-O0", "-g0", "-Wno-unused-parameter"]
            flags += ["-Wno-maybe-uninitialized"]
            cubin_check.compile_cpp(*flags, unit, *words, "-o", unfinished)
            unit.unlink()
    return output


def test_replay_of_declared_ops() -> None:
    words = (declared_parts(), cubin_check.cubin_object(), "-pthread")
    replay(compiled("fuzz_declared", list(MAINS), "", *words), corpus(list(fuzz.DECLARED)))


def test_first_uses_by_many_threads() -> None:
    """The program of `make thread-test` (tests/threads), which ThreadSanitizer watches there, by
    what the replay was made of: 32 threads, a slow loader, one that fails."""
    words = (declared_parts(), cubin_check.cubin_object(), "-pthread")
    program = compiled("first_use", [FUZZ.parent / "threads" / "first_use.cpp"], "", *words)
    image = real_cubins.DATA / "several.sm_90a.cuda130.cubin"
    found = subprocess.run(
        [program, image, FUZZ / "contracts.json"], capture_output=True, text=True, timeout=300
    )
    assert found.returncode == 0, found.stderr[-4000:]
    assert found.stdout.startswith("first_use: 32 threads, ")
