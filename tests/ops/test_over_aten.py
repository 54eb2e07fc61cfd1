"""Our kernels over aten's on the CPU's key: each file of over_aten_*.py in a process of its own,
since a registration lasts as long as its process."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent


@pytest.mark.parametrize("file", sorted(path.name for path in HERE.glob("over_aten_*.py")))
def test_in_a_process_of_its_own(file: str) -> None:
    command = [sys.executable, "-m", "pytest", str(HERE / file), "-q", "-n", "0", "-p"]
    run = subprocess.run([*command, "no:cacheprovider"], capture_output=True, text=True)
    assert run.returncode == 0, run.stdout[-4000:] + run.stderr[-2000:]
