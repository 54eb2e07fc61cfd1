// The parameter of the kernels of sm90.cu, shared by host and device code.
//
// out[b, m, n] = round(activation(alpha * sum_k A[b, m, k] * B[b, k, n] + bias) + beta * addend)
//
// A, B and, if possible, out are described by tensor maps of 2 dims, or with kSm90Batched of 5
// (columns, rows and three batch dims): any sizes, broadcast batches by stride 0. Their boxes
// depend on the tile and on the cluster:
//   K-major operand of R rows per tile: {128 bytes of K, R}, or R / s if s blocks share it
//   MN-major operand:                   {128 bytes of M or N, tile K}, or tile K / s
//   out:                                {panel columns, 16}, swizzled by the panel's bytes
//                                       (kSm90Transposed has others)
// NOTE: the TMA clips stores in steps of 16 bytes, so rows of out whose length (not only stride) is
// no multiple of that use kSm90OutUnaligned or the general epilogue.
#pragma once

#include "activation_params.h"

namespace torch_cubin {

typedef long long tc_int64;  // device code includes no <cstdint>

struct alignas(64) Sm90TensorMap {
  unsigned long long words[16];
};

enum Sm90Flags {
  kSm90Batched = 1,  // tensor maps have 5 dims
  // log2 of a cluster's blocks along N, which share A's tile: each loads an equal part for all of
  // them.
  kSm90AlongN = 1,        // at bits 1 and 2; kSm90AlongM for blocks along M, which share B's tile
  kSm90OverK = 8,         // the blocks of a cluster split K: see kSm90AlongK
  kSm90Serpentine = 16,   // K backwards in every other tile, to reuse the L2 cache
  kSm90GroupN = 32,       // the groups of the tile order run along N instead of M
  kSm90General = 64,      // the epilogue through shared memory, for cases that kSm90Finish excludes
  kSm90BiasRow = 128,     // the bias is per row instead of per column
  kSm90OutFloat = 256,    // (general) out is float32
  kSm90OutVector = 512,   // (general) four elements of out are stored at once
  kSm90AddVector = 1024,  // (general) four elements of addend are read at once
  // Each block, or each cluster that splits K, has one tile, of no pair. sm90.cu: in batches only
  // of one dim, by tiles of two or three warpgroups.
  kSm90Lone = 2048,
  kSm90Activation = 12,         // the activation is at bit 12: activation_params.h
  kSm90OutUnaligned = 1 << 15,  // (not general) rows of out are unaligned: no tensor map
  // (not general) Bias, alpha and, for 16-bit types, activation and addend are applied to the
  // accumulators. Bias and addend are then contiguous along columns and aligned to pairs; with an
  // addend n is even.
  kSm90Finish = 1 << 16,
  kSm90Activate = 1 << 17,  // (kSm90Finish) more than a bias and ReLU
  // (general, or kSm90Sums) The outermost dim of the tiles' order is the split of K: each split's
  // sums go to a separate matrix of out, out_batch_stride[0] apart.
  kSm90SplitK = 1 << 18,
  // No tensor map: the producer's threads read A's (B's) unaligned rows.
  kSm90ReadA = 1 << 19,
  kSm90ReadB = 1 << 20,
  kSm90AlongM = 21,  // at bits 21 and 22
  // Operands are swapped: out is contiguous along m. A from registers: out_stride_m is the stride
  // along n, and with kSm90Finish there is a contiguous bias of rows. Kernels with `swaps`: out_map
  // is of out as it is, its box {64 columns, 32 rows} (16 where the tile's N is no multiple of 32),
  // and there is nothing to finish but a bias of rows.
  kSm90Transposed = 1 << 23,
  // (not general, 16-bit operands) out_map is of float32, and there is no epilogue.
  kSm90Sums = 1 << 24,
  kSm90Accumulate = 1 << 25,  // (kSm90Sums) out += sum, by the TMA: nothing is read
  kSm90KeepOut = 1 << 26,     // in the L2 cache, for the next kernel; else out is evicted first
  // (kSm90OverK) At bits 27 and 28, log2 of a cluster's blocks, each of which has a part of K of
  // the same tile. A cluster has at most one tile.
  kSm90AlongK = 27,
  // (sm90.cu) The last tiles along M, or N, begin so much sooner that none of their rows, or
  // columns, are outside. Two tiles then store the same results.
  kSm90RowsInside = 1 << 29,
  kSm90ColumnsInside = 1 << 30,
};

// A 16-bit operand that the producer's threads read: rows along its contiguous dim.
struct Sm90Rows {
  const void* from;
  tc_int64 stride;     // elements
  tc_int64 low, high;  // the operand's address range; no vector outside is read
};

struct Sm90MatmulParams {
  Sm90TensorMap a, b, out_map;
  // For the general epilogue; out and its strides also with kSm90OutUnaligned and with A from
  // registers. Strides are in elements; addend's may be 0.
  void* out;
  const void* bias;    // null: none
  const void* addend;  // null: none
  tc_int64 out_stride_m, out_batch_stride[3];
  tc_int64 addend_stride_m, addend_stride_n, addend_batch_stride[3];
  tc_int64 bias_stride;
  float alpha, beta;
  int m, n;
  int k_blocks;         // 128-byte blocks of K, at least 1
  int batch[3];         // innermost first, 1 where unused
  int tiles_m;          // in tiles of a cluster, which covers the blocks along M that share B
  int tiles_n;          // likewise, the blocks along N that share A
  int group;            // rows (columns) of tiles per group of the tile order
  int whole_tiles;      // tiles that one cluster computes alone; the others are streamed
  int stream_tiles;     // streamed tiles, whose k blocks are split evenly (0: none)
  int stream_clusters;  // the first clusters do: at least stream_tiles, at most all k blocks
  int flags;
  // Streamed tiles. partial: 2 tiles of floats per block; counters: kConsumers ints per block of a
  // streamed tile, zero before and after the launch; polls: how often a finisher checks for the
  // other parts (about 100 ns each) before it leaves the tile to the part that completes last.
  int polls;
  float* partial;
  int* counters;
  ActivationCurve curve;    // for the activation
  Sm90Rows a_rows, b_rows;  // for kSm90ReadA, kSm90ReadB
  int k;                    // elements of K, for kSm90ReadA, kSm90ReadB
  // kSm90SplitK: k blocks per split; the last one may have fewer. sm90_parts.cu and
  // sm90_symmetric.cu define it for themselves.
  int split_blocks;
  // Sums of A's rows over K (sm90_row_sums.cuh): M floats for each of row_parts tiles (of each
  // split, with kSm90SplitK); null: none. Streamed tiles keep their parts in row_partial: one
  // tile's rows for each tile of `partial`.
  float* row_sums;
  float* row_partial;
  int row_parts;
};

}  // namespace torch_cubin
