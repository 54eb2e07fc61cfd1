"""Runs other programs."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Mapping, Sequence


def output_of(
    command: Sequence[object],
    *,
    env: Mapping[str, str] | None = None,
    cwd: str | os.PathLike[str] | None = None,
    timeout: float | None = None,
    input: str | None = None,
) -> str:
    """What the program prints, which must end with status 0."""
    done = subprocess.run(
        [*map(str, command)],
        env=env,
        cwd=cwd,
        timeout=timeout,
        input=input,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, f"{done.stdout[-8000:]}\n{done.stderr[-6000:]}"
    return done.stdout
