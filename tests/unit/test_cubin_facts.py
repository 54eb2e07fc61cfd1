"""csrc/kernels/build/cubin_facts.py: the compiler's facts of a kernel, and refused kernels."""

from __future__ import annotations

from pathlib import Path

import pytest
from kernel_sources import BuildError, cubin_facts

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


def test_a_header_of_several_parameters_or_none_is_refused(tmp_path: Path) -> None:
    header = tmp_path / "x_params.h"
    for text, got in (
        ("struct X {};\n", "none"),
        ("struct AParams {\n};\nstruct BParams {\n};\n", "AParams"),
    ):
        header.write_text(text)
        with pytest.raises(BuildError, match=rf"'x_params.h' does not declare.*{got}"):
            cubin_facts.size_probe([header])


# Instructions of Hopper kernels and others: each may read or write memory of other kernels.
TOUCHES = (
    "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes"
    " [%r1], [%rd1, {%r2, %r3}], [%r4]",
    "cp.async.bulk.tensor.3d.global.shared::cta.bulk_group [%rd1, {%r1, %r2, %r3}], [%r4]",
    "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%r1], [%rd1], 16, [%r2]",
    "cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32 [%rd1], [%r1], 16",
    "cp.reduce.async.bulk.tensor.2d.global.shared::cta.add.bulk_group [%rd1, {%r1, %r2}], [%r3]",
    "red.async.relaxed.cluster.global.add.u32 [%rd1], %r1",
    "red.global.add.f32 [%rd1], %f1",
    "st.async.weak.b32 [%rd1], %r1, [%r2]",
    "multimem.ld_reduce.relaxed.sys.global.add.f32 %f1, [%rd1]",
    "multimem.red.relaxed.sys.global.add.f32 [%rd1], %f1",
    "ld.global.nc.u32 %r1, [%rd1]",
    "ld.u32 %r1, [%rd1]",
    "@%p1 st.u32 [%rd1], %r1",
    "prefetch.global.L1 [%rd1]",
    "ld.relaxed.gpu.global.b32 %r1, [%rd1]",
    "ld.global.L1::no_allocate.b32 %r1, [%rd1]",
    "cvta.to.global.u64 %rd2, %rd3; prefetch.tensormap [%rd2]",
    "tex.2d.v4.f32.f32 {%f1, %f2, %f3, %f4}, [%rd1, {%f5, %f6}]",
    "tensormap.replace.tile.global_address.global.b1024.b64 [%rd1], %rd2",
    "call.uni (retval0), vprintf, (param0, param1)",
    "exit",
    "some.new.instruction [%rd1]",
)
HARMLESS = (
    "mov.b64 %rd1, k_param_0; cvta.param.u64 %rd2, %rd1; prefetch.tensormap [%rd2]",
    "mov.b64 %rd1, k_param_0; add.s64 %rd2, %rd1, 128; prefetch.tensormap [%rd2]",
    "cp.async.bulk.prefetch.tensor.2d.L2.global.tile [%rd1, {%r1, %r2}]",
    "cp.async.bulk.prefetch.L2.global [%rd1], 256",
    "prefetch.global.L2 [%rd1]",
    "ld.relaxed.gpu.global.L1::no_allocate.b32 %r1, [%rd1]",
    "prefetch.param.tensormap [k_param_0]",
    "mbarrier.init.shared::cta.b64 [%r1], 1; fence.mbarrier_init.release.cluster",
    "mbarrier.arrive.expect_tx.shared::cta.b64 _, [%r1], 4096",
    "st.async.shared::cluster.mbarrier::complete_tx::bytes.b32 [%r1], %r2, [%r3]",
    "red.async.relaxed.cluster.shared::cluster.mbarrier::complete_tx::bytes.add.u32"
    " [%r1], %r2, [%r3]",
    "barrier.cluster.arrive.relaxed; barrier.cluster.wait; bar.sync 0",
    "griddepcontrol.launch_dependents",
    "setmaxnreg.dec.sync.aligned.u32 40",
    "ld.param.v2.u32 {%r1, %r2}, [k_param_0+8]; st.shared.v2.u32 [%r3], {%r1, %r2}",
    '.pragma "nounroll"',
)


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
        *[("sm_90a", f"{touch}; griddepcontrol.wait; ret;", False) for touch in TOUCHES],
        *[("sm_90a", f"{harmless}; griddepcontrol.wait; ret;", True) for harmless in HARMLESS],
        # Along every path: branches over the wait, a role without a wait, a wait under a predicate.
        ("sm_90a", "@%p1 bra $L; griddepcontrol.wait; $L: ld.global.u32 %r1, [%rd1]; ret;", False),
        (
            "sm_90a",
            "@%p1 bra $A; griddepcontrol.wait; bra.uni $B; $A: griddepcontrol.wait; $B: ret;",
            True,
        ),
        ("sm_90a", "@%p1 griddepcontrol.wait; ld.global.u32 %r1, [%rd1]; ret;", False),
        (
            "sm_90a",
            "bra $L; $M: ld.global.u32 %r1, [%rd1]; ret; $L: griddepcontrol.wait; bra $M;",
            True,
        ),
        ("sm_90a", "$L: @%p1 bra $L; griddepcontrol.wait; ret;", True),
        # Inline code may repeat a label in braces of its own.
        (
            "sm_90a",
            "{ W: @P bra.uni D; bra.uni W; D: } griddepcontrol.wait;"
            " { W: @P bra.uni D; bra.uni W; D: } ret;",
            True,
        ),
        (
            "sm_90a",
            "brx.idx %r1, $T; $T: .branchtargets $A, $B; $A: griddepcontrol.wait; ret; $B: ret;",
            False,
        ),
        ("sm_90a", "bra $NOWHERE; griddepcontrol.wait; ret;", False),
    ],
)
def test_kernels_wait_before_they_touch_memory(arch: str, body: str, right: bool) -> None:
    ptx = f".func helper () {{ ret; }} .visible .entry k (.param .u64 p) {{ {body} }}"
    if right:
        cubin_facts.check_waits("k", arch, ptx)
        return
    with pytest.raises(BuildError, match=rf"kernel 'k' for {arch} does not wait"):
        cubin_facts.check_waits("k", arch, ptx)
