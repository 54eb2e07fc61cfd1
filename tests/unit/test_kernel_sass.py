"""What the compiler made of our kernels, where cuobjdump is at hand (a toolkit, Triton).

Every kernel for sm_90 and newer must wait for the one before it in the stream (ACQBULK) before it
reads or writes memory, or ends: the host launches it before that one has ended. Harmless are, as
csrc/kernels/build/ptx_waits.py says, prefetches to L2 and the one form of a load that tells what to
prefetch.

The forwards of 16-bit types on Hopper took 1.03 to 1.08 of the time for a day, because ptxas no
longer saw that their warps converge: descriptors of products were moved to uniform registers one by
one (R2UR), and a WARPSYNC stood in the middle of each block's exponentials.

Products of 16-bit types took up to 1.14 of the time with R2UR before each wgmma of their loops.

Products of groups of 8-bit floats had a third more instructions, and R2UR before their wgmma, since
a branch around shuffles was by a value of each lane: ptxas then provides for lanes that diverge.

The backward of norms of 16,384 columns took 199 us for 138, because a barrier of a cluster that
orders writes is a MEMBAR.ALL.GPU: it waits for all that the block has stored to global memory.

ptxas 13.0 turns a warp reduction under a condition into a predicated REDUX, in one case with a
predicate of something else: a block then read another sequence's lengths and hung. The sources keep
reductions out of conditions (common/uniform.cuh, `uniform`); this looks at the result.
"""

from __future__ import annotations

import json
import re
import subprocess
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest
import real_cubins

CUBINS = Path(__file__).resolve().parents[2] / "torch_cubin" / "cubins"
CUOBJDUMP = real_cubins.cuobjdump()
PREDICATED = re.compile(r"@!?U?P\w+\s+(U?REDUX|CREDUX)")

WAIT = re.compile(r"\bACQBULK\b")
# Whatever reads or writes memory that other kernels know of, or ends the block.
TOUCHES = re.compile(
    r"\b(LDG(?!\.E\.NA\.STRONG\.GPU )|LD|STG|ST|LDGSTS|LDGMC|ATOM|ATOMG|RED|REDG|EXIT|RET)\b"
    r"|\b(UBLKCP|UBLKRED|UTMALDG|UTMASTG|UTMAREDG|UREDGR|UREDG)\b"
)


def kernels_where(wanted: Callable[[dict], bool]) -> list[Path]:
    manifest = CUBINS / "manifest.json"
    if not manifest.is_file():
        return []
    return [CUBINS / k["file"] for k in json.loads(manifest.read_text())["kernels"] if wanted(k)]


@cache
def disassembly(cubin: Path) -> str:
    command = [str(CUOBJDUMP), "-sass", str(cubin)]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def instructions(cubin: Path) -> dict[str, list[str]]:
    """By kernel, in the order of their addresses."""
    functions = re.split(r"^\s*Function : (\S+)$", disassembly(cubin), flags=re.MULTILINE)
    return {
        name: re.findall(r"/\*[0-9a-f]{4,}\*/\s+(.*?);", text)
        for name, text in zip(functions[1::2], functions[2::2], strict=True)
    }


@pytest.mark.skipif(CUOBJDUMP is None, reason="needs cuobjdump (CUDA toolkit or Triton)")
def test_kernels_wait_for_the_one_before_them_first() -> None:
    cubins = set(kernels_where(lambda k: int(re.search(r"\d+", k["arch"])[0]) >= 90))
    if not cubins:
        pytest.skip("needs kernels for sm_90 or newer: make build")
    wrong = []
    for cubin in sorted(cubins):
        for name, lines in instructions(cubin).items():
            waits = next((i for i, line in enumerate(lines) if WAIT.search(line)), None)
            touches = next(i for i, line in enumerate(lines) if TOUCHES.search(line))
            if waits is None or lines[waits].startswith("@") or touches < waits:
                wrong.append(f"{cubin.name}: {name}")
    assert not wrong


def test_the_pattern_knows_a_predicated_reduction() -> None:
    assert PREDICATED.search("/*0350*/ @P0 REDUX.MAX UR21, R8 ;")
    assert not PREDICATED.search("/*0350*/ REDUX.MAX UR21, R8 ;")


@pytest.mark.skipif(CUOBJDUMP is None, reason="needs cuobjdump (CUDA toolkit or Triton)")
def test_no_reduction_is_predicated() -> None:
    cubins = kernels_where(lambda k: k["family"] == "attention")
    if not cubins:
        pytest.skip("needs the attention kernels: make build")
    found = {}
    for cubin in cubins:
        lines = [line for line in disassembly(cubin).splitlines() if PREDICATED.search(line)]
        if lines:
            found[cubin.name] = lines[0].strip()
    assert not found


@pytest.mark.skipif(CUOBJDUMP is None, reason="needs cuobjdump (CUDA toolkit or Triton)")
def test_loops_of_attention_know_that_warps_converge() -> None:
    cubins = kernels_where(lambda k: k["params_header"] == "attention/sm90/forward")
    if not cubins:
        pytest.skip("needs the attention kernels for sm_90a: make build")
    moved, split = {}, []
    for cubin in cubins:
        for name, lines in instructions(cubin).items():
            products = [i for i, line in enumerate(lines) if line.startswith("HGMMA")]
            late = sum(any("R2UR" in line for line in lines[i - 5 : i]) for i in products)
            if late > len(products) / 8:
                moved[name] = f"{late} of {len(products)}"
            power = [line.startswith("MUFU.EX2") for line in lines]
            for i, line in enumerate(lines):
                if "WARPSYNC.ALL" in line and sum(power[i - 80 : i]) > 4 < sum(power[i : i + 80]):
                    split.append(name)
    assert not moved
    assert not split


@pytest.mark.skipif(CUOBJDUMP is None, reason="needs cuobjdump (CUDA toolkit or Triton)")
def test_loops_of_products_have_their_descriptors_in_uniform_registers() -> None:
    cubins = kernels_where(lambda k: k["kind"] == "sm90" and "_tf32_" not in k["name"])
    if not cubins:
        pytest.skip("needs the kernels of products for sm_90a: make build")
    moved = {}
    for cubin in cubins:
        for name, lines in instructions(cubin).items():
            products = [i for i, line in enumerate(lines) if line.startswith("HGMMA")]
            loop = products[len(products) // 2 :]  # the first k block is not in it
            between = sum("R2UR" in line for line in lines[loop[0] : loop[-1]])
            if between > 0:
                moved[name] = between
    assert not moved


@pytest.mark.skipif(CUOBJDUMP is None, reason="needs cuobjdump (CUDA toolkit or Triton)")
def test_products_of_groups_of_8_bit_floats_know_that_lanes_converge() -> None:
    cubins = kernels_where(lambda k: k["kind"] == "sm90_scaled" and k["grouped"] > 0)
    if not cubins:
        pytest.skip("needs the kernels of 8-bit floats for sm_90a: make build")
    assert not [each.name for each in cubins if "WARPSYNC.COLLECTIVE" in disassembly(each)]


@pytest.mark.skipif(CUOBJDUMP is None, reason="needs cuobjdump (CUDA toolkit or Triton)")
def test_rows_do_not_wait_for_what_was_stored() -> None:
    cubins = kernels_where(lambda k: k["family"] == "rows" and k["arch"] == "sm_90a")
    if not cubins:
        pytest.skip("needs the kernels over rows for sm_90a: make build")
    waiting = [each.name for each in cubins if "MEMBAR" in disassembly(each)]
    assert not waiting
