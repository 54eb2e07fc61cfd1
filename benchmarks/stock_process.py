"""Stock PyTorch in a process of its own, beside a benchmark's process that installs our kernels.

Two processes on different cores differ in host speed by up to twice: one step of a Llama took 16.1
ms in a process of stock PyTorch beside 8.4 with our kernels, in another run 6.6 beside 10.9. So
calls that are timed run `on_the_same_cores()`, in both processes, which take turns; a second process of
stock PyTorch ("stock again") shows how far two processes still differ.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

AGAIN = "stock again"
CORES = 4  # for the thread that calls, those of the backward and of CUDA


def _move_to(cores: set[int]) -> None:
    """Every thread of this process; one that begins later inherits it."""
    for thread in os.listdir("/proc/self/task"):
        with contextlib.suppress(OSError):  # it has ended
            os.sched_setaffinity(int(thread), cores)


@contextlib.contextmanager
def on_the_same_cores() -> Iterator[None]:
    """This process runs on the last cores that it may use: any such process on the same."""
    every = os.sched_getaffinity(0)
    _move_to(set(sorted(every)[-CORES:]))
    try:
        yield
    finally:
        _move_to(every)


class StockProcess:
    """A process of `script` with the option --answer, which must call `answer()`."""

    def __init__(self, script: str | Path, *arguments: str) -> None:
        self._process = subprocess.Popen(
            [sys.executable, str(script), *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def ask(self, do: str, *arguments: Any) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps([do, *arguments]) + "\n")
        self._process.stdin.flush()

    def answer(self) -> Any:
        """To the oldest question that has none."""
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        answer = json.loads(line) if line else {"failure": "its process has ended"}
        if isinstance(answer, dict) and "failure" in answer:
            raise RuntimeError(f"stock: {answer['failure']}")
        return answer

    def close(self) -> None:
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # it has ended before
            self._process.stdin.close()
        self._process.wait()


def answer(found: Callable[..., Any]) -> None:
    """What that process does, until its input ends: `found(do, *arguments)` is JSON's."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what compilers print is no answer
    for line in sys.stdin:
        try:
            result = found(*json.loads(line))
        except Exception as error:
            result = {"failure": f"{type(error).__name__}: {error}"}
        print(json.dumps(result), file=answers, flush=True)
