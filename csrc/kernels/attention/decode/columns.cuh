// The columns of a block of decode.cu, and their prefetch. Lengths and pages of a cache are in
// memory and are also read before the previous kernel has ended. They may be stale then: what they
// plan is only prefetched until they have been read again.
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

// What a block's plan depends on in memory, as it is there. Read by a whole warp, requested
// together; a lane has the lengths of the sequences lane, lane + 32, ...
struct CacheLengths {
  int own = 0, index = 0, of_lane = 0;
  u32 of_others = 0;  // units

  TC_DEVICE CacheLengths(const DecodeParams& p, bool cache, int batch) {
    if (!cache) return;
    int lane = threadIdx.x % 32;
    if (p.cache_seqlens != nullptr) {
      own = read_early(p.cache_seqlens + batch);
      if (p.share > 0.0f && lane < p.batch) of_lane = read_early(p.cache_seqlens + lane);
    }
    if (p.cache_batch_idx != nullptr && p.block_table == nullptr) {
      index = read_early(p.cache_batch_idx + batch);
    }
    if (p.share == 0.0f || p.batch <= 32) return;
    for (int other = lane + 32; other < p.batch; other += 32) {
      int cached = p.cache_seqlens ? read_early(p.cache_seqlens + other) : 0;
      of_others += units(p, cached);
    }
  }

  TC_DEVICE bool same(const CacheLengths& other) const {
    return __all_sync(~0u, own == other.own && index == other.index && of_lane == other.of_lane &&
                               of_others == other.of_others);
  }

  // The columns of a sequence of length `cached`.
  static TC_DEVICE int columns(const DecodeParams& p, int cached) {
    if (p.cache_seqlens == nullptr) return p.seqlen_k;
    return min(min(max(cached, 0), p.seqlen_k) + p.new_columns, p.seqlen_k);
  }
  TC_DEVICE int columns(const DecodeParams& p) const { return columns(p, own); }

  // The sequence's index in the cache.
  TC_DEVICE int in_cache(const DecodeParams& p, int batch) const {
    if (p.block_table != nullptr) return 0;
    return p.cache_batch_idx == nullptr ? batch : min(max(index, 0), p.cache_batch - 1);
  }

  // A sequence's columns in units of 16, so that the sum fits.
  static TC_DEVICE u32 units(const DecodeParams& p, int cached) {
    return min(columns(p, cached), p.seen_columns) / 16u;
  }
  TC_DEVICE u32 lane_units(const DecodeParams& p) const {
    return of_others + (static_cast<int>(threadIdx.x % 32) < p.batch ? units(p, of_lane) : 0);
  }
};

// The number of parts that a sequence's `columns` are split into. Called by a whole warp.
TC_DEVICE int parts_of(const DecodeParams& p, const CacheLengths& lengths, int columns) {
  float size = p.fewest_columns;
  if (p.share > 0.0f) {
    size = fmaxf(size, p.share * 16.0f * __reduce_add_sync(~0u, lengths.lane_units(p)));
  }
  return max(1, min(p.splits, static_cast<int>(__fdividef(static_cast<float>(columns), size))));
}

// The part of columns [begin, end) that this block takes, starting at a multiple of kTileN. A block
// past the parts of a cache's sequence takes none. Called by a whole warp.
template <int kTileN>
struct Part {
  int begin, end;
  bool none;

  static TC_DEVICE Part of(const DecodeParams& p, bool cache, const CacheLengths& lengths,
                           int begin, int end) {
    Part part{begin / kTileN * kTileN, end, false};
    if (p.splits == 1) return part;
    if (cache) {
      int columns = end - part.begin, parts = parts_of(p, lengths, columns);
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

// Prefetches the first p.prefetched tiles of this block to the L2 cache before the previous kernel
// has ended, so that their latency overlaps with the wait for it. Lane l of a warp requests row l %
// 16 of the warp's columns, of k below lane 16, else of v.
template <int kTileN, int kElement>
TC_DEVICE void prefetch_part(const DecodeParams& p, bool cache, const BlockPlace& place,
                             tc_int64 outer, const Part<kTileN>& part) {
  // NOTE: past the parts blockIdx.y times a part's columns may not fit 32 bits, and give rows below
  // 0.
  if (p.prefetched == 0 || part.none) return;
  int batch = place.batch;
  bool of_k = threadIdx.x % 32 < 16, paged = cache && p.block_table != nullptr;
  tc_int64 outer_stride = of_k ? p.k_stride[0] : p.v_stride[0];
  tc_int64 head_stride = of_k ? p.k_stride[1] : p.v_stride[1];
  tc_int64 row_stride = of_k ? p.k_stride[2] : p.v_stride[2];
  int row_bytes = (of_k ? p.head_dim : p.head_dim_v) * kElement;
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
