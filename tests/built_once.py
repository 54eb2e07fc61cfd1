"""What the tests build is kept under build/unit/, each thing named by the hash of its sources."""

from __future__ import annotations

import contextlib
import fcntl
import shutil
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
BUILD = ROOT / "build" / "unit"


@contextlib.contextmanager
def built_once(output: Path) -> Iterator[Path | None]:
    """Yields the path at which to build a file or folder named KIND-HASH; None if it exists
    already.

    It gets its name when it is complete, and older ones of its kind are removed. A second process
    waits for the first.
    """
    output.parent.mkdir(parents=True, exist_ok=True)
    kind = output.name.rpartition("-")[0]
    with (output.parent / f".{kind}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if output.exists():
            yield None
            return
        unfinished = output.with_name(f".{output.name}")
        _remove(unfinished)
        yield unfinished
        for old in output.parent.glob(f"{kind}-*"):
            _remove(old)
        unfinished.replace(output)


def _remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
