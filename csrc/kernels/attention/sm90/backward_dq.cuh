// dq_sum of sm90/backward.cu: the order of its floats, and the order of the additions.
//
// A tile of queries has pieces of 64 columns; a piece has, transposed, the accumulators of a
// warpgroup, each warp's 16 columns together: [warp][8 queries][lane][4], where lane 4 g + t has
// (column g, query 2t), (g, 2t + 1), (g + 8, 2t), (g + 8, 2t + 1). So a piece is one contiguous
// addition by the TMA, and a warp's store of 8 queries has no bank conflicts.
//
// The blocks of a head's keys add to a tile in the order of their keys; the first one stores. So
// every run gives the same bits, and nothing needs to be cleared. Blocks of keys that a mask hides
// from the tile entirely add nothing; sm90/backward_delta.cu numbers the others. A block waits only
// for work items that were taken before its own, by an atomic counter, and every block ends its
// work items in the order in which it took them: of the unfinished ones, the first waits for none.
//
// All tiles of keys begin with the same queries, so that the last one waits for the additions of
// all others: where this takes long, tiles of keys are in sets, each with a dq_sum of its own,
// which sm90/backward_convert.cu adds in the order of the sets.
//
// A pair of blocks (sm90/backward_wide.cu) takes one work item together and has one place in that
// order. Each of the two adds to half of the columns, and has half of the tile's turn, so that
// neither waits for the other's additions.
#pragma once

#include "backward_params.h"
#include "sequence.cuh"

namespace torch_cubin {
namespace sm90 {

// Here `rows` are those of a tile of queries, `keys` those of a work item: of a block, or of a pair
// of blocks.

// The tiles of queries [begin, end) that attend to a block of keys. Blocks between the first and
// the last that a tile attends to count for it.
struct SeenTiles {
  int begin, end;

  TC_DEVICE SeenTiles(const Sm90Sequence& s, int key_tile, int rows, int keys) {
    int key = key_tile * keys;
    begin = max(0, key - s.last) / rows;
    int last_row = min(key + keys - 1 - s.first, s.rows - 1);
    end = last_row < 0 ? 0 : last_row / rows + 1;
  }
};

// The first block of keys that a tile of queries attends to, if any.
TC_DEVICE int first_key_tile(const Sm90Sequence& s, int tile, int rows, int keys) {
  return max(0, tile * rows + s.first) / keys;
}

TC_DEVICE bool sees_any_key(const Sm90Sequence& s, int tile, int rows, int keys) {
  int first_key = first_key_tile(s, tile, rows, keys) * keys;
  return first_key < s.columns && first_key <= tile * rows + rows - 1 + s.last;
}

// The first block of keys of those of a set that a tile of queries attends to, if any.
TC_DEVICE int first_key_tile_of(const Sm90BackwardParams& p, int set, const Sm90Sequence& s,
                                int tile, int rows, int keys) {
  return max(first_key_tile(s, tile, rows, keys), set * p.set_keys);
}

// The position of a mask's tiles for a head and a tile of queries.
struct MaskPlace {
  tc_int64 plane;  // of batch and head
  int tile;

  TC_DEVICE MaskPlace(const Sm90MaskSteps& bits, int batch, int head, int tile_)
      : plane(static_cast<tc_int64>(bits.batches == 1 ? 0 : batch) * bits.heads +
              (bits.heads == 1 ? 0 : head)),
        tile(bits.tiles == 1 ? 0 : tile_) {}

  // Index in Sm90MaskSteps::steps.
  TC_DEVICE tc_int64 step(const Sm90BackwardParams& p, int key_tile) const {
    return (plane * p.key_tiles + key_tile) * p.bits.tiles + tile;
  }
};

// The parts of an entry of Sm90MaskSteps::steps: the class, and the number of earlier blocks of
// keys that take the step.
TC_DEVICE u32 step_class(u32 step) { return step & ((1 << kStepClassBits) - 1); }
TC_DEVICE int step_rank(u32 step) { return static_cast<int>(step >> kStepClassBits); }

// The number of blocks of keys from `begin` on that take a tile of queries before the block of
// `step`.
TC_DEVICE int step_rank_from(const Sm90BackwardParams& p, const MaskPlace& at, int begin,
                             u32 step) {
  return step_rank(step) - (begin == 0 ? 0 : step_rank(__ldg(p.bits.steps + at.step(p, begin))));
}

// The first number of a packed sequence's tiles of queries. Each sequence has one more number than
// its rows fill; otherwise sequences would share tiles.
TC_DEVICE int first_query_tile(const int* cu_seqlens_q, int sequence, int rows) {
  return __ldg(cu_seqlens_q + sequence) / rows + sequence;
}

// Not 0 if cu_seqlens are invalid. NOTE: load it before the offsets and compare it after them, so
// that both loads are in flight together.
TC_DEVICE int wrong_offsets_of(const Sm90BackwardParams& p) {
  return p.order == nullptr ? 0 : p.order->wrong_offsets;
}

// A tile of queries by its number.
struct QueryTile {
  int batch, head;
  int tile;  // of the sequence; negative, or past its end, if the number has no tile

  // Of sequences that are not packed.
  static TC_DEVICE QueryTile of_equals(const Sm90BackwardParams& p, u32 number) {
    QueryTile place;
    u32 of_heads = number / p.tiles;
    place.tile = static_cast<int>(number - of_heads * p.tiles);
    place.batch = static_cast<int>(of_heads / p.heads);
    place.head = static_cast<int>(of_heads - place.batch * p.heads);
    return place;
  }

  // In a whole warp.
  TC_DEVICE QueryTile(const Sm90BackwardParams& p, u32 number) {
    u32 of_heads = number / p.tiles;
    tile = static_cast<int>(number - of_heads * p.tiles);
    if (p.lengths.cu_seqlens_q == nullptr) {
      batch = static_cast<int>(of_heads / p.heads);
      head = static_cast<int>(of_heads - batch * p.heads);
      return;
    }
    head = static_cast<int>(of_heads);
    // The last sequence that begins at or before the tile; 32 candidates are compared together.
    int lane = threadIdx.x % 32, left = p.batch;
    batch = 0;
    while (left > 1) {
      int step = (left + 31) / 32;
      bool before =
          lane * step < left &&
          first_query_tile(p.lengths.cu_seqlens_q, batch + lane * step, p.tile_rows) <= tile;
      int found = max(__popc(__ballot_sync(~0u, before)) - 1, 0) * step;
      batch += found;
      left = min(step, left - found);
    }
    tile -= first_query_tile(p.lengths.cu_seqlens_q, batch, p.tile_rows);
  }

 private:
  QueryTile() = default;
};

// The number of the tile of queries that is the `index`-th to be rounded: of the heads whose work
// items are together all heads' first tiles, then the next ones, because they are complete in about
// this order. Not of packed sequences.
TC_DEVICE u32 rounded_tile(const Sm90BackwardParams& p, u32 index) {
  u32 tiles = static_cast<u32>(p.tiles), heads = static_cast<u32>(p.batch) * p.heads;
  u32 most = static_cast<u32>(p.together / p.parts) * p.group;
  u32 first = index / (most * tiles) * most, here = min(most, heads - first);
  index -= first * tiles;
  return (first + index % here) * tiles + index / here;
}

// The turn of a tile that sm90/backward_round.cuh has rounded: no number of additions, nor those of
// a pair.
constexpr int kRounded = 0x7fff8000;

// The number of blocks of keys of a set that add to a tile of queries.
TC_DEVICE int additions(const Sm90BackwardParams& p, const QueryTile& place,
                        const Sm90Sequence& sequence, int set) {
  if (!sees_any_key(sequence, place.tile, p.tile_rows, p.tile_keys)) return 0;
  int begin = first_key_tile_of(p, set, sequence, place.tile, p.tile_rows, p.tile_keys);
  int last_row = place.tile * p.tile_rows + p.tile_rows - 1;
  int last_key = min(last_row + sequence.last, sequence.columns - 1);
  int last = min(last_key / p.tile_keys, (set + 1) * p.set_keys - 1);
  if (last < begin || p.bits.steps == nullptr) return max(0, last - begin + 1);
  MaskPlace at(p.bits, place.batch, place.head, place.tile);
  u32 step = __ldg(p.bits.steps + at.step(p, last));
  return step_rank_from(p, at, begin, step) + (step_class(step) < kStepHidesAll ? 1 : 0);
}

}  // namespace sm90
}  // namespace torch_cubin
