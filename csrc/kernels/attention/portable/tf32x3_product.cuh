// float32 products on tensor cores: each number is the sum of two tf32, big and small, and a
// product takes three mma (small * big, big * small, big * big).
//
// NOTE: an mma rounds its sum towards zero, and over many steps that bias was ten times the error
// of float32. So the products of each step are summed separately, the small ones first, and added
// by FADDs.
#pragma once

#include "common/ptx.cuh"

namespace torch_cubin {

// `small` is not rounded: the mma ignores its last 13 bits, of which at most one is set.
template <int kCount>
struct Split {
  u32 big[kCount], small[kCount];

  TC_DEVICE void set(int i, u32 bits) {
    big[i] = round_to_tf32(bits);
    small[i] = __float_as_uint(__uint_as_float(bits) - __uint_as_float(big[i]));
  }
};

// The first of several: starts from zero without registers that hold zeros.
TC_DEVICE void start_tf32(float (&d)[4], const u32 (&a)[4], u32 b0, u32 b1) {
  asm volatile(
      "mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, "
      "{%8, %9}, {%10, %10, %10, %10};"
      : "=f"(d[0]), "=f"(d[1]), "=f"(d[2]), "=f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1), "f"(0.0f));
}

// sum[first + n] += a * b[n], of m16n8 tiles, 8 deep.
//
// kInfinite: infinities are possible. Their small parts are NaN, and would make sums of products
// with small parts NaN, so these are skipped; the big parts alone give the right infinities and
// NaN.
template <bool kInfinite = false, int kTiles, int kAll>
TC_DEVICE void multiply_add(float (&sum)[kAll][4], int first, const Split<4>& a,
                            const Split<2> (&b)[kTiles]) {
  float part[kTiles][4];
#pragma unroll
  for (int n = 0; n < kTiles; ++n) start_tf32(part[n], a.small, b[n].big[0], b[n].big[1]);
#pragma unroll
  for (int n = 0; n < kTiles; ++n) mma_tf32(part[n], a.big, b[n].small[0], b[n].small[1]);
  if constexpr (kInfinite) {
#pragma unroll
    for (int n = 0; n < kTiles; ++n)
#pragma unroll
      for (int e = 0; e < 4; ++e) part[n][e] = part[n][e] == part[n][e] ? part[n][e] : 0.0f;
  }
#pragma unroll
  for (int n = 0; n < kTiles; ++n) mma_tf32(part[n], a.big, b[n].big[0], b[n].big[1]);
#pragma unroll
  for (int n = 0; n < kTiles; ++n)
#pragma unroll
    for (int e = 0; e < 4; ++e) sum[first + n][e] += part[n][e];
}

}  // namespace torch_cubin
