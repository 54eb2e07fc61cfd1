"""What C++ people use where PyTorch is not installed, and commands that do not wait for it."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys

import pytest
import real_cubins
from programs import output_of

import torch_cubin

ROOT, DATA = real_cubins.ROOT, real_cubins.DATA
PACKAGE = ROOT / "torch_cubin"
CUBIN = DATA / "several.sm_90a.cuda130.cubin"

pytestmark = pytest.mark.skipif(
    not (PACKAGE / "lib" / "libtorch_cubin.so").is_file(), reason="not a built checkout"
)


def run(*arguments: str, ok: bool = True) -> subprocess.CompletedProcess[str]:
    """Python without site-packages, so without torch; -P: nor this folder."""
    done = subprocess.run(
        [sys.executable, "-S", *arguments],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert (done.returncode == 0) == ok, done.stderr
    return done


def python(code: str) -> str:
    return run(
        "-c", f"import torch_cubin\n{code}\nimport sys\nassert 'torch' not in sys.modules"
    ).stdout


def test_torch_is_not_importable() -> None:
    assert "No module named 'torch'" in run("-c", "import torch", ok=False).stderr


def test_paths_and_flags() -> None:
    found = python(
        "print(torch_cubin.include_path(), torch_cubin.library_path(), torch_cubin.__version__)\n"
        "from torch_cubin import cpp\n"
        "print(*cpp.compile_flags(torch=False), *cpp.link_flags(torch=False), cpp.cmake_path())"
    )
    assert str(PACKAGE / "include") in found
    assert str(PACKAGE / "lib" / "libtorch_cubin.a") in found
    assert str(PACKAGE / "cmake") in found


def test_inspect() -> None:
    found = python(
        "import json\n"
        f"print(json.dumps(torch_cubin.inspect({str(CUBIN)!r}).to_dict()))\n"
        f"torch_cubin.inspect(open({str(CUBIN)!r}, 'rb').read())"
    )
    assert json.loads(found) == json.loads(json.dumps(torch_cubin.inspect(CUBIN).to_dict()))


@pytest.mark.parametrize(
    ("given", "tag"), [("b'no device code'", "ImageError image"), ("'/nowhere'", "FileError file")]
)
def test_errors_of_inspect_do_not_depend_on_torch(given, tag) -> None:
    found = python(
        "try:\n"
        f"    torch_cubin.inspect({given})\n"
        "except torch_cubin.Error as error:\n"
        "    print(type(error).__name__, error.tag, '\\n', error)"
    )
    assert found.splitlines()[0].strip() == tag
    assert "torch_cubin [" in found


def test_embed(tmp_path) -> None:
    unit = tmp_path / "unit.c"
    python(f"torch_cubin.embed.write_unit({str(unit)!r}, [{str(CUBIN)!r}], name='x')")
    assert "torch_cubin_embedded_x" in unit.read_text()


@pytest.mark.parametrize("name", ["load", "define_op", "drop_in", "compile", "report", "Report"])
def test_the_error_without_torch_says_that_torch_is_needed(name) -> None:
    for code in (f"import torch_cubin; torch_cubin.{name}", f"from torch_cubin import {name}"):
        last = run("-c", code, ok=False).stderr.splitlines()[-1]
        assert last == (
            f"ImportError: torch_cubin [file]: torch_cubin.{name} needs PyTorch: expected the "
            "package torch. Install it (torch 2.11 or newer)."
        )
    assert (
        "has no attribute 'nonsense'"
        in run("-c", "import torch_cubin as t; t.nonsense", ok=False).stderr
    )


@pytest.mark.parametrize("command", ["demo", "doctor", "tune --sweep"])
def test_commands_that_need_torch_say_so(command) -> None:
    done = run("-m", "torch_cubin", *command.split(), ok=False)
    assert "needs PyTorch" in done.stderr
    assert "Traceback" not in done.stderr


def test_commands_that_need_no_torch() -> None:
    assert run("-m", "torch_cubin", "cmake-dir").stdout.strip() == str(PACKAGE / "cmake")
    assert "vec_add" in run("-m", "torch_cubin", "inspect", str(CUBIN)).stdout
    assert run("-m", "torch_cubin", "--version").stdout.strip() == torch_cubin.__version__
    assert "cmake-dir" in run("-m", "torch_cubin", "--help").stdout


@pytest.mark.parametrize("arguments", [["inspect", str(CUBIN)], ["cmake-dir"], ["--version"]])
def test_commands_do_not_import_an_installed_torch(arguments) -> None:
    done = subprocess.run(
        [sys.executable, "-X", "importtime", "-m", "torch_cubin", *arguments],
        cwd=ROOT, capture_output=True, text=True, check=True,
    )  # fmt: skip
    imported = {line.rpartition("|")[2].strip() for line in done.stderr.splitlines()}
    assert "torch_cubin" in imported
    assert not {"torch", "numpy"} & imported


@pytest.mark.skipif(shutil.which("cmake") is None, reason="needs CMake, found none")
def test_the_folders_for_cpp_build_where_they_are_copied_to(tmp_path) -> None:
    """include, lib and cmake alone, and a Python that has neither torch nor torch_cubin."""
    there = tmp_path / "copied"
    for folder in ("include", "lib", "cmake"):
        shutil.copytree(PACKAGE / folder, there / folder)
    shutil.copy(CUBIN, tmp_path / "k.cubin")
    (tmp_path / "main.cpp").write_text(
        "#include <torch_cubin/cubin.h>\n"
        "#include <cstdio>\n"
        "TORCH_CUBIN_EMBED(kernels);\n"
        "int main() {\n"
        "  for (const auto& name : torch_cubin::Module::embedded(kernels).kernel_names())\n"
        '    std::printf("%s\\n", std::string(name).c_str());\n'
        "}\n"
    )
    (tmp_path / "CMakeLists.txt").write_text(
        "cmake_minimum_required(VERSION 3.19)\n"
        "project(mine LANGUAGES CXX)\n"
        "find_package(torch_cubin REQUIRED)\n"
        "foreach(kind torch_cubin static)\n"
        "  add_executable(mine_${kind} main.cpp)\n"
        "  target_link_libraries(mine_${kind} PRIVATE torch_cubin::${kind})\n"
        "  torch_cubin_embed(mine_${kind} NAME kernels FILES k.cubin)\n"
        "endforeach()\n"
    )
    python_alone = tmp_path / "python"
    python_alone.write_text(f'#!/bin/sh\nexec {sys.executable} -S "$@"\n')
    python_alone.chmod(0o755)
    build = tmp_path / "build"
    for command in (
        ["cmake", "-S", tmp_path, "-B", build, f"-Dtorch_cubin_DIR={there / 'cmake'}",
         f"-DPython_EXECUTABLE={python_alone}"],
        ["cmake", "--build", build],
    ):  # fmt: skip
        output_of([*map(str, command)])
    for kind in ("torch_cubin", "static"):
        names = subprocess.run(
            [build / f"mine_{kind}"], capture_output=True, text=True, check=True
        ).stdout
        assert "vec_add" in names.split()
