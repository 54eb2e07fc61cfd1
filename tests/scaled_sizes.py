"""Sizes of scaled products for which the plan takes every kernel of csrc/kernels/matmul/
sm90_scaled.cu: tests/gpu runs them, tests/faults checks that all are taken."""

from __future__ import annotations

# M, N.
SIZES = [(1, 512), (64, 16384), (128, 4096), (256, 8192), (4096, 4096), (8192, 8192)]
