"""Sizes of scaled products for which the plan takes every kernel of csrc/kernels/matmul/
sm90_scaled.cu: tests/gpu runs them, tests/faults checks that all are taken."""

from __future__ import annotations

K = 512
# M, N.
SIZES = [
    (16, 32), (16, 7168), (16, 16384), (256, 16384), (256, 20000), (512, 2112), (700, 2112),
    (700, 4096),
]  # fmt: skip
