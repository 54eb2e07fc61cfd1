"""Kernels of folders of Triton's cache, launched with the user's arguments alone: block, shared
memory and hidden pointers come from the notes beside the cubin. From Python and from C++."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from gpu import hopper

import torch_cubin
from torch_cubin import cpp

ROOT = Path(__file__).resolve().parents[2]
CACHES = ROOT / "tests" / "data" / "triton"
VERSIONS = ("3.4.0", "3.6.0", "3.9.0")  # with one hidden pointer, and with two

pytestmark = hopper.for_cubins

ROW_SUMS = """
import sys, torch, triton, triton.language as tl

@triton.jit
def row_sums(x_ptr, out_ptr, columns, BLOCK: tl.constexpr):
    offsets = tl.arange(0, BLOCK)
    row = tl.program_id(0)
    x = tl.load(x_ptr + row * columns + offsets, offsets < columns, 0.0)
    tl.store(out_ptr + row, tl.sum(x, 0))  # over warps: through shared memory

x, out = torch.ones(4, 1000, device="cuda"), torch.empty(4, device="cuda")
row_sums[(4,)](x, out, 1000, BLOCK=1024, num_warps=8)
torch.cuda.synchronize()
"""


def folder_of(version: str, to: Path) -> Path:
    """A folder with one kernel, as Triton's cache has them."""
    to.mkdir()
    for suffix in (".cubin", ".json", ".ttir"):
        shutil.copy(CACHES / f"cache_{version}_sm_90a" / f"add{suffix}", to)
    return to


@pytest.mark.parametrize("version", VERSIONS)
def test_from_python(version: str, tmp_path: Path) -> None:
    kernel = torch_cubin.load(folder_of(version, tmp_path / "add"))["add"]
    n = 1008
    x, y, out = (torch.randn(n, device="cuda") for _ in range(3))
    kernel(x, y, out, n, grid=(n + 255) // 256)
    assert torch.equal(out, x + y)


@pytest.mark.parametrize("version", VERSIONS)
def test_from_cpp(version: str, tmp_path: Path) -> None:
    program = tmp_path / "triton_folder"
    source = ROOT / "tests" / "cpp" / "triton_folder.cpp"
    flags = cpp.compile_flags(False), cpp.link_flags(False)
    subprocess.run(
        ["c++", "-O1", *flags[0], str(source), "-o", str(program), *flags[1]], check=True
    )
    folder = folder_of(version, tmp_path / "add")
    done = subprocess.run([program, folder], capture_output=True, text=True, timeout=100)
    assert (done.returncode, done.stdout) == (0, "right\n"), done


def test_kernels_that_triton_compiled_in_this_process(tmp_path: Path) -> None:
    """By another process, with shared memory and more warps than the default."""
    pytest.importorskip("triton", reason="Triton is not installed")
    source = tmp_path / "row_sums.py"
    source.write_text(ROW_SUMS)
    cache = tmp_path / "cache"
    environment = {**os.environ, "TRITON_CACHE_DIR": str(cache)}
    subprocess.run([sys.executable, str(source)], env=environment, check=True, timeout=200)
    (cubin,) = cache.glob("*/row_sums.cubin")
    kernel = torch_cubin.load(cubin.parent)["row_sums"]
    x, out = torch.randn(4, 1000, device="cuda"), torch.full((4,), torch.nan, device="cuda")
    kernel(x, out, 1000, grid=4)
    torch.testing.assert_close(out, x.sum(1), rtol=1e-4, atol=1e-4)
