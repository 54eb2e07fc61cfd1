"""Our kernels over aten's on the CPU's key: the files over_aten_*.py in processes of their own,
since a registration lasts as long as its process."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from preloaded import PreloadedPython

HERE = Path(__file__).parent
# Those that only compare results with PyTorch's share a process.
SHARED = sorted(HERE.glob("over_aten_install_*.py"))
OTHERS = sorted({*HERE.glob("over_aten_*.py")} - {*SHARED})


@pytest.fixture(scope="module")
def python() -> Iterator[PreloadedPython]:
    """Processes that have imported what torch.compile needs, which takes eight seconds."""
    # Other packages' plugins are not needed; hypothesis's alone takes two seconds of each run.
    environment = {**os.environ, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    modules = ["torch._dynamo", "torch._inductor.compile_fx", "pytest"]
    with PreloadedPython(modules, environment) as python:
        yield python


@pytest.mark.parametrize("files", [SHARED, *([path] for path in OTHERS)], ids=lambda f: f[0].stem)
def test_in_a_process_of_its_own(files: list[Path], python: PreloadedPython) -> None:
    arguments = [*map(str, files), "-q", "-p", "no:cacheprovider"]
    code = f"import sys, pytest; sys.exit(pytest.main({arguments!r}))"
    python.output(code, cwd=HERE.parents[1], timeout=390)
