"""csrc/kernels/build/cubin_facts.py: what the compiler says of a kernel, what is refused for it."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest
from kernel_sources import KERNELS, BuildError, cubin_facts

LOG = """\
ptxas info    : 0 bytes gmem
ptxas info    : Compiling entry function 'wgmma_mma_async' for 'sm_90a'
ptxas info    : Function properties for wgmma_mma_async
    {stack} bytes stack frame, {stores} bytes spill stores, {loads} bytes spill loads
ptxas info    : Used 128 registers, used 2 barriers, 104 bytes cumulative stack size, 32768 bytes \
smem
ptxas info    : Compile time = 16.924 ms
"""
SERIALISED = (
    "ptxas info    : (C7510) Potential Performance Loss: wgmma.mma_async instructions are "
    "serialized due to insufficient register resources for the wgmma pipeline in function 'k'\n"
)


def test_log_facts() -> None:
    facts = cubin_facts.parse_log(LOG.format(stack=0, stores=0, loads=0))
    assert (facts.registers, facts.static_shared, facts.barriers) == (128, 32768, 2)
    assert (facts.spill, facts.warnings) == (0, ())
    cubin_facts.check_log(facts, "k", "sm_90a", 0)


def test_log_spill_fails_unless_accepted() -> None:
    facts = cubin_facts.parse_log(LOG.format(stack=8, stores=8, loads=12))
    with pytest.raises(
        BuildError, match=r"kernel 'k' for sm_90a spills.*at most 8 bytes.*20 bytes"
    ):
        cubin_facts.check_log(facts, "k", "sm_90a", 8)
    cubin_facts.check_log(facts, "k", "sm_90a", 20)


@pytest.mark.parametrize(
    "line",
    [
        SERIALISED,
        SERIALISED.replace("C7510", "C7515"),
        "ptxas warning : (C7508) setmaxnreg ignored to maintain minimum register requirements.\n",
    ],
)
def test_log_serialised_tensor_cores_fail(line: str) -> None:
    facts = cubin_facts.parse_log(LOG.format(stack=0, stores=0, loads=0) + line)
    with pytest.raises(BuildError, match=r"kernel 'k' for sm_90a was compiled with"):
        cubin_facts.check_log(facts, "k", "sm_90a", 0)


@pytest.mark.parametrize(
    ("arch", "threads", "registers", "shared", "blocks"),
    [
        ("sm_90a", 128, 96, 8448, 5),  # registers: 20 warps of 96
        ("sm_90a", 256, 128, 16384, 2),
        ("sm_90a", 384, 168, 229376, 1),  # shared memory
        ("sm_80", 256, 32, 0, 8),  # threads
        ("sm_86", 256, 32, 0, 6),
        ("sm_90a", 32, 16, 0, 32),  # blocks
        ("sm_89", 128, 64, 49152, 2),
        ("sm_90a", 1024, 128, 0, 0),  # cannot run at all
    ],
)
def test_occupancy(arch: str, threads: int, registers: int, shared: int, blocks: int) -> None:
    assert cubin_facts.blocks_per_multiprocessor(arch, threads, registers, shared) == blocks


def test_shared_memory_limit() -> None:
    cubin_facts.check_shared("k", "sm_90a", 232448)
    with pytest.raises(BuildError, match=r"'k' for sm_86 needs too much.*101376 bytes.*101377"):
        cubin_facts.check_shared("k", "sm_86", 101377)


def test_params_size_is_what_the_compiler_says(tmp_path: Path) -> None:
    size = cubin_facts.params_size(KERNELS / "matmul" / "matmul_params.h")
    compiler = shutil.which("g++") or shutil.which("c++")
    assert compiler, "no C++ compiler"
    source = tmp_path / "size.cpp"
    source.write_text(
        '#include "matmul/matmul_params.h"\n'
        f'static_assert(sizeof(torch_cubin::MatmulParams) == {size}, "");\n'
    )
    subprocess.run([compiler, "-fsyntax-only", f"-I{KERNELS}", str(source)], check=True)


@pytest.mark.parametrize(
    ("arch", "body", "right"),
    [
        ("sm_80", "ld.global.f32 %f1, [%rd1]; ret;", True),
        ("sm_90a", "griddepcontrol.wait; ld.global.f32 %f1, [%rd1]; ret;", True),
        (
            "sm_120a",
            "ld.param.u64 %r, [p]; griddepcontrol.wait; st.global.f32 [%r], %f;",
            True,
        ),
        ("sm_90a", "ld.global.f32 %f1, [%rd1]; ret;", False),
        ("sm_100a", "ld.global.f32 %f1, [%rd1]; griddepcontrol.wait; ret;", False),
        ("sm_90a", "@%p1 ret; griddepcontrol.wait; ret;", False),
        ("sm_90a", "ld.relaxed.gpu.global.u32 %r1, [%rd1]; griddepcontrol.wait; ret;", False),
        ("sm_90a", "cp.async.cg.shared.global [%r1], [%rd1], 16; griddepcontrol.wait;", False),
    ],
)
def test_kernels_wait_before_they_touch_memory(arch: str, body: str, right: bool) -> None:
    ptx = f".func helper () {{ ret; }} .visible .entry k (.param .u64 p) {{ {body} }}"
    if right:
        cubin_facts.check_waits("k", arch, ptx)
        return
    with pytest.raises(BuildError, match=rf"kernel 'k' for {arch} does not wait"):
        cubin_facts.check_waits("k", arch, ptx)
