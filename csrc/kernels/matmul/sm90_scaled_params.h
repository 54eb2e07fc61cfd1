// The parameter of the kernels of sm90_scaled.cu, shared by host and device code.
//
//   out[m, n] = round(sum_k A[m, k] * B[n, k] * s(m, n, k) + bias[n])
//
// for 8-bit floats whose rows are contiguous along K. Scales are float32 at any address:
//   s = scale_a[m * a_stride] * scale_b[n * b_stride], the same for all k; stride 0: one scale
//   with kScaledBlocks, for each 128 of K (the last block of K may be shorter):
//     s = scale_a[(m >> a_shift) * a_stride + k / 128 * a_stride_k] * scale_b[...], the same of n
// Products of each 128 of K are added in float32, unless the kernel is `fast`: then the tensor
// cores, whose sums have about 14 bits, add all of K.
//
// Kernels whose entries have `grouped` 1 multiply the rows of each group by a matrix of its own,
// B[group], with the scales at scale_b + group * b_group_stride. `rows` has the rows of tiles, of
// tile M rows (group_rows.h); rows of no group are not written.
//
// Those with `grouped` 2 have an output for each group of K, out[group, m, n], the sum over its K,
// with the scales scale_a[(group * M + m) * a_stride] and those of B as above; scales of blocks of
// K, which may belong to several groups, are those of one product. `rows` has the groups
// (group_rows.h).
//
// Tensor maps, innermost dim first, swizzled by 128 bytes; boxes in parentheses:
//   A: {K (128), M (tile M, or all of fewer)}   B: {K (128), N (tile N)}
//   `grouped` 1: B has a third dim, groups (1), and two more of size 1
//   out: {N (a panel, scaled_panel()), M (16)}, swizzled by the panel's bytes; of groups of K:
//     {N, groups * M}
//
// Those with `gated` 1 have B (N, K) of a gate, and another one of an up, and no bias: `out_map` is
// the up's B, and `bias` its scales, whose strides are those of B's.
//   x[m, n] = silu(round(gate[m, n])) * round(up[m, n]), rounded to out_type;
//   out[m, n] = e4m3(x[m, n] / s), with the scale s of 128 columns of a row in `gate_scales`, both as
//   rows.cu of the folder quantize computes them. N is a multiple of 128, and out's rows are aligned
//   to 16 bytes.
#pragma once

#include "group_rows.h"

namespace torch_cubin {

// Columns of a panel of out, `full` of which are 128 bytes. Panels divide the tile, or overlap: the
// last one begins where it ends with the tile, and stores some columns a second time. Two of 64
// columns that overlap were quicker than seven of 16 (112 columns, H200: promoted sums 17.5 -> 16.0
// us), three slower than eleven of 16 in ping-pong, where nothing waits for a store (176).
constexpr int scaled_panel(int tile_n, int full, bool promoted) {
  if (promoted || tile_n < 2 * full || tile_n % full == 0) return tile_n < full ? tile_n : full;
  return tile_n % (full / 2) == 0 ? full / 2 : full / 4;
}

struct alignas(64) Sm90ScaledMap {
  unsigned long long words[16];
};

enum Sm90ScaledFlags {
  kScaledBlocks = 1,  // scales of blocks of K
  // out has no map, for example since its rows are no multiples of 16 bytes
  kScaledOutUnaligned = 2,
  kScaledPowerOfTwo = 4,  // gate_scales are powers of two
  // Of groups of K: blocks begin at multiples of 128 of K, not of 16. Rows of operands do, too, so
  // that 128 bytes are one line of the L2 cache, not parts of two.
  kScaledWholeLines = 8,
};

// Of out, of bias. An out of kScaledE4m3 has no map; magnitudes above 448 become 448.
enum Sm90ScaledType { kScaledBFloat16, kScaledFloat16, kScaledFloat32, kScaledE4m3 };

struct Sm90ScaledParams {
  Sm90ScaledMap a, b, out_map;
  const float* scale_a;
  const float* scale_b;
  const void* bias;  // null: none
  void* out;
  long long out_stride;                                  // elements
  long long a_stride, b_stride, a_stride_k, b_stride_k;  // of scales, elements
  long long bias_stride;
  const GroupRow* rows;      // grouped
  long long b_group_stride;  // grouped: of scales, elements
  int a_shift, b_shift;      // 0: a scale for each row of A (B); 7: for 128 of them
  int m, n;
  int k_blocks;     // of 128
  int stage_bytes;  // of a box of A and one of B
  int tiles_m, tiles_n;
  int group;  // rows of tiles that follow one another, column by column
  int out_type, bias_type;
  int flags;
  // Of `gated` kernels: the scale of row m and columns n is at m * gate_stride + n / 128 *
  // gate_stride_k.
  float* gate_scales;
  long long gate_stride, gate_stride_k;
};

}  // namespace torch_cubin
