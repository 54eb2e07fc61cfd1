"""Writes docs/errors.md, the message of every error, by causing each on the stand-in driver.

python tools/error_docs.py        (in a built checkout; needs a C++ compiler and cuda.h, no GPU)
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


def main() -> int:
    with tempfile.TemporaryDirectory() as folder:
        missing = build(Path(folder))
        if missing:
            print(f"error_docs.py: {missing}", file=sys.stderr)
            return 1
        libraries = f"{folder}:{os.environ.get('LD_LIBRARY_PATH', '')}"
        environment = dict(os.environ, LD_LIBRARY_PATH=libraries, FAKE_CUDA_DEVICES="2")
        environment["TORCH_CUBIN_TEST_WRITE"] = "1"
        command = [sys.executable, "-m", "pytest", "-q", "-o", "python_files=fake_*.py"]
        tests = ROOT / "tests" / "faults" / "fake_error_docs.py"
        return subprocess.run([*command, str(tests)], env=environment, cwd=ROOT).returncode


if __name__ == "__main__":
    sys.exit(main())
