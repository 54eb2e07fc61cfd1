// dq_sum of sm90_backward.cu: the order of its floats, and who adds to it when.
//
// A tile of queries has pieces of 64 columns; a piece has, transposed, the accumulators of a warpgroup,
// each warp's 16 columns together: [warp][8 queries][lane][4], where lane 4 g + t has (column g, query
// 2t), (g, 2t + 1), (g + 8, 2t), (g + 8, 2t + 1). So a piece is one contiguous addition by the TMA, and
// a warp's store of 8 queries has no bank conflicts.
//
// The blocks of a head's keys add to a tile in the order of their keys, the first one stores: the same
// bits in every run, and nothing to clear. A block waits for blocks with smaller indices alone, so they
// run or have run, whatever else runs on the device.
#pragma once

#include "common/hopper.cuh"
#include "sm90_backward_params.h"

namespace torch_cubin {
namespace sm90 {

// The tiles of queries, from `begin` to before `end`, of which a block of keys sees something. All blocks
// between the first and the last that see a tile count as seeing it.
struct SeenTiles {
  int begin, end;

  TC_DEVICE SeenTiles(const Sm90BackwardParams& p, int key_tile, int rows) {
    int key = key_tile * kSm90BackwardKeys;
    begin = max(0, key - p.last) / rows;
    int last_row = key + kSm90BackwardKeys - 1 - p.first;
    end = last_row < 0 ? 0 : min(p.tiles, last_row / rows + 1);
  }
};

// The first block of keys of which a tile of queries sees something, if it sees anything.
TC_DEVICE int first_key_tile(const Sm90BackwardParams& p, int tile, int rows) {
  return max(0, tile * rows + p.first) / kSm90BackwardKeys;
}

TC_DEVICE bool sees_any_key(const Sm90BackwardParams& p, int tile, int rows) {
  int first = first_key_tile(p, tile, rows);
  return first < p.key_tiles && first * kSm90BackwardKeys <= tile * rows + rows - 1 + p.last;
}

}  // namespace sm90
}  // namespace torch_cubin
