"""The examples of docs/producers.md run unchanged."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import re
import shutil
import zipfile
from pathlib import Path

import pytest
import real_cubins
from preloaded import PreloadedPython

from torch_cubin import errors
from torch_cubin._compile import nvrtc

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "producers.md").read_text()
# The heading of each example's section, and the modules that it needs.
NEEDS = {
    "Triton": ["triton"],
    "cuTile": ["cuda.tile"],
    "CuTe DSL": ["cutlass"],
    "CUDA C++": ["NVRTC"],
    "AOTInductor's packages": ["torch"],
    "Libraries of cubins": ["nvcc"],
}


def examples() -> dict[str, str]:
    """The Python of each section, in one piece."""
    sections = re.split(r"^## (.+)$", PAGE, flags=re.M)
    found = {}
    for title, text in zip(sections[1::2], sections[2::2], strict=True):
        blocks = re.findall(r"^```python\n(.*?)^```$", text, flags=re.M | re.S)
        if blocks:
            found[title] = "\n".join(blocks)
    return found


def is_installed(name: str) -> bool:
    if name == "nvcc":
        return shutil.which(name) is not None
    if name != "NVRTC":
        try:
            return importlib.util.find_spec(name) is not None
        except ModuleNotFoundError:  # its parent
            return False
    try:
        return nvrtc.load() is not None
    except errors.FileError:
        return False


def test_every_section_with_code_is_run() -> None:
    assert examples().keys() == NEEDS.keys()


def make_library(folder: Path, python: PreloadedPython) -> None:
    """What the section's example finds in its folder: a vendor's files."""
    code = (
        "import shutil, sys; from pathlib import Path\n"
        f"sys.path.append({str(ROOT / 'examples')!r}); import fmha_library as example\n"
        "example.LIBRARY = Path('cubins'); example.make_library(('fp16',), (64,), ('sm_90a',))\n"
        "shutil.move('cubins/fmha_table.h', 'fmha_table.h')\n"
        "shutil.copy(example.SOURCES / 'fmha_params.h', 'fmha_params.h')\n"
    )
    python.output(code, cwd=folder)


@pytest.mark.parametrize("title", NEEDS)
def test_the_example_runs(title: str, tmp_path: Path, torch_python) -> None:
    for name in NEEDS[title]:
        if not is_installed(name):
            pytest.skip(f"{name} is not installed")
    if title == "Triton" and importlib.metadata.version("triton") < "3.4":
        pytest.skip("Triton 3.3 makes no autotuner without a GPU")
    script = tmp_path / "example.py"
    script.write_text(examples()[title])
    if title == "Libraries of cubins":
        make_library(tmp_path, torch_python)
    if title.startswith("AOTInductor"):
        with zipfile.ZipFile(tmp_path / "model.pt2", "w") as package:
            package.write(real_cubins.DATA / "vec_add.sm_80.cuda118.cubin", "data/a.cubin")
    torch_python.output(script.read_text(), argv=[str(script)], cwd=tmp_path)
    if "save_package" in examples()[title]:
        assert (tmp_path / "kernels" / "manifest.json").is_file()
