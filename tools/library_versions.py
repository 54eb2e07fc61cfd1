"""Runs the tests that touch a library with its other versions, without a GPU.

    python tools/library_versions.py triton|kernels|torch [VERSION...]

Each version is installed in a folder of its own under build/; everything else is the environment's.
Too slow for CI: `make triton-test`, `make hub-test` and `make torch-test` run it every night.
"""

from __future__ import annotations

import dataclasses
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


@dataclasses.dataclass(frozen=True)
class Library:
    versions: tuple[str, ...]
    tests: tuple[str, ...]
    # Without what it requires, nothing replaces the environment's PyTorch.
    with_requirements: bool = True


LIBRARIES = {
    "triton": Library(
        ("3.3.1", "3.4.0", "3.5.1", "3.6.0", "3.7.1", "3.8.0", "3.9.0"),
        ("tests/unit/test_triton.py", "tests/unit/test_producers_page.py"),
        with_requirements=False,
    ),
    # Of Hugging Face's hub. Not in the environment: with it, transformers would look for kernels
    # on the hub.
    "kernels": Library(("0.17.2",), ("tests/unit/test_hub.py",)),
    # Newer than the one that builds and tests the package: what stands on PyTorch's internals.
    "torch": Library(
        ("2.14.1",),
        (
            *(
                "tests/ops/test_over_aten.py",
                "tests/ops/test_inductor.py",
                "tests/ops/test_fold.py",
            ),
            *(
                "tests/ops/test_sharding.py",
                "tests/ops/test_opcheck.py",
                "tests/ops/test_autograd.py",
            ),
            *("tests/ops/test_flash_implementation.py", "tests/ops/test_vmap.py"),
        ),
    ),
}


def main() -> int:
    name, *versions = sys.argv[1:]
    library, results = LIBRARIES[name], {}
    for version in versions or library.versions:
        folder = ROOT / "build" / name / version
        if not (folder / name).is_dir():
            options = [] if library.with_requirements else ["--no-deps"]
            subprocess.run(
                [sys.executable, "-m", "pip", "install", "--quiet", *options, "--target",
                 str(folder), f"{name}=={version}"], check=True,
            )  # fmt: skip
        environment = {
            **os.environ, "PYTHONPATH": f"{folder}:{os.environ.get('PYTHONPATH', '')}",
            "TRITON_CACHE_DIR": str(folder / "cache"),
        }  # fmt: skip
        print(f"{name} {version}", flush=True)
        done = subprocess.run(
            [sys.executable, "-m", "pytest", "-q", *library.tests], cwd=ROOT, env=environment
        )
        results[version] = done.returncode
    for version, code in results.items():
        print(f"{name} {version}: {'passed' if code == 0 else f'FAILED ({code})'}")
    return max(results.values())


if __name__ == "__main__":
    sys.exit(main())
