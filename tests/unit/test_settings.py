"""PyTorch's TF32 setting as csrc/pytorch/settings.cpp reads it: the same as torch.backends, for any
numbering of a torch's enumerators, and IEEE if it cannot be determined."""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path

import pytest
from cubin_check import json_include
from programs import output_of

ROOT = Path(__file__).resolve().parents[2]
COMPILER = os.environ.get("CXX", "g++")

pytestmark = pytest.mark.skipif(shutil.which(COMPILER) is None, reason=f"{COMPILER} is missing")

READER = """
#include "pytorch/settings.h"
extern "C" int allowed() { return torch_cubin::tf32_allowed(); }
"""

# The part of libtorch_cpu.so that is asked, with enumerators of any order, number and type.
STUB = """
#include <stdexcept>
#include <string>
namespace at {
enum class Float32Backend TYPE { BACKENDS };
enum class Float32Op TYPE { OPS };
enum class Float32Precision TYPE { PRECISIONS };
struct Context {
  Float32Precision float32Precision(Float32Backend backend, Float32Op op) const;
};
Context& globalContext() { static Context context; return context; }
static Float32Precision set = Float32Precision::NONE;
Float32Precision Context::float32Precision(Float32Backend backend, Float32Op op) const {
  const bool asked = backend == Float32Backend::CUDA && op == Float32Op::MATMUL;
  return asked ? set : Float32Precision::OTHER;
}
#ifndef NO_NAMES
Float32Backend str2backend(const std::string& name) {
  return name == "cuda" ? Float32Backend::CUDA : throw std::runtime_error("no backend");
}
Float32Op str2op(const std::string& name) {
  return name == "matmul" ? Float32Op::MATMUL : throw std::runtime_error("no op");
}
Float32Precision str2precision(const std::string& name) {
  if (name == "ieee") return Float32Precision::IEEE;
  if (name == TF32_NAME) return Float32Precision::TF32;
  throw std::runtime_error("no precision");
}
#endif
}  // namespace at
extern "C" void set_precision(int tf32) {
  at::set = tf32 != 0 ? at::Float32Precision::TF32 : at::Float32Precision::IEEE;
}
"""
NOW = {
    "TYPE": "",
    "BACKENDS": "GENERIC, CUDA, MKLDNN",
    "OPS": "ALL, CONV, RNN, MATMUL",
    "PRECISIONS": "NONE, IEEE, TF32, BF16, OTHER",
    "TF32_NAME": '"tf32"',
}


def compiled(source: str, name: str, folder: Path, *more: str) -> Path:
    file = folder / f"{name}.cpp"
    file.write_text(source)
    library = folder / f"{name}.so"
    command = [COMPILER, "-std=c++17", "-O0", "-fPIC", "-shared", f"-I{ROOT / 'csrc'}", str(file)]
    output_of([*command, *more, "-o", str(library)])
    return library


@pytest.fixture(scope="module")
def reader(tmp_path_factory) -> Path:
    names = ("pytorch/settings.cpp", "pytorch/internals.cpp", "driver/dl.cpp", "cubin/error.cpp")
    parts = [str(ROOT / "csrc" / name) for name in names]
    include = f"-isystem{json_include()}"
    return compiled(READER, "reader", tmp_path_factory.mktemp("settings"), *parts, include, "-ldl")


def answers(reader: Path, code: str, **environment: str) -> list[int]:
    program = f"import ctypes\n{code}"
    printed = output_of(
        [sys.executable, "-c", program, str(reader)], env={**os.environ, **environment}
    )
    return [int(line) for line in printed.split()]


CASES = {
    "as now": ({}, [0, 1, 0]),
    "a precision before TF32": ({"PRECISIONS": "NONE, FP8, IEEE, TF32, BF16, OTHER"}, [0, 1, 0]),
    "another order": ({"PRECISIONS": "NONE, TF32, IEEE, BF16, OTHER"}, [0, 1, 0]),
    "other backends and ops": (
        {"BACKENDS": "GENERIC, XPU, CUDA", "OPS": "ALL, MATMUL, CONV"},
        [0, 1, 0],
    ),
    "a smaller type": ({"TYPE": ": unsigned char"}, [0, 1, 0]),
    "a larger type": ({"TYPE": ": long long"}, [0, 1, 0]),
    "no names": ({"NO_NAMES": ""}, [0, 0, 0]),
    "no TF32": ({"TF32_NAME": '"tensor-float-32"'}, [0, 0, 0]),
}


@pytest.mark.parametrize("case", CASES)
def test_another_torch_has_other_enumerators(case, reader, tmp_path) -> None:
    changed, expected = CASES[case]
    macros = [f"-D{name}={value}" for name, value in (NOW | changed).items()]
    stub = compiled(STUB, "stub", tmp_path, *macros, "-Wl,-soname,libtorch_cpu.so")
    code = f"""
import sys
torch = ctypes.CDLL({str(stub)!r}, ctypes.RTLD_GLOBAL)
reader = ctypes.CDLL(sys.argv[1])
for tf32 in (0, 1, 0):
    torch.set_precision(tf32)
    print(reader.allowed())
"""
    assert answers(reader, code) == expected


@pytest.mark.parametrize(
    "symbol",
    [
        "_ZN2at13globalContextEv",
        "_ZNK2at7Context16float32PrecisionENS_14Float32BackendENS_9Float32OpE",
        "_ZN2at11str2backendERKNSt7__cxx1112basic_stringIcSt11char_traitsIcESaIcEEE",
        "_ZN2at6str2opERKNSt7__cxx1112basic_stringIcSt11char_traitsIcESaIcEEE",
        "_ZN2at13str2precisionERKNSt7__cxx1112basic_stringIcSt11char_traitsIcESaIcEEE",
    ],
)
def test_the_setting_without_a_symbol_is_ieee(symbol: str, reader, tmp_path) -> None:
    """Also where the environment alone says that it is missing, which is how that is tested."""
    macros = [f"-D{name}={value}" for name, value in NOW.items()]
    stub = compiled(STUB, "stub", tmp_path, *macros, "-Wl,-soname,libtorch_cpu.so")
    code = f"""
import sys
torch = ctypes.CDLL({str(stub)!r}, ctypes.RTLD_GLOBAL)
reader = ctypes.CDLL(sys.argv[1])
torch.set_precision(1)
print(reader.allowed())
"""
    assert answers(reader, code) == [1]
    assert answers(reader, code, TORCH_CUBIN_TEST_MISSING=symbol) == [0]


def test_the_setting_without_torch_is_ieee(reader) -> None:
    assert answers(reader, "import sys\nprint(ctypes.CDLL(sys.argv[1]).allowed())") == [0]


def test_this_torchs_settings_are_followed(reader) -> None:
    """Each change goes to a process of its own: the setting is one for all threads."""
    code = """
import sys, torch
reader = ctypes.CDLL(sys.argv[1])
matmul = torch.backends.cuda.matmul
print(reader.allowed())
for value in ("tf32", "ieee", "tf32", "none"):
    matmul.fp32_precision = value
    print(reader.allowed())
torch.backends.fp32_precision = "tf32"
print(reader.allowed())
matmul.fp32_precision = "ieee"
print(reader.allowed())
"""
    assert answers(reader, code) == [0, 1, 0, 1, 0, 1, 0]
    older = """
import sys, torch
reader = ctypes.CDLL(sys.argv[1])
for value in (True, False):
    torch.backends.cuda.matmul.allow_tf32 = value
    print(reader.allowed())
for value in ("high", "highest"):
    torch.set_float32_matmul_precision(value)
    print(reader.allowed())
"""
    assert answers(reader, older) == [1, 0, 1, 0]
