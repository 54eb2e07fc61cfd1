// The parameter of the sm90_skinny kernels, shared by host and device code.
//
// out[token, row] = sum over k of tokens[token, k] * weights[row, k] (+ bias)
//
// `tokens` is the operand with at most 64 rows (A if M is small, else B), `weights` the other one.
// Both are described by tensor maps of 2 dims with the 128-byte swizzle:
//   tokens                          {128 bytes of K, the kernel's tokens}
//   weights, K contiguous           {128 bytes of K, `rows`}
//   weights, their rows contiguous  {64 rows, the kernel's k block}
#pragma once

namespace torch_cubin {

typedef long long tc_int64;  // device code includes no <cstdint>

struct alignas(64) Sm90SkinnyMap {
  unsigned long long words[16];
};

struct Sm90SkinnyParams {
  Sm90SkinnyMap weights, tokens;
  void* out;
  const void* bias;  // null: none
  tc_int64 out_stride_row, out_stride_token;
  tc_int64 bias_stride_row, bias_stride_token;  // one of them is 0
  int tokens_count, rows_count, k;
  int rows;        // per block: a multiple of 8, at most the kernel's
  int tiles;       // ceil(rows_count / rows)
  int splits;      // parts of K: the blocks of a cluster
  int stages;      // of the ring in shared memory
  int prefetched;  // k blocks prefetched to the L2 cache before the previous kernel has ended
  int pairs;       // out's contiguous elements may be stored two at a time
  int ring_bytes;  // of the stages in shared memory; the splits' sums follow
};

}  // namespace torch_cubin
