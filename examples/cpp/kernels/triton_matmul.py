"""Compiles a Triton kernel ahead of time, without a GPU: a cubin for each configuration.

    pip install triton==3.6.0
    python examples/cpp/kernels/triton_matmul.py

A file's name has the configuration's hash, as Triton's own tool for this makes it (sha256 of the
signature and "warpsNxstagesM", 8 digits), and what the launch needs and no cubin says: the tiles
and the bytes of shared memory.
"""

from __future__ import annotations

import hashlib
from pathlib import Path

import triton
import triton.language as tl

HERE = Path(__file__).resolve().parent
CONFIGURATIONS = [(64, 64, 32, 4, 3), (128, 64, 32, 4, 3)]  # M, N and K of a tile, warps, stages


@triton.jit
def matmul_kernel(a, b, c, m, n, k, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr):
    rows = tl.program_id(0) * BM + tl.arange(0, BM)
    columns = tl.program_id(1) * BN + tl.arange(0, BN)
    inner = tl.arange(0, BK)
    total = tl.zeros((BM, BN), dtype=tl.float32)
    for start in range(0, k, BK):
        left = tl.load(a + rows[:, None] * k + (start + inner)[None, :])
        right = tl.load(b + (start + inner)[:, None] * n + columns[None, :])
        total = tl.dot(left, right, total)
    tl.store(c + rows[:, None] * n + columns[None, :], total)


def main() -> None:
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    for bm, bn, bk, warps, stages in CONFIGURATIONS:
        types = {"a": "*fp16", "b": "*fp16", "c": "*fp32", "m": "i32", "n": "i32", "k": "i32"}
        source = ASTSource(
            matmul_kernel,
            signature={**types, "BM": "constexpr", "BN": "constexpr", "BK": "constexpr"},
            constexprs={"BM": bm, "BN": bn, "BK": bk},
            # Addresses and sizes are multiples of 16, so that whole vectors are loaded.
            attrs={(i,): [["tt.divisibility", 16]] for i in range(6)},
        )
        options = {"num_warps": warps, "num_stages": stages}
        kernel = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)
        signature = "_".join([*types.values(), str(bm), str(bn), str(bk)])
        text = f"{signature}warps{warps}xstages{stages}"
        digest = hashlib.sha256(text.encode()).hexdigest()[:8]
        shared = kernel.metadata.shared
        name = f"triton_matmul.{digest}.{bm}x{bn}.shared{shared}.sm_90a.cubin"
        (HERE / name).write_bytes(kernel.asm["cubin"])
        print(name, text)


if __name__ == "__main__":
    main()
