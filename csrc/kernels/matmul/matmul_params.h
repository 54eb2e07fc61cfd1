// The parameter of the matmul kernels that have none of their own, shared by host and device code.
//
// C[batch, m, n] = sum_k A[batch, m, k] * B[batch, k, n] (+ bias[n]). All strides are in elements;
// C is contiguous. Sizes and strides are 64-bit: kernels form a tile's base address in 64 bits
// and may use 32-bit offsets within a tile only.
//
// With splits > 1, grid.y = splits: block y sums its share of the k tiles and writes accumulators
// (float; double for float64) to partial[split][batch][m][n]. The reduce kernel then adds the
// partials in the order of the splits (same inputs, same bits), adds the bias, rounds and writes C.
// With splits = 1 and `partial` set, the unrounded sums go to `partial`, and C is not written.
#pragma once

typedef long long tc_int64;  // device code includes no <cstdint>

namespace torch_cubin {

constexpr int kMaxBatchDims = 4;

// MatmulParams::flags of a dot-product kernel: the operands are swapped, so the bias runs along m.
constexpr int kFlagSwapped = 1;

struct MatmulParams {
  const void* a;
  const void* b;
  const void* bias;  // null: none
  void* c;
  void* partial;  // null: rounded results go to C
  tc_int64 m, n, k;
  tc_int64 a_stride_m, a_stride_k;
  tc_int64 b_stride_k, b_stride_n;
  tc_int64 c_stride_m, c_stride_n;  // n and 1; 1 and m with kFlagSwapped
  tc_int64 bias_stride;
  tc_int64 batch;                          // product of batch_size
  tc_int64 batch_size[kMaxBatchDims];      // innermost first, 1 where unused
  tc_int64 a_batch_stride[kMaxBatchDims];  // 0 broadcasts
  tc_int64 b_batch_stride[kMaxBatchDims];
  tc_int64 tiles_m, tiles_n;  // grid.x = tiles_m * tiles_n * batch
  tc_int64 k_tiles_per_split;
  int splits;
  int flags;  // kFlagSwapped or 0
};

}  // namespace torch_cubin
