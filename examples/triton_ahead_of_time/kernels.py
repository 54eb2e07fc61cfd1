"""Two kernels in Triton: an autotuned matmul, and flash attention. export.py compiles them."""

from __future__ import annotations

import triton
import triton.language as tl

CONFIGS = [
    triton.Config({"BLOCK_M": m, "BLOCK_N": n, "BLOCK_K": k}, num_warps=warps, num_stages=stages)
    for m, n, k, warps, stages in (
        (128, 128, 64, 8, 3),
        (64, 64, 64, 4, 4),
        (128, 64, 64, 4, 4),
        (128, 256, 64, 8, 3),
        (32, 64, 128, 4, 3),
    )
]


@triton.autotune(CONFIGS, key=["M", "N", "K"])
@triton.jit
def matmul(
    a_ptr, b_ptr, c_ptr, M, N, K,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """C[M, N] = A[M, K] B[K, N], all of them contiguous. Blocks that share columns of B run close
    to one another, GROUP rows of blocks at a time."""
    rows, columns = tl.cdiv(M, BLOCK_M), tl.cdiv(N, BLOCK_N)
    block = tl.program_id(0)
    first = block // (GROUP * columns) * GROUP
    height = tl.minimum(rows - first, GROUP)
    row = first + block % (GROUP * columns) % height
    column = block % (GROUP * columns) // height

    m = row * BLOCK_M + tl.arange(0, BLOCK_M)
    n = column * BLOCK_N + tl.arange(0, BLOCK_N)
    k = tl.arange(0, BLOCK_K)
    a = a_ptr + m[:, None].to(tl.int64) * K + k[None, :]
    b = b_ptr + k[:, None].to(tl.int64) * N + n[None, :]
    total = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for start in range(0, K, BLOCK_K):
        left = K - start
        x = tl.load(a, mask=(m[:, None] < M) & (k[None, :] < left), other=0.0)
        y = tl.load(b, mask=(k[:, None] < left) & (n[None, :] < N), other=0.0)
        total = tl.dot(x, y, total)
        a += BLOCK_K
        b += BLOCK_K * N
    c = c_ptr + m[:, None].to(tl.int64) * N + n[None, :]
    tl.store(c, total.to(c_ptr.dtype.element_ty), mask=(m[:, None] < M) & (n[None, :] < N))


@triton.jit
def attention(
    q_ptr, k_ptr, v_ptr, out_ptr, scale, heads, heads_kv, rows, keys,
    CAUSAL: tl.constexpr, D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """softmax(q k^T scale) v, with q and out [batch, heads, rows, D], k and v [batch, heads_kv,
    keys, D]. The last query sees the last key (lower right) where CAUSAL."""
    start = tl.program_id(0) * BLOCK_M
    head = tl.program_id(1)  # of all batches
    batch = head // heads
    head_kv = batch * heads_kv + head % heads // (heads // heads_kv)
    m = start + tl.arange(0, BLOCK_M)
    d = tl.arange(0, D)
    n = tl.arange(0, BLOCK_N)
    at = (head.to(tl.int64) * rows + m[:, None]) * D + d[None, :]
    q = tl.load(q_ptr + at, mask=m[:, None] < rows, other=0.0)
    k_at = k_ptr + head_kv.to(tl.int64) * keys * D + n[None, :] * D + d[:, None]
    v_at = v_ptr + head_kv.to(tl.int64) * keys * D + n[:, None] * D + d[None, :]

    most = tl.full((BLOCK_M,), float("-inf"), tl.float32)
    weight = tl.zeros((BLOCK_M,), tl.float32)
    total = tl.zeros((BLOCK_M, D), tl.float32)
    exp2_scale = scale * 1.4426950408889634
    end = keys
    if CAUSAL:
        end = tl.minimum(keys, start + BLOCK_M + keys - rows)
    for first in range(0, end, BLOCK_N):
        left = keys - first
        k = tl.load(k_at, mask=n[None, :] < left, other=0.0)
        scores = tl.dot(q, k) * exp2_scale
        seen = n[None, :] < left
        if CAUSAL:
            seen = seen & (first + n[None, :] <= m[:, None] + keys - rows)
        scores = tl.where(seen, scores, float("-inf"))
        now = tl.maximum(most, tl.max(scores, 1))
        # For a row that has seen no key yet, exp2(-inf - -inf) would be NaN.
        base = tl.where(now == float("-inf"), 0.0, now)
        p = tl.exp2(scores - base[:, None])
        rescale = tl.exp2(most - base)
        weight = weight * rescale + tl.sum(p, 1)
        v = tl.load(v_at, mask=n[:, None] < left, other=0.0)
        total = tl.dot(p.to(v.dtype), v, total * rescale[:, None])
        most = now
        k_at += BLOCK_N * D
        v_at += BLOCK_N * D
    out = total / tl.where(weight == 0.0, 1.0, weight)[:, None]
    tl.store(out_ptr + at, out.to(out_ptr.dtype.element_ty), mask=m[:, None] < rows)
