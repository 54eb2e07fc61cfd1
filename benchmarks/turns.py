"""Processes that prepare what they measure at the same time, and use the GPU in turns
(bench_models.py --models --turns)."""

from __future__ import annotations

import contextlib
import fcntl
import time
from collections.abc import Iterator
from pathlib import Path

# Some may have failed: the others go on without them.
MOST_SECONDS = 120.0


class Turns:
    """`processes` of them share an empty folder."""

    def __init__(self, folder: Path, processes: int) -> None:
        self.folder, self.processes = folder, processes
        folder.mkdir(parents=True, exist_ok=True)

    def wait_for_others(self, name: str) -> None:
        """Returns when all have called it, each with a name of its own."""
        (self.folder / f"{name}.ready").touch()
        end = time.monotonic() + MOST_SECONDS
        while len(list(self.folder.glob("*.ready"))) < self.processes:
            if time.monotonic() > end:
                print(f"{name}: others of {self.folder} are not ready; it goes on", flush=True)
                return
            time.sleep(0.1)

    @contextlib.contextmanager
    def turn(self) -> Iterator[None]:
        """No other process is in its own."""
        with open(self.folder / "turn.lock", "w") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            yield
