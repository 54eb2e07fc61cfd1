"""The layer rules hold in csrc/, and the checker catches each kind of violation."""

from __future__ import annotations

import re
from pathlib import Path

import layers
import pytest

ROOT = Path(__file__).resolve().parents[2]
CSRC = ROOT / "csrc"
CONTEXT = layers.Context(
    ops=frozenset({"matmul", "linear"}),
    kernel_sources=frozenset({"mma_matmul"}),
    kernel_macros=frozenset({"TC_TILE_M"}),
)


def test_sources_keep_to_their_layers() -> None:
    assert layers.check_tree(CSRC) == []


def test_the_checker_reads_every_layer() -> None:
    """The rules are about something: every layer has sources, every op and kernel is known."""
    for layer in layers.LAYERS:
        assert list((CSRC / layer).rglob("*.cpp")), layer
    context = layers.context_of(CSRC)
    assert {"matmul", "linear"} <= context.ops
    assert "mma_matmul" in context.kernel_sources
    assert {"TC_TILE_M", "TC_WARP_ROWS"} <= context.kernel_macros


def test_the_folders_without_torch_are_those_of_the_library() -> None:
    """setup.py links libtorch_cubin of these folders; the linker refuses one that needs another."""
    setup = (ROOT / "setup.py").read_text()
    (folders,) = re.findall(r"^WITHOUT_TORCH = (\(.*\))$", setup, re.M)
    assert eval(folders) == layers.WITHOUT_TORCH
    assert layers.LAYERS[: len(layers.WITHOUT_TORCH)] == layers.WITHOUT_TORCH


def test_folders_are_the_layers() -> None:
    folders = {path.name for path in CSRC.iterdir() if path.is_dir()} - {"__pycache__"}
    assert folders == {*layers.LAYERS, "kernels"}


def test_every_family_registers_its_ops() -> None:
    registered = {path.stem.removeprefix("ops_") for path in CSRC.glob("ops_*.cpp")}
    folders = {path.name for path in (CSRC / "ops").iterdir() if path.is_dir()}
    assert registered == folders - {"common"}


BROKEN = [
    ("cubin/elf.cpp", '#include "driver/driver.h"', "layer above"),
    ("cubin/elf.cpp", "#include <torch/csrc/stable/tensor.h>", "stands alone"),
    ("cubin/elf.cpp", "#include <cuda.h>", "only csrc/driver"),
    ("cubin/elf.cpp", "CUresult result;", "names the driver"),
    ("ops/matmul/sm90.cpp", "#include <torch/csrc/stable/ops.h>", "gives its errors tags"),
    ("driver/driver.cpp", '#include "runtime/device.h"', "layer above"),
    ("runtime/kernel.cpp", '#include "package/catalog.h"', "layer above"),
    ("driver/driver.cpp", "#include <torch/csrc/stable/tensor.h>", "knows no torch"),
    ("runtime/kernel.cpp", '#include "pytorch/tensor.h"', "layer above"),
    ("runtime/kernel.cpp", "#include <torch/csrc/stable/tensor.h>", "knows no torch"),
    ("runtime/kernel.cpp", "#include <cuda.h>", "only csrc/driver"),
    ("runtime/kernel.cpp", "#include <nlohmann/json.hpp>", "parses no files"),
    ("runtime/kernel.cpp", "#include <fstream>", "parses no files"),
    ("runtime/kernel.cpp", "Image i = parse_cubin(data, size, origin);", "parses files"),
    ("runtime/kernel.cpp", "auto* file = std::fopen(path, mode);", "parses files"),
    ("runtime/stream.cpp", "#include <dlfcn.h>", "only csrc/driver"),
    ("runtime/stream.cpp", "void* s = dlsym(library, name);", "dynamic loader"),
    ("runtime/stream.cpp", "cudaStream_t stream;\ncudaStreamSynchronize(stream);", "CUDA runtime"),
    ("runtime/stream.cpp", 'dl_open("libcuda.so.1", nullptr);', "names libcuda"),
    ("package/catalog.cpp", '#include "ops/matmul/matmul.h"', "layer above"),
    ("package/catalog.cpp", 'if (family == "matmul") return;', "knows the op 'matmul'"),
    ("package/catalog.cpp", "void add_linear();", "knows the op 'linear'"),
    ("package/catalog.cpp", '#include "pytorch/tensor.h"', "layer above"),
    ("package/catalog.cpp", "#include <torch/csrc/stable/tensor.h>", "knows no torch"),
    ("abi/kernels.cpp", "#include <torch/csrc/stable/tensor.h>", "knows no torch"),
    ("abi/kernels.cpp", '#include "pytorch/tensor.h"', "layer above"),
    ("abi/kernels.cpp", '#include "declared/contract.h"', "layer above"),
    ("abi/kernels.cpp", "#include <cuda.h>", "only csrc/driver"),
    ("package/catalog.cpp", '#include "abi/handles.h"', "layer above"),
    ("declared/call.cpp", "void add_linear();", "knows the op 'linear'"),
    ("ops/matmul/matmul.cpp", '#include "declared/contract.h"', "no declared ops"),
    ("ops/matmul/matmul.cpp", '#include "driver/driver.h"', "through csrc/runtime"),
    ("ops/matmul/matmul.cpp", "check(cuLaunchKernelEx(&c, f, p, nullptr));", "cuLaunchKernelEx"),
    ("ops/matmul/matmul.cpp", "CUdeviceptr p;", "CUdeviceptr"),
    ("ops/matmul/matmul.cpp", "int a = CU_DEVICE_ATTRIBUTE_CLOCK_RATE;", "CU_DEVICE"),
    ("ops/matmul/matmul.cpp", "driver().launch();", "calls driver()"),
    ("ops/matmul/matmul.cpp", '#include "kernels/matmul/mma_operand.cuh"', "_params.h"),
    ("ops/matmul/matmul.cpp", '#include "kernels/matmul/mma.cu"', "_params.h"),
    ("ops/matmul/matmul.cpp", 'run("mma_matmul_bf16_nt_128x128x32");', "names a kernel"),
    (
        "ops/matmul/matmul.cpp",
        "STABLE_TORCH_LIBRARY_IMPL(cubin, CUDA, m) {}",
        "STABLE_TORCH_LIBRARY",
    ),
    (
        "ops/attention/problem/arguments.cpp",
        '#include "ops/attention/plan/plan.h"',
        "uses those below it",
    ),
    (
        "ops/attention/sm90/params.h",
        '#include "ops/attention/portable/decode.h"',
        "uses those below it",
    ),
    (
        "kernels/attention/sm90/mask.cu",
        '#include "attention/sm90/mask_bits.cuh"',
        "its own folder needs no folder",
    ),
    ("runtime/kernel.cpp", '#include "kernels/matmul/matmul_params.h"', "_params.h"),
    ("ops_matmul.cpp", "int f(int x) { if (x) return 1; }", "holds logic"),
    ("ops_matmul.cpp", '#include "ops/attention/api/attention.h"', "its own family"),
    ("op_registration.h", "STABLE_TORCH_LIBRARY(cubin, m) {}", "ops_<family>.cpp"),
    ("c_api.cpp", "#include <Python.h>", "no Python C API"),
    ("c_api.cpp", "#include <pybind11/pybind11.h>", "no Python C API"),
    ("c_api.cpp", '#include "driver/table.h"', "through csrc/runtime"),
    ("helpers/misc.cpp", "int x;", "no layer"),
    ("kernels/matmul/mma.cu", '#include "cubin/error.h"', "its own folder and common"),
    ("kernels/matmul/mma.cu", "#include <cuda.h>", "stands alone"),
    ("kernels/matmul/mma.cu", '#include "attention/tile.cuh"', "its own folder and common"),
    ("kernels/common/mma.cuh", '#include "matmul/tile.cuh"', "its own folder and common"),
    ("kernels/common/mma.cuh", '#include "common/ptx.cuh"', "needs no folder"),
    ("kernels/matmul/tile.cuh", "#pragma once\nint kTileM = TC_TILE_M;", "only a .cu does"),
    ("kernels/matmul/mma.cu", "#include <torch/csrc/stable/tensor.h>", "stands alone"),
]


@pytest.mark.parametrize(("path", "source", "problem"), BROKEN)
def test_checker_catches(path: str, source: str, problem: str) -> None:
    found = layers.violations(path, f"// A comment.\n{source}\n", CONTEXT)
    assert found, source
    assert any(problem in line for line in found), found
    assert all(line.startswith(f"{path}: ") for line in found)


HONEST = [
    ("cubin/elf.cpp", '#include "cubin/error.h"\n#include <nlohmann/json.hpp>'),
    ("cubin/elf.cpp", "// as cuLibraryLoadData does, see <cuda.h>; libcuda crashes\n"),
    ("cubin/elf.cpp", 'fail("cuobjdump of a CUDA file");'),
    ("driver/driver.cpp", '#include <cuda.h>\n#include "cubin/error.h"\nCUresult r = cuInit(0);'),
    ("driver/driver.cpp", 'void* l = dlopen("libcuda.so.1", 2);'),
    ("runtime/kernel.cpp", '#include "driver/driver.h"\nCUkernel k; driver().cuLaunchKernelEx();'),
    ("runtime/stream.cpp", 'dl_loaded("libtorch_cuda.so");'),
    ("package/catalog.cpp", '// matmul, say\n#include "runtime/kernel.h"\nint matmulti;'),
    (
        "ops/matmul/matmul.cpp",
        '#include "kernels/matmul/matmul_params.h"\n#include "package/catalog.h"',
    ),
    (
        "ops/matmul/matmul.cpp",
        'find("matmul", "mma"); /* cuBLAS does: cuInit */ int cubes, CUTOFF;',
    ),
    (
        "ops/attention/sm90/params.h",
        '#include "ops/attention/plan/plan.h"\n#include "ops/attention/sm90/schedule.h"',
    ),
    ("kernels/attention/sm90/mask.cu", '#include "attention/quad.cuh"\n#include "mask_bits.cuh"'),
    ("ops_matmul.cpp", "// if\nSTABLE_TORCH_LIBRARY(cubin, m) { m.impl(name, &matmul_cuda); }"),
    ("python_calls.h", "#include <Python.h>"),
    ("kernels/matmul/mma.cu", '#include "common/ptx.cuh"\n#include "tile.cuh"\n#include <cstdint>'),
    ("kernels/matmul/mma.cu", "constexpr int kTileM = TC_TILE_M;"),
    ("kernels/matmul/mma_tile.cuh", "constexpr int kTileM = TC_TILE_M;"),
    ("kernels/matmul/tile.cuh", "TC_DEVICE int f();  // TC_TILE_M\n#define TC_D0 1"),
]


@pytest.mark.parametrize(("path", "source"), HONEST)
def test_checker_lets_pass(path: str, source: str) -> None:
    assert layers.violations(path, source, CONTEXT) == []


def test_comments_and_literals_are_distinguished() -> None:
    code = layers.without_comments('a("// no"); // yes "x\nb(\'"\'); /* "y */ c("z\\"//");')
    assert "yes" not in code
    assert "// no" in code
    assert layers.strings(code) == ['"// no"', "'\"'", '"z\\"//"']
    assert "//" not in layers.without_strings(code)


def test_python_is_not_needed_by_the_library() -> None:
    """No source of csrc/ names a Python module of the package, which C++-only users lack."""
    for path in CSRC.rglob("*.cpp"):
        code = layers.without_comments(path.read_text())
        assert not re.search(r"\bPy[A-Z]\w*\(|import torch_cubin", code), path
