"""Runs a test on the stand-in driver that writes a page of docs/.

For error_docs.py and attention_matrix.py.

Needs a built checkout, a C++ compiler and cuda.h, no GPU.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tests"))

from fake_driver.build import build  # noqa: E402


def write(name: str) -> int:
    """Runs tests/faults/<name>.py with TORCH_CUBIN_TEST_WRITE=1."""
    with tempfile.TemporaryDirectory() as folder:
        missing = build(Path(folder))
        if missing:
            print(missing, file=sys.stderr)
            return 1
        libraries = f"{folder}:{os.environ.get('LD_LIBRARY_PATH', '')}"
        environment = dict(os.environ, LD_LIBRARY_PATH=libraries, FAKE_CUDA_DEVICES="2")
        environment["TORCH_CUBIN_TEST_WRITE"] = "1"
        command = [sys.executable, "-m", "pytest", "-q", "-o", "python_files=fake_*.py"]
        tests = ROOT / "tests" / "faults" / f"{name}.py"
        return subprocess.run([*command, str(tests)], env=environment, cwd=ROOT).returncode
