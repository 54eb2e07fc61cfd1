"""vec_add for Triton (bench_launch.py): Triton reads a kernel's source from its file."""

import triton
import triton.language as tl


@triton.jit
def vec_add(x, y, z, n, BLOCK: tl.constexpr):
    index = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = index < n
    tl.store(z + index, tl.load(x + index, mask=inside) + tl.load(y + index, mask=inside), inside)


__all__ = ["vec_add"]
