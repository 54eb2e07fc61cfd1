"""Sizes of scaled products for which the plan takes every kernel of csrc/kernels/matmul/
sm90_scaled.cu: tests/gpu runs them, tests/faults checks that all are taken."""

from __future__ import annotations

K = 512
# M, N.
SIZES = [(60, 64), (60, 7168), (128, 7168), (256, 7168), (512, 2112), (512, 7168)]
