"""Our kernels over aten's on the CPU's key: the files over_aten_*.py in processes of their own,
since a registration lasts as long as its process."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
# Those that only compare results with PyTorch's share a process, whose start takes seconds.
SHARED = sorted(HERE.glob("over_aten_install_*.py"))
OTHERS = sorted({*HERE.glob("over_aten_*.py")} - {*SHARED})


@pytest.mark.parametrize("files", [SHARED, *([path] for path in OTHERS)], ids=lambda f: f[0].stem)
def test_in_a_process_of_its_own(files: list[Path]) -> None:
    command = [sys.executable, "-m", "pytest", *map(str, files), "-q", "-n", "0", "-p"]
    run = subprocess.run([*command, "no:cacheprovider"], capture_output=True, text=True)
    assert run.returncode == 0, run.stdout[-4000:] + run.stderr[-2000:]
