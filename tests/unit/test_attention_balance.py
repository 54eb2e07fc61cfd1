"""Which block computes a tile of a balanced schedule: balance.cuh, run on the host by 32 lanes,
gives tiles to the blocks that would have them one by one."""

from __future__ import annotations

import random
import subprocess
from pathlib import Path

import cubin_check

SOURCE = Path(__file__).with_name("balance_check.cpp")
# Blocks, heads of a set, tiles of each, and the most blocks of keys of a tile.
CASES = [
    (132, 28, 32, 1000),  # causal: 4,096 rows
    (132, 200, 3, 1000),  # more heads than blocks
    (160, 31, 17, 5),  # a window
    (132, 40, 20, 1),  # equal tiles
    (3, 5, 90, 1000),
    (1, 3, 4, 2),
]


def test_tiles_go_to_the_blocks_that_would_have_them_one_by_one(tmp_path) -> None:
    program = tmp_path / "balance"
    includes = (f"-I{cubin_check.CSRC / 'kernels'}", "-Wno-unknown-pragmas")
    cubin_check.compile_cpp(*includes, SOURCE, "-o", program, sanitize=False)
    draw = random.Random(0)
    for case in CASES:
        blocks, heads, tiles, _ = case
        own = [0, blocks - 1, *draw.sample(range(blocks), min(blocks, 6))]
        if blocks <= 3:
            own = list(range(blocks))
        command = [program, *map(str, (*case, *own))]
        done = subprocess.run(command, capture_output=True, text=True, timeout=60)
        assert done.returncode == 0, (case, own, done.stdout)
        if blocks <= 3:
            assert int(done.stdout) == heads * tiles
