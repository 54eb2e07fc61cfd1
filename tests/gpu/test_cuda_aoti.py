"""examples/aoti_runner: a declared op in a model compiled by AOTInductor, in a C++ process."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from programs import output_of

import torch_cubin
from torch_cubin import embed

FOLDER = Path(__file__).resolve().parents[2] / "examples" / "aoti_runner"

pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++, found none")


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """The example's folder, and what it said: exported, built and run."""
    folder = tmp_path_factory.mktemp("aoti")
    command = [sys.executable, str(FOLDER / "run.py"), str(folder)]
    # The C++ around the kernels need not be fast here: it compiles in half the time, and without a
    # dozen trials of the processor's vector instructions, each of which imports torch.
    environment = {
        **os.environ,
        "AOT_INDUCTOR_COMPILE_WRAPPER_OPT_LEVEL": "O0",
        "TORCHINDUCTOR_VEC_ISA_OK": "0",
    }
    return folder, output_of(command, timeout=230, env=environment)


def run(folder: Path, packages: str | Path) -> subprocess.CompletedProcess:
    library = Path(torch_cubin.__file__).with_name("_C.so")
    environment = {**os.environ, "TORCH_CUBIN_PACKAGES": str(packages)}
    command = [str(folder / "runner"), str(library), str(folder)]
    return subprocess.run(command, capture_output=True, text=True, env=environment, timeout=120)


def test_a_process_without_python_runs_the_model(made) -> None:
    _, said = made
    assert "ops from " in said
    assert "Python in this process: no" in said
    assert said.rstrip().endswith("right")


def test_ops_of_the_environment(made) -> None:
    folder, _ = made
    done = run(folder, folder / "ops")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "ops from TORCH_CUBIN_PACKAGES" in done.stdout
    assert done.stdout.rstrip().endswith("right")


def test_ops_of_a_package_in_a_library(made) -> None:
    folder, _ = made
    embed.write_unit(folder / "ops.c", package=folder / "ops")
    library = folder / "libops.so"
    subprocess.run(["gcc", "-shared", "-fPIC", folder / "ops.c", "-o", library], check=True)
    done = run(folder, library)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.rstrip().endswith("right")


def test_a_package_that_is_missing_is_named(made) -> None:
    folder, _ = made
    done = run(folder, folder / "none")
    assert done.returncode == 1
    assert "torch_cubin [file]" in done.stderr
    assert "TORCH_CUBIN_PACKAGES" in done.stderr


def test_its_package_lists_the_kernels_with_their_launches(made) -> None:
    """Inductor's Triton kernels; the first is launched as the wrapper says."""
    folder, _ = made
    (package,) = folder.glob("*.pt2")
    found = torch_cubin.inspect(package)
    assert found.entries
    launches = [launch for entry in found.entries for launch in entry.launches]
    symbols = {kernel.name for image in found.images() for kernel in image.kernels}
    assert {launch.kernel for launch in launches} == symbols
    module = torch_cubin.load(package)
    assert set(module) == symbols
    for launch in launches:
        assert launch.kernel.startswith("triton_")
        facts = module[launch.kernel].info
        assert len(launch.arguments) == len(facts.params)
        assert facts.required_block == (32 * launch.num_warps, 1, 1)
        assert launch.wrapper.endswith(".cpp")
        assert all(launch.grid)
