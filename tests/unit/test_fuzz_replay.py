"""The fuzz target over its committed inputs, without the fuzzer: what once failed stays mended."""

from __future__ import annotations

import os
import subprocess

import containers
import cubin_check
import real_cubins

FUZZ = cubin_check.ROOT / "tests" / "fuzz"


def test_replay_of_the_corpus() -> None:
    inputs = sorted((FUZZ / "corpus").iterdir()) + real_cubins.COMMITTED + containers.COMMITTED
    assert len(inputs) > 20
    program = cubin_check.build(FUZZ / "parse_cubin.cpp", extra=("-DTORCH_CUBIN_REPLAY",))
    found = subprocess.run(
        [program, *inputs],
        capture_output=True,
        text=True,
        timeout=300,
        env=dict(os.environ, ASAN_OPTIONS="detect_leaks=0"),
    )
    assert found.returncode == 0, found.stderr[-4000:]
    assert found.stdout == f"{len(inputs)} inputs\n"
