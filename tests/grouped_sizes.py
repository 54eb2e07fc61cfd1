"""Sizes of products of groups for which the plan takes every kernel of csrc/kernels/matmul/
sm90_grouped.cu: tests/gpu runs them, tests/faults checks that all are taken."""

from __future__ import annotations

# Rows, groups that divide them, N.
ROWS = [
    (8192, 1, 4096),
    (8192, 32, 7168),
    (2048, 2, 128),
    (16384, 64, 192),
    (8192, 128, 2048),
    (512, 64, 128),
]
# K, which eight groups divide, M, N.
SUMS = [(256, 8192, 4096), (512, 128, 128), (512, 64, 8192), (256, 1024, 136)]
SUMMED_GROUPS = 8
