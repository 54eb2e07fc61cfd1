"""Builds the stand-ins for libcuda.so.1, libtorch_cuda.so and CUDA's tensors with the system's C++
compiler."""

from __future__ import annotations

import hashlib
import importlib.util
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import torch
from built_once import BUILD, built_once

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]


def cuda_include() -> Path | None:
    """The folder of cuda.h, found as the build of the library finds it; None without a toolkit."""
    path = ROOT / "csrc" / "kernels" / "build" / "toolkit.py"
    spec = importlib.util.spec_from_file_location("fake_driver_toolkit", path)
    toolkit = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = toolkit  # dataclasses looks a class's module up here
    spec.loader.exec_module(toolkit)
    try:
        return Path(toolkit.find_toolkit().include)
    except Exception:  # its own error type, which is of that module
        return None


def build(folder: Path) -> str:
    """Makes the libraries in `folder`; returns the missing prerequisite, or ""."""
    compiler = shutil.which(os.environ.get("CXX", "g++"))
    include = cuda_include()
    if compiler is None:
        return "no C++ compiler"
    if include is None:
        return "no CUDA toolkit (cuda.h)"
    codes = re.findall(r"^    (CUDA_ERROR_\w+)\s*=\s*(\d+)", (include / "cuda.h").read_text(), re.M)
    (folder / "fake_errors.inc").write_text("".join(f'{{{n}, "{name}"}},\n' for name, n in codes))
    for source, name in (
        ("fake_driver.cpp", "libcuda.so.1"),
        ("fake_torch_cuda.cpp", "libtorch_cuda.so"),
    ):
        command = [compiler, "-std=c++17", "-O1", "-shared", "-fPIC", "-fvisibility=hidden"]
        command += [f"-I{ROOT / 'csrc'}", f"-I{include}", f"-I{folder}", str(HERE / source)]
        command += [f"-Wl,-soname,{name}", "-o", str(folder / name)]
        subprocess.run(command, check=True, capture_output=True, text=True)
    shutil.copyfile(_tensors(compiler), folder / "fake_tensors.so")
    return ""


def _tensors(compiler: str) -> Path:
    """fake_tensors.so, kept in build/unit: PyTorch's headers take half a minute."""
    source = HERE / "fake_tensors.cpp"
    digest = hashlib.sha256(f"{compiler} {torch.__version__} ".encode() + source.read_bytes())
    library = BUILD / f"fake_tensors-{digest.hexdigest()[:16]}.so"
    root = Path(torch.__file__).resolve().parent
    command = [compiler, "-std=c++20", "-O1", "-shared", "-fPIC", str(source)]
    command += [f"-I{root / 'include'}", f"-I{root / 'include/torch/csrc/api/include'}"]
    command += [f"-L{root / 'lib'}", "-ltorch_cpu", "-lc10"]
    with built_once(library) as unfinished:  # files of tests ask for it at the same time
        if unfinished is not None:
            command += ["-o", str(unfinished)]
            subprocess.run(command, check=True, capture_output=True, text=True)
    return library


__all__ = ["build"]
