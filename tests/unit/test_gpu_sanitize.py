"""tools/gpu_sanitize.py reads what compute-sanitizer writes."""

from __future__ import annotations

import importlib.util
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
OUTPUT = """
========= COMPUTE-SANITIZER
========= Uninitialized __global__ memory read of size 4 bytes
=========     at vec_add+0xb0
=========     by thread (0,0,0) in block (0,0,0)
=========     Address 0x7f81 is inside an allocation of 64 bytes
=========
========= Invalid __global__ write of size 2 bytes
=========     at void at::native::fill<float>(T1 *, int)+0x4f0 in fill.cu:12
=========     by thread (1,0,0) in block (0,0,0)
========= Invalid __shared__ read of size 2 bytes
=========     by thread (1,0,0) in block (0,0,0)
========= Program hit an error on CUDA API call to cuInit
========= ERROR SUMMARY: 3 errors
"""


def load():
    spec = importlib.util.spec_from_file_location("gpu_sanitize", ROOT / "tools/gpu_sanitize.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_reports_and_their_kernels() -> None:
    assert list(load().reports(OUTPUT.splitlines())) == [
        ("Uninitialized __global__ memory read of size 4 bytes", "vec_add"),
        ("Invalid __global__ write of size 2 bytes", "void at::native::fill<float>(T1 *, int)"),
        ("Invalid __shared__ read of size 2 bytes", "?"),
    ]


def test_skipped_files_exist() -> None:
    tool = load()
    files = {file.stem for file in (ROOT / "tests" / "gpu").glob("test_cuda_*.py")}
    assert {f"test_cuda_{name}" for name in tool.SKIPPED} < files
    assert len(tool.default_tests()) == len(files) - len(tool.SKIPPED)
