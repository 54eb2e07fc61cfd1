"""The processes that a benchmark's contenders run in, some for each, which take turns.

After the first install() of a process, calls outside it pass through our kernels to PyTorch's, so
stock PyTorch needs processes that never install.

On a virtual machine a core may run at two thirds of its speed for seconds, when its neighbour on
the same physical core has work of others. So each round of blocks runs on two cores, all contenders
on the same ones, and the next round on others; of calls that the host bounds a process's quickest
block counts, and the median over processes.
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


@contextlib.contextmanager
def on_cores_of(turn: int) -> Iterator[None]:
    """This thread runs on one core, and all others of the process on another: so do they, at this
    turn, in any such process."""
    every = os.sched_getaffinity(0)
    cores = sorted(every)
    mine = cores[turn % len(cores)]
    others = cores[(turn + len(cores) // 2 + 1) % len(cores)]
    _move_to({others})
    os.sched_setaffinity(0, {mine})
    try:
        yield
    finally:
        _move_to(every)


def _move_to(cores: set[int]) -> None:
    """Every thread of this process."""
    for thread in os.listdir("/proc/self/task"):
        with contextlib.suppress(OSError):  # it has ended
            os.sched_setaffinity(int(thread), cores)


class BenchmarkProcess:
    """A process of `script`, whose `arguments` make it call `answer()`."""

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
            raise RuntimeError(answer["failure"])
        return answer

    def get(self, do: str, *arguments: Any) -> Any:
        self.ask(do, *arguments)
        return self.answer()

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
