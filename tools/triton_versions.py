"""Runs the tests of Triton kernels with each supported version of Triton, without a GPU.

    python tools/triton_versions.py [VERSION...]

Each version is installed in a folder of its own under build/triton; PyTorch is the environment's.
Too slow for CI: run `make triton-test` nightly.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
VERSIONS = ("3.3.1", "3.4.0", "3.5.1", "3.6.0", "3.7.1", "3.8.0", "3.9.0")
TESTS = ("tests/unit/test_triton.py", "tests/unit/test_producers_page.py")


def main() -> int:
    results = {}
    for version in sys.argv[1:] or VERSIONS:
        folder = ROOT / "build" / "triton" / version
        if not (folder / "triton").is_dir():
            # Without dependencies, so that nothing replaces the environment's PyTorch.
            subprocess.run(
                [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target",
                 str(folder), f"triton=={version}"], check=True,
            )  # fmt: skip
        environment = {
            **os.environ, "PYTHONPATH": f"{folder}:{os.environ.get('PYTHONPATH', '')}",
            "TRITON_CACHE_DIR": str(folder / "cache"),
        }  # fmt: skip
        print(f"Triton {version}", flush=True)
        done = subprocess.run(
            [sys.executable, "-m", "pytest", "-q", *TESTS], cwd=ROOT, env=environment
        )
        results[version] = done.returncode
    for version, code in results.items():
        print(f"Triton {version}: {'passed' if code == 0 else f'FAILED ({code})'}")
    return max(results.values())


if __name__ == "__main__":
    sys.exit(main())
