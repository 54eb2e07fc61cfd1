// Where tiles of keys are too few for a device, `parts` work items share one: each takes every
// parts-th step of its queries, heads of the group included, so that they end together. Each stores
// its dk and dv in float32, and sm90/backward_convert.cu adds them in the order of the parts.
//
// Sums of a work item, Sm90BackwardParams::part_sums:
//   [work item][dv, dk][64 keys][8 columns][thread of a warpgroup][4]
// which are the accumulators of sm90/backward.cu and sm90/backward_wide.cu, 16 bytes a thread.
#pragma once

#include "backward_params.h"
#include "sequence.cuh"

namespace torch_cubin {
namespace sm90 {

constexpr int kPartThreads = 128;  // of a warpgroup
enum PartSum { kPartDv, kPartDk, kPartSums };

// A tile of keys of one head.
struct KeyTile {
  Sm90Sequence sequence;
  int key_tile;     // negative: none
  int head, batch;  // head: of the keys
};

// The numbers of work items: those of the same tile of keys of p.together parts of heads, then
// those of the next tile; after all tiles, those of the next heads.
struct WorkItems {
  u32 heads;   // parts of the heads of keys of all batches
  u32 places;  // tiles of keys of a head
  u32 most;    // p.together

  TC_DEVICE explicit WorkItems(const Sm90BackwardParams& p)
      : heads(static_cast<u32>(p.order == nullptr ? p.batch : 1) * (p.heads / p.group) * p.parts),
        places(p.order == nullptr ? p.key_tiles : p.order->count),
        most(p.together) {}

  // How many are together with the one that is the first of them.
  TC_DEVICE u32 together(u32 first) const { return min(most, heads - first); }

  TC_DEVICE u32 number(u32 head, u32 place) const {
    u32 first = head / most * most;
    return first * places + place * together(first) + head - first;
  }
};

// This thread's place in the sums of a work item, in floats.
TC_DEVICE tc_int64 part_place(const Sm90BackwardParams& p, u32 item, PartSum which, int keys64,
                              int thread) {
  tc_int64 block = (static_cast<tc_int64>(item) * kPartSums + which) * (p.tile_keys / 64) + keys64;
  return block * (64 * p.tile_columns) + thread * 4;
}

// In a whole warpgroup: its sums of 64 keys.
template <int kD>
TC_DEVICE void store_part(const Sm90BackwardParams& p, u32 item, PartSum which, int keys64,
                          const float (&sum)[kD / 2]) {
  float* to = p.part_sums + part_place(p, item, which, keys64, threadIdx.x % kPartThreads);
#pragma unroll
  for (int i = 0; i < kD / 8; ++i) {
    *reinterpret_cast<float4*>(to + i * (4 * kPartThreads)) =
        make_float4(sum[4 * i], sum[4 * i + 1], sum[4 * i + 2], sum[4 * i + 3]);
  }
}

}  // namespace sm90
}  // namespace torch_cubin
