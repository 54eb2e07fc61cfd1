// The columns of a block of decode.cu, and their prefetch. Lengths and pages of a cache are in
// memory: with kEarly they are also read before the previous kernel has ended. They may be stale
// then, so that what they plan is only prefetched; the same instructions plan again after the wait.
#pragma once

#include "attention/portable/tile.cuh"
#include "decode_params.h"

namespace torch_cubin {

// A block's output: 16 rows of a KV head's query heads.
struct BlockPlace {
  u32 batch, kv_head, tile;

  explicit TC_DEVICE BlockPlace(const DecodeParams& p) {
    u32 tiles = (static_cast<u32>(p.seqlen_q) * p.group + 15) / 16, kv_heads = p.heads / p.group;
    u32 head = blockIdx.x / tiles;
    tile = blockIdx.x - head * tiles;
    batch = head / kv_heads;
    kv_head = head - batch * kv_heads;
  }
};

template <bool kEarly>
TC_DEVICE int read_number(const int* at) {
  if constexpr (kEarly) {
    return read_early(at);
  } else {
    return *at;
  }
}

// The columns of a cache's sequence.
template <bool kEarly>
TC_DEVICE int cached_columns(const DecodeParams& p, int batch) {
  if (p.cache_seqlens == nullptr) return p.seqlen_k;
  int cached = read_number<kEarly>(p.cache_seqlens + batch);
  return min(min(max(cached, 0), p.seqlen_k) + p.new_columns, p.seqlen_k);
}

// The index in the cache of sequence `batch`.
template <bool kEarly>
TC_DEVICE int cached_batch(const DecodeParams& p, int batch) {
  if (p.cache_batch_idx == nullptr) return batch;
  return min(max(read_number<kEarly>(p.cache_batch_idx + batch), 0), p.cache_batch - 1);
}

// For parts_of(): the columns of sequence l in lane l, or 0. Apart, so that they are requested
// together with the block's own.
template <bool kEarly>
TC_DEVICE int lane_columns(const DecodeParams& p, bool cache) {
  int batch = threadIdx.x % 32;
  return cache && p.share > 0.0f && batch < p.batch ? cached_columns<kEarly>(p, batch) : 0;
}

// The number of parts that a sequence's `columns` are split into. Called by a whole warp.
template <bool kEarly>
TC_DEVICE int parts_of(const DecodeParams& p, int of_lane, int columns) {
  float size = p.fewest_columns;
  if (p.share > 0.0f) {
    u32 total = min(of_lane, p.seen_columns) / 16u;  // in units of 16 columns, so that it fits
    for (int batch = threadIdx.x % 32 + 32; batch < p.batch; batch += 32) {
      total += min(cached_columns<kEarly>(p, batch), p.seen_columns) / 16u;
    }
    size = fmaxf(size, p.share * 16.0f * __reduce_add_sync(~0u, total));
  }
  return max(1, min(p.splits, static_cast<int>(__fdividef(static_cast<float>(columns), size))));
}

// The part of columns [begin, end) that this block takes, starting at a multiple of kTileN. A block
// past the parts of a cache's sequence takes none. Called by a whole warp.
template <int kTileN>
struct Part {
  int begin, end;
  bool none;

  template <bool kEarly>
  static TC_DEVICE Part of(const DecodeParams& p, bool cache, int of_lane, int begin, int end) {
    Part part{begin / kTileN * kTileN, end, false};
    if (p.splits == 1) return part;
    if (cache) {
      int columns = end - part.begin, parts = parts_of<kEarly>(p, of_lane, columns);
      int per_part = ((columns + parts - 1) / parts + kTileN - 1) / kTileN * kTileN;
      part.begin += static_cast<int>(blockIdx.y) * per_part;
      part.end = min(end, part.begin + per_part);
      part.none = static_cast<int>(blockIdx.y) >= parts;
    } else {
      int from = static_cast<int>(blockIdx.y) * p.columns_per_split;
      part.begin = max(begin, from) / kTileN * kTileN;
      part.end = min(end, from + p.columns_per_split);
    }
    return part;
  }
};

// What a block computes of sequences of equal lengths, or of those in a cache.
template <int kTileN, bool kEarly>
struct Plan {
  int columns, first, last;  // of the sequence
  int in_cache;              // its index there
  Part<kTileN> part;

  Plan() = default;
  TC_DEVICE Plan(const DecodeParams& p, bool cache, int batch, int first_row, int last_row) {
    int of_lane = lane_columns<kEarly>(p, cache);
    columns = cache ? cached_columns<kEarly>(p, batch) : p.seqlen_k;
    in_cache = !cache ? batch : p.block_table != nullptr ? 0 : cached_batch<kEarly>(p, batch);
    columns = uniform(columns);
    in_cache = uniform(in_cache);
    int shift = p.flags & kAttendBottomRight ? columns - p.seqlen_q : 0;
    first = p.first == -kNoBound ? -kNoBound : p.first + shift;
    last = p.last == kNoBound ? kNoBound : p.last + shift;
    part = Part<kTileN>::template of<kEarly>(p, cache, of_lane, max(0, first_row + first),
                                             min(columns, last_row + last + 1));
  }
};

// Prefetches the first p.prefetched tiles of this block to the L2 cache before the previous kernel
// has ended, so that their latency overlaps with the wait for it. Lane l of a warp requests row l %
// 16 of the warp's columns, of k below lane 16, else of v.
template <int kTileN, int kElement, bool kEarly>
TC_DEVICE void prefetch_part(const DecodeParams& p, bool cache, const BlockPlace& place,
                             const Plan<kTileN, kEarly>& plan) {
  const auto& part = plan.part;
  // NOTE: past the parts blockIdx.y times a part's columns may not fit 32 bits, and give rows below
  // 0.
  if (p.prefetched == 0 || part.none) return;
  int batch = place.batch;
  bool of_k = threadIdx.x % 32 < 16, paged = cache && p.block_table != nullptr;
  tc_int64 outer_stride = of_k ? p.k_stride[0] : p.v_stride[0];
  tc_int64 head_stride = of_k ? p.k_stride[1] : p.v_stride[1];
  tc_int64 row_stride = of_k ? p.k_stride[2] : p.v_stride[2];
  int row_bytes = (of_k ? p.head_dim : p.head_dim_v) * kElement;
  tc_int64 outer = plan.in_cache;
  int column = part.begin + threadIdx.x / 32 * 16 + threadIdx.x % 16;
  int end = min(part.end, column + p.prefetched * kTileN);
#pragma unroll 1
  for (; column < end; column += kTileN) {
    int row = column;
    if (paged) {
      u32 page = read_early(p.block_table + batch * p.block_table_stride + column / p.page_size);
      outer = min(page, p.pages - 1u);
      row = column % p.page_size;
    }
    tc_int64 from = outer * outer_stride + place.kv_head * head_stride + row * row_stride;
    for (int at = 0; at < row_bytes; at += 128) {
      prefetch_l2(static_cast<const char*>(of_k ? p.k : p.v) + from * kElement + at);
    }
  }
}

}  // namespace torch_cubin
