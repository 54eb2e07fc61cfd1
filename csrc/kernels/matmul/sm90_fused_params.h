// The parameter of the kernels of sm90_fused.cu, shared by host and device code.
//
// One A, up to four weights B of N x K, each with its own outputs (16-bit types, contiguous rows of
// a multiple of 16 bytes):
//   layers: out[w][m, n] = round(activation(sum_k A[m, k] * B[w][n, k] + bias[w][n]));
//     with kFusedAux, of one weight, out[1] = round(sum + bias), before the activation
//   gated (TC_GATED): out[0] = round(activation(g) * u), where g and u are the sums of weights 0 and
//     1; with kFusedAux, out[1] = round(g) and out[2] = round(u)
//
// Boxes of the tensor maps: A {64, tile M}; B {64, tile N / 2}, so that a gated tile has half of
// its rows from each weight; outputs {64, 16}, swizzled by 128 bytes.
#pragma once

#include "activation_params.h"

namespace torch_cubin {

constexpr int kFusedWeights = 4;

struct alignas(64) Sm90FusedMap {
  unsigned long long words[16];
};

enum Sm90FusedFlags {
  kFusedActivation = 0,  // the activation is at bits 0 to 2: activation_params.h
  kFusedAux = 8,
  kFusedPair = 16,        // clusters of two blocks along M, each of which loads half of B for both
  kFusedSerpentine = 32,  // K backwards in every other tile, to reuse the L2 cache
};

struct Sm90FusedParams {
  Sm90FusedMap a, b[kFusedWeights], out[kFusedWeights];
  const void* bias[kFusedWeights];  // null: none; contiguous, aligned to pairs
  int n[kFusedWeights];             // columns of each weight's outputs
  int first[kFusedWeights];  // column of tiles at which each weight begins; past the last: tiles_n
  int m;
  int k_blocks;          // of 64
  int tiles_m, tiles_n;  // tiles_m in tiles of a cluster
  int group;             // rows of tiles per group of the tile order
  int flags;
  ActivationCurve curve;
};

}  // namespace torch_cubin
