"""Builds the stand-ins for libcuda.so.1 and libtorch_cuda.so with the system's C++ compiler."""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]


def cuda_include() -> Path | None:
    """The folder of cuda.h, found as the build of the library finds it; None without a toolkit."""
    path = ROOT / "csrc" / "kernels" / "toolkit.py"
    spec = importlib.util.spec_from_file_location("fake_driver_toolkit", path)
    toolkit = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = toolkit  # dataclasses looks a class's module up here
    spec.loader.exec_module(toolkit)
    try:
        return Path(toolkit.find_toolkit().include)
    except Exception:  # its own error type, which is of that module
        return None


def build(folder: Path) -> str:
    """Makes both libraries in `folder`; returns what is missing for it, "" where nothing is."""
    compiler = shutil.which(os.environ.get("CXX", "g++"))
    include = cuda_include()
    if compiler is None:
        return "no C++ compiler"
    if include is None:
        return "no CUDA toolkit (cuda.h)"
    for source, name in (
        ("fake_driver.cpp", "libcuda.so.1"),
        ("fake_torch_cuda.cpp", "libtorch_cuda.so"),
    ):
        command = [compiler, "-std=c++17", "-O1", "-shared", "-fPIC", "-fvisibility=hidden"]
        command += [f"-I{ROOT / 'csrc'}", f"-I{include}", str(HERE / source)]
        command += [f"-Wl,-soname,{name}", "-o", str(folder / name)]
        subprocess.run(command, check=True, capture_output=True, text=True)
    return ""


__all__ = ["build"]
