"""docs/your_own_kernel.md: every block of it, on a GPU."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
import tutorial


def test_every_step_of_the_tutorial_runs(tmp_path: Path) -> None:
    """In a process of its own, since it defines ops."""
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("the page compiles for compute capability 9.0")
    code = f"import sys; sys.path[:0] = {[str(tutorial.ROOT / 'tests'), str(tutorial.ROOT)]!r}; "
    code += f"import tutorial; print(tutorial.run({str(tmp_path)!r}, gpu=True))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=220)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "'python gpu': 4" in done.stdout
    assert "expected float32" in done.stdout  # the refused call of step 3
