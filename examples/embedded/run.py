"""Kernels embedded in your own library: builds the package in this folder, then uses it.

    python examples/embedded/run.py

setup.py makes a wheel with one shared file, which holds cubins for three architectures;
CMakeLists.txt makes the same library without Python packaging. Neither needs nvcc.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
sys.path.append(str(ROOT))  # a checkout that is not installed


def build_wheel(folder: Path) -> Path:
    """Builds and installs the wheel; returns the folder of the installation."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    pip = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check"]
    options = ["--no-build-isolation", "--no-deps", "--no-index"]
    subprocess.run(
        [*pip, "wheel", *options, "--wheel-dir", str(folder), str(HERE)],
        env=environment,
        check=True,
    )
    (wheel,) = folder.glob("mine-*.whl")
    print(f"built {wheel.name}, {wheel.stat().st_size} bytes")
    target = folder / "site"
    subprocess.run([*pip, "install", *options[1:], "--target", str(target), str(wheel)], check=True)
    return target


def main() -> int:
    import torch

    with tempfile.TemporaryDirectory() as name:
        sys.path.insert(0, str(build_wheel(Path(name))))  # before the sources in this folder
        import mine

        print(mine.module)
        if not torch.cuda.is_available():
            print("No GPU here: nothing was launched.")
            return 0
        x, y = (torch.randn(1_000_003, device="cuda") for _ in range(2))
        right = torch.equal(mine.vec_add(x, y), x + y)
        print(f"mine.vec_add on {torch.cuda.get_device_name()}: {'right' if right else 'WRONG'}")
        return 0 if right else 1


if __name__ == "__main__":
    sys.exit(main())
