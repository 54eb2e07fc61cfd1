"""Runs the tests on the stand-in driver: each fake_*.py in a process of its own, which finds it.

Twice: with the extension module that takes the common calls, and without it
(TORCH_CUBIN_PLAIN_LAUNCH=1). Both must do and say the same.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from fake_driver.build import build
from preloaded import PreloadedPython

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
LIBRARY = ROOT / "torch_cubin" / "_C.so"
EXTENSION = ROOT / "torch_cubin" / "_launch.abi3.so"

pytestmark = [
    pytest.mark.skipif(not LIBRARY.is_file(), reason="not a built checkout"),
    # libcudart would take the stand-in for the driver, and find most of what it needs missing.
    pytest.mark.skipif(torch.version.cuda is not None, reason="needs a CPU build of torch"),
]


@pytest.fixture(scope="module")
def python(tmp_path_factory: pytest.TempPathFactory) -> Iterator[PreloadedPython]:
    """Processes that find the stand-in driver."""
    folder = tmp_path_factory.mktemp("fake_driver")
    missing = build(folder)
    if missing:
        pytest.skip(missing)
    found = f"{folder}:{os.environ.get('LD_LIBRARY_PATH', '')}"
    # What torch.compile and fake tensors import takes four seconds, and several files need it.
    modules = ["torch._dynamo", "pytest"]
    with PreloadedPython(modules, {**os.environ, "LD_LIBRARY_PATH": found}) as python:
        yield python


NAMES = sorted(path.stem for path in HERE.glob("fake_*.py"))
# Files that test C++ only (built-in and declared ops), which does not use the extension module.
CPP_ONLY = (
    "fake_attention_matrix",
    "fake_attention_plans",
    "fake_catalog",
    "fake_contract_arguments",
    "fake_contract_fuzz",
    "fake_counters",
    "fake_cpp",
    "fake_decode",
    "fake_epilogue",
    "fake_fmha_library",
    "fake_fused",
    "fake_grouped",
    "fake_moe",
    "fake_install",
    "fake_kernel_lookup",
    "fake_kv_cache",
    "fake_losses",
    "fake_pad",
    "fake_planner",
    "fake_remembered_calls",
    "fake_requirements",
    "fake_scaled",
    "fake_rows",
    "fake_anywhere",
    "fake_sm90",
    "fake_symmetric",
    "fake_transpose",
    "fake_residues",
    "fake_unaligned",
    "fake_triton",
    "fake_tuned_calls",
    "fake_tuning",
    "fake_views",
)


@pytest.mark.parametrize(
    ("name", "launcher"),
    [
        (name, launcher)
        for name in NAMES
        for launcher in ("extension", "plain")[: 2 - name.startswith(CPP_ONLY)]
    ],
)
def test_on_the_fake_driver(name: str, launcher: str, python: PreloadedPython) -> None:
    run_on_the_fake_driver(name, launcher, python)


@pytest.mark.parametrize("name", ["fake_differential", "fake_wrong_arguments"])
def test_tensors_read_by_dlpack(name: str, python: PreloadedPython) -> None:
    """The path of a PyTorch whose tensor layout is unknown."""
    run_on_the_fake_driver(name, "dlpack", python)


def run_on_the_fake_driver(name: str, launcher: str, python: PreloadedPython) -> None:
    if launcher != "plain" and not EXTENSION.is_file():
        pytest.skip("the extension module is not built")
    environment = {
        **python.env,
        "FAKE_CUDA_DEVICES": "2",
        # Other packages' plugins are not needed; hypothesis's alone takes a second of each run.
        "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",
        "TORCH_CUBIN_PLAIN_LAUNCH": "1" if launcher == "plain" else "0",
    }
    if launcher == "dlpack":
        environment["TORCH_CUBIN_TEST_MISSING"] = "torch._C._dispatch_keys"
    arguments = ["-q", "-x", "-p", "no:cacheprovider", "-o", "python_files=fake_*.py"]
    arguments.append(str(HERE / f"{name}.py"))
    code = f"import sys, pytest; sys.exit(pytest.main({arguments!r}))"
    python.output(code, env=environment, cwd=ROOT, timeout=300)
