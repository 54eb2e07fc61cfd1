"""Runs tests/gpu on a GPU, several files at a time if pytest-xdist is installed.

    python tools/gpu_tests.py [pytest's options]

Needs the built library and kernels and a torch with CUDA, but no .venv. A complete run writes
tests/gpu/last_run.json. It takes some minutes with 16 processors and an H200.
"""

from __future__ import annotations

import importlib.util
import os
import signal
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PROCESSES = 14  # of a GPU, at most: they share it
MIB_EACH = 8000  # of its memory for a process and its children
SECONDS_EACH = 150  # of a test, at most; the longest took 51 beside 13 others (2026-11-27)


def gpu_memory() -> list[int]:
    """MiB of each visible GPU's memory; of one, enough for all processes, if nvidia-smi fails."""
    ask = ["nvidia-smi", "--query-gpu=index,memory.total", "--format=csv,noheader,nounits"]
    try:
        lines = subprocess.run(ask, capture_output=True, text=True).stdout.splitlines()
        memory = dict(line.split(", ") for line in lines)
        visible = os.environ.get("CUDA_VISIBLE_DEVICES", ",".join(memory)).split(",")
        return [int(memory[index]) for index in visible]
    except (OSError, ValueError, KeyError):
        return [PROCESSES * MIB_EACH]


def command(processors: int, memory: list[int], xdist: bool, options: list[str]) -> list[str]:
    """pytest's command. A file's tests stay in one process (they share builds); the longest files
    run first."""
    words = [sys.executable, "-m", "pytest", "tests/gpu", "-p", "no:cacheprovider"]
    # Each process also starts children.
    processes = min(processors - 2, sum(min(PROCESSES, mib // MIB_EACH) for mib in memory))
    if xdist and processes > 1:
        words += ["-n", str(processes), "--dist", "loadfile", "--no-loadscope-reorder"]
    words += ["-o", f"faulthandler_timeout={SECONDS_EACH}", "--durations", "20"]
    return [*words, *options]


def run(words: list[str]) -> int:
    """Runs pytest. If ended early by `timeout` or Ctrl-C, pytest still reports failures so far."""
    process: subprocess.Popen | None = None

    def end(number: int, _: object) -> None:
        if process is None:
            sys.exit(128 + number)
        process.send_signal(signal.SIGINT)

    # Set before the start: a shell's background job ignores SIGINT, and children inherit that.
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, end)
    # In a process group of its own, because `timeout` signals the caller's whole group.
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
