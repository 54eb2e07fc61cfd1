"""What the compiler made of our kernels, where cuobjdump is at hand (a toolkit, Triton).

ptxas 13.0 turns a warp reduction under a condition into a predicated REDUX, in one case with a
predicate of something else: a block then read another sequence's lengths and hung. The sources keep
reductions out of conditions (attention_tile.cuh, `uniform`); this looks at the result.
"""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path

import pytest
import real_cubins

CUBINS = Path(__file__).resolve().parents[2] / "torch_cubin" / "cubins"
CUOBJDUMP = real_cubins.cuobjdump()
PREDICATED = re.compile(r"@!?U?P\w+\s+(U?REDUX|CREDUX)")


def attention_cubins() -> list[Path]:
    manifest = CUBINS / "manifest.json"
    if not manifest.is_file():
        return []
    kernels = json.loads(manifest.read_text())["kernels"]
    return [CUBINS / kernel["file"] for kernel in kernels if kernel["family"] == "attention"]


def test_the_pattern_knows_a_predicated_reduction() -> None:
    assert PREDICATED.search("/*0350*/ @P0 REDUX.MAX UR21, R8 ;")
    assert not PREDICATED.search("/*0350*/ REDUX.MAX UR21, R8 ;")


@pytest.mark.skipif(CUOBJDUMP is None, reason="needs cuobjdump (CUDA toolkit or Triton)")
def test_no_reduction_is_predicated() -> None:
    cubins = attention_cubins()
    if not cubins:
        pytest.skip("needs the attention kernels: make build")
    assert CUOBJDUMP is not None
    found = {}
    for cubin in cubins:
        done = subprocess.run(
            [str(CUOBJDUMP), "-sass", str(cubin)], capture_output=True, text=True, check=True
        )
        lines = [line for line in done.stdout.splitlines() if PREDICATED.search(line)]
        if lines:
            found[cubin.name] = lines[0].strip()
    assert not found
