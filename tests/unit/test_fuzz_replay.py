"""The fuzz targets over their committed inputs, without the fuzzer: what failed stays mended."""

from __future__ import annotations

import hashlib
import json
import os
import sys
from pathlib import Path

import built_once
import containers
import cubin_check
import pytest
import real_cubins
from programs import output_of

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
    printed = output_of(
        [program, *inputs], timeout=300, env=dict(os.environ, ASAN_OPTIONS="detect_leaks=0")
    )
    assert printed == f"{len(inputs)} inputs\n"


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


def program_of_declared_ops(mains: list[Path], sanitize: bool) -> Path:
    """`mains` with csrc and stand-ins for PyTorch and the driver, as one unit, since PyTorch's
    headers take the compiler seconds."""
    if fuzz.headers_of_torch() is None:
        pytest.skip("needs the CUDA toolkit's headers")
    sources = [path for path in fuzz.sources("declared") if path.parent.name != "cubin"]
    sources = [*(path for path in sources if path not in MAINS), *mains]
    cubin = cubin_check.cubin_object()
    digest = hashlib.sha256(repr((cubin.name, sanitize)).encode())
    headers = [*FUZZ.glob("*.h"), *cubin_check.CSRC.rglob("*.h")]
    for path in sorted({*headers, *(part for s in sources for part in fuzz.parts_of(s))}):
        digest.update(path.name.encode() + b"\0" + path.read_bytes())
    program = built_once.BUILD / f"{mains[-1].stem}_of_all-{digest.hexdigest()[:16]}"
    with built_once.built_once(program) as unfinished:
        if unfinished:
            unit, whole = unfinished.with_suffix(".cpp"), unfinished.with_suffix(".o")
            unit.write_text("".join(f'#include "{path}"\n' for path in sources))
            # The last -std, -O and -g count.
            flags = [*REPLAY, *fuzz.headers_of_torch(), f'-DFUZZ_DATA="{real_cubins.DATA}"']
            flags += ["-std=c++20", "-O0", "-g0", "-Wno-unused-parameter"]
            flags += ["-Wno-maybe-uninitialized"]
            cubin_check.compile_cpp(*flags, "-c", unit, "-o", whole, sanitize=sanitize)
            cubin_check.compile_cpp(whole, cubin, "-pthread", "-o", unfinished)
            unit.unlink()
            whole.unlink()
    return program


def test_replay_of_declared_ops() -> None:
    replay(program_of_declared_ops(list(MAINS), sanitize=True), corpus(list(fuzz.DECLARED)))


def test_first_uses_by_many_threads() -> None:
    """The program of `make thread-test` (tests/threads), which ThreadSanitizer watches there: 32
    threads, a slow loader, one that fails. Other sanitizers would only take longer to compile."""
    main = FUZZ.parent / "threads" / "first_use.cpp"
    program = program_of_declared_ops([main], sanitize=False)
    image = real_cubins.DATA / "several.sm_90a.cuda130.cubin"
    printed = output_of([program, image, FUZZ / "contracts.json"], timeout=300)
    assert printed.startswith("first_use: 32 threads, ")
