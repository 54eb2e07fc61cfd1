"""Runs the tests on the stand-in driver: each fake_*.py in a process of its own, which finds it.

Twice: with the extension module that takes the common calls, and without it
(TORCH_CUBIN_PLAIN_LAUNCH=1). Both must do and say the same.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from fake_driver.build import build

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
LIBRARY = ROOT / "torch_cubin" / "_C.so"
EXTENSION = ROOT / "torch_cubin" / "_launch.abi3.so"

pytestmark = [
    pytest.mark.skipif(not LIBRARY.is_file(), reason="not a built checkout"),
    # libcudart would take the stand-in for the driver, and find most of what it needs missing.
    pytest.mark.skipif(torch.version.cuda is not None, reason="needs a CPU build of torch"),
]


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("fake_driver")
    missing = build(path)
    if missing:
        pytest.skip(missing)
    return path


@pytest.mark.parametrize("way", ["extension", "plain"])
@pytest.mark.parametrize("name", sorted(path.stem for path in HERE.glob("fake_*.py")))
def test_on_the_fake_driver(name: str, way: str, folder: Path) -> None:
    run_on_the_fake_driver(name, way, folder)


@pytest.mark.parametrize("name", ["fake_differential", "fake_wrong_arguments"])
def test_tensors_read_by_dlpack(name: str, folder: Path) -> None:
    """The second way, of a PyTorch whose tensors are not laid out as known."""
    run_on_the_fake_driver(name, "dlpack", folder)


def run_on_the_fake_driver(name: str, way: str, folder: Path) -> None:
    if way != "plain" and not EXTENSION.is_file():
        pytest.skip("the extension module is not built")
    environment = {
        **os.environ,
        "LD_LIBRARY_PATH": f"{folder}:{os.environ.get('LD_LIBRARY_PATH', '')}",
        "FAKE_CUDA_DEVICES": "2",
        "TORCH_CUBIN_PLAIN_LAUNCH": "1" if way == "plain" else "0",
    }
    if way == "dlpack":
        environment["TORCH_CUBIN_TEST_MISSING"] = "torch._C._dispatch_keys"
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider"]
    command += ["-o", "python_files=fake_*.py", str(HERE / f"{name}.py")]
    done = subprocess.run(
        command, env=environment, cwd=ROOT, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, f"{done.stdout[-8000:]}\n{done.stderr[-4000:]}"
