"""Runs tests/gpu, which needs a GPU, several files at a time where pytest-xdist can be imported.

    python tools/gpu_tests.py [pytest's options]

Needs the built library and kernels and a torch that sees the GPU, no .venv. A whole run writes
tests/gpu/last_run.json. With 16 processors and an H200 it takes some minutes.
"""

from __future__ import annotations

import importlib.util
import os
import signal
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PROCESSES = 14  # at most: they share one GPU
MIB_EACH = 8000  # of the GPU's memory, for a process and those that it starts


def gpu_memory() -> int:
    """MiB of the first GPU; more than is needed where nvidia-smi does not tell."""
    ask = ["nvidia-smi", "--query-gpu=memory.total", "--format=csv,noheader,nounits"]
    try:
        return int(subprocess.run(ask, capture_output=True, text=True).stdout.split()[0])
    except (OSError, ValueError, IndexError):
        return PROCESSES * MIB_EACH


def command(processors: int, memory: int, xdist: bool, options: list[str]) -> list[str]:
    """Files stay whole (their tests share what they build) and in order: the longest come first."""
    words = [sys.executable, "-m", "pytest", "tests/gpu", "-p", "no:cacheprovider"]
    # Each also starts processes of its own.
    processes = min(PROCESSES, processors - 2, memory // MIB_EACH)
    if xdist and processes > 1:
        words += ["-n", str(processes), "--dist", "loadfile", "--no-loadscope-reorder"]
    return [*words, "--durations", "20", *options]


def run(words: list[str]) -> int:
    """Ended early, by `timeout` or Ctrl-C, pytest says what has failed and taken long so far."""
    process: subprocess.Popen | None = None

    def end(number: int, _: object) -> None:
        if process is None:
            sys.exit(128 + number)
        process.send_signal(signal.SIGINT)

    # Before it starts: a shell's background job ignores SIGINT, and so would what it starts.
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, end)
    # In a group of its own: `timeout` sends its signal to all of the caller's.
    process = subprocess.Popen(words, cwd=ROOT, start_new_session=True)
    return process.wait()


def main() -> int:
    os.environ.setdefault("TORCH_CUBIN_REQUIRE_GPU", "1")
    xdist = importlib.util.find_spec("xdist") is not None
    if not xdist:
        print("gpu_tests: pytest-xdist is missing: one file after the other", flush=True)
    words = command(os.cpu_count() or 1, gpu_memory(), xdist, sys.argv[1:])
    return run(words)


if __name__ == "__main__":
    sys.exit(main())
