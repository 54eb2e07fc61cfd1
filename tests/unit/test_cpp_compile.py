"""torch_cubin/compile.h: NVRTC from C++, where its library can be found."""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
from pathlib import Path

import pytest

from torch_cubin import cpp

ROOT = Path(__file__).resolve().parents[2]

pytestmark = [
    pytest.mark.skipif(shutil.which("c++") is None, reason="needs a C++ compiler"),
    pytest.mark.skipif(
        not Path(cpp.library_path(), "libtorch_cubin.a").is_file(), reason="not a built checkout"
    ),
]


def nvrtc() -> str:
    """TORCH_CUBIN_NVRTC, or that of NVIDIA's wheels; "" where there is none."""
    if os.environ.get("TORCH_CUBIN_NVRTC"):
        return os.environ["TORCH_CUBIN_NVRTC"]
    spec = importlib.util.find_spec("nvidia")
    for folder in spec.submodule_search_locations if spec is not None else ():
        found = sorted(Path(folder).glob("*/lib/libnvrtc.so.1[0-9]"))
        if found:
            return str(found[-1])
    return ""


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    output = tmp_path_factory.mktemp("compile") / "compile"
    source = str(ROOT / "tests" / "cpp" / "compile.cpp")
    command = ["c++", "-O0", "-Wall", "-Wextra", "-Wpedantic", "-Werror"]
    command += [*cpp.compile_flags(torch=False), source, "-o", str(output)]
    subprocess.run([*command, *cpp.link_flags(torch=False)], check=True)
    return output


def run(program: Path, library: str) -> subprocess.CompletedProcess:
    environment = {**os.environ, "TORCH_CUBIN_NVRTC": library}
    return subprocess.run([str(program)], env=environment, capture_output=True, text=True)


def test_a_source_is_compiled_for_an_architecture(program: Path) -> None:
    if not nvrtc():
        pytest.skip("needs NVRTC: TORCH_CUBIN_NVRTC, or the wheel nvidia-cuda-nvrtc")
    done = run(program, nvrtc())
    lines = done.stdout.splitlines()
    assert done.returncode == 0, done.stdout
    assert "scale<float>: _Z5scaleIfEvPT_S0_i" in lines
    assert "&scale<double>: _Z5scaleIdEvPT_S0_i" in lines
    assert "torch_cubin [input]: the source 'mine.cu' does not compile" in done.stdout
    assert "nonsense" in done.stdout
    assert lines[-1] == "right"


def test_without_nvrtc_the_error_says_what_to_do(program: Path, tmp_path: Path) -> None:
    done = run(program, str(tmp_path / "libnvrtc.so.13"))
    assert done.returncode == 1
    assert done.stdout.startswith("torch_cubin [file]: NVRTC could not be opened")
    assert "TORCH_CUBIN_NVRTC" in done.stdout
