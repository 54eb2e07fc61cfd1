"""Runs tests/gpu, which needs a GPU, several files at a time where pytest-xdist can be imported.

    python tools/gpu_tests.py [pytest's options]

Needs the built library and kernels and a torch that sees the GPU, no .venv. A whole run writes
tests/gpu/last_run.json. With 16 processors and an H200 it takes two to three minutes.
"""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PROCESSES = 14  # at most: they share one GPU


def command(processors: int, xdist: bool, options: list[str]) -> list[str]:
    """Files stay whole (their tests share what they build) and in order: the longest come first."""
    words = [sys.executable, "-m", "pytest", "tests/gpu", "-p", "no:cacheprovider"]
    processes = min(PROCESSES, processors - 2)  # each also starts processes of its own
    if xdist and processes > 1:
        words += ["-n", str(processes), "--dist", "loadfile", "--no-loadscope-reorder"]
    return [*words, "--durations", "20", *options]


def main() -> int:
    os.environ.setdefault("TORCH_CUBIN_REQUIRE_GPU", "1")
    xdist = importlib.util.find_spec("xdist") is not None
    if not xdist:
        print("gpu_tests: pytest-xdist is missing: one file after the other", flush=True)
    words = command(os.cpu_count() or 1, xdist, sys.argv[1:])
    return subprocess.run(words, cwd=ROOT).returncode


if __name__ == "__main__":
    sys.exit(main())
