// The parameter of the sm90_skinny kernels, shared by host and device code.
//
//   out[token, row] = sum over k of tokens[token, k] * weights[row, k] (+ bias)
//
// for up to four layers of one `tokens`, each with weights, bias and out of its own. Gated kernels
// have two layers and one output: activation(layer 0) * layer 1, without a bias.
//
// `tokens` is the operand with at most 64 rows (A if M is small, else B), `weights` the other one.
// Both are described by tensor maps of 2 dims with the 128-byte swizzle:
//   tokens                          {128 bytes of K, the kernel's tokens}
//   weights, K contiguous           {128 bytes of K, `rows`; half of them if gated}
//   weights, their rows contiguous  {64 rows, the kernel's k block}; in uneven pairs those of the
//                                   second block by weights[1], {32 rows, the k block}
#pragma once

#include "activation_params.h"

namespace torch_cubin {

typedef long long tc_int64;  // device code includes no <cstdint>

constexpr int kSkinnyLayers = 4;

struct alignas(64) Sm90SkinnyMap {
  unsigned long long words[16];
};

struct Sm90SkinnyLayer {
  void* out;
  const void* bias;  // null: none
  tc_int64 out_stride_row, out_stride_token;
  tc_int64 bias_stride_row, bias_stride_token;  // one of them is 0
  int rows_count;
  int first_tile;
};

struct Sm90SkinnyParams {
  Sm90SkinnyMap weights[kSkinnyLayers], tokens;
  Sm90SkinnyLayer layers[kSkinnyLayers];
  int layers_count;  // with an output of their own
  int tokens_count, k;
  int rows;        // of the weights per block: a multiple of 8 (gated: 16), at most the kernel's
  int tiles;       // of all layers: ceil(rows_count / rows) of each (gated: of half the rows)
  int splits;      // parts of K: the blocks of a cluster; of streamed tiles 1, or 0 (below)
  int stages;      // of the ring in shared memory
  int prefetched;  // k blocks prefetched to the L2 cache before the previous kernel has ended
  int pairs;       // out's contiguous elements may be stored two at a time
  int uneven;      // blocks are in pairs, whose second one has a tile of 32 rows: of one layer
  int ring_bytes;  // of the stages in shared memory; the splits' sums follow
  int activation;  // of gated kernels
  ActivationCurve curve;
  // Streamed tiles, as in sm90_params.h. partial: two tiles of floats per block; counters: one per
  // block, zero before and after the launch. With splits 0 the block with the next part of a tile
  // continues the sums of a part.
  int polls;
  float* partial;
  int* counters;
};

}  // namespace torch_cubin
