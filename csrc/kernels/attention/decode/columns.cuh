// The columns of a block of decode.cu, and their prefetch. Lengths and pages of a cache are in
// memory: with kEarly they are read before the previous kernel has ended, may be stale, and are
// used for the prefetch only.
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

// The number of parts that a sequence's `columns` are split into. Called by a whole warp.
template <bool kEarly>
TC_DEVICE int parts_of(const DecodeParams& p, int columns) {
  float size = p.fewest_columns;
  if (p.share > 0.0f) {
    u32 total = 0;  // in units of 16 columns, so that it fits
    for (int batch = threadIdx.x % 32; batch < p.batch; batch += 32) {
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
  bool none = false;

  template <bool kEarly>
  static TC_DEVICE Part of(const DecodeParams& p, bool cache, int begin, int end) {
    Part part{begin / kTileN * kTileN, end};
    if (p.splits == 1) return part;
    if (cache) {
      int columns = end - part.begin, parts = parts_of<kEarly>(p, columns);
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
TC_DEVICE void prefetch_part(const DecodeParams& p, bool cache, const BlockPlace& place) {
  if (p.prefetched == 0) return;
  int batch = place.batch, first_packed = place.tile * 16;
  int last_packed = min(first_packed + 16, p.seqlen_q * p.group) - 1;
  int columns = cache ? cached_columns<true>(p, batch) : p.seqlen_k;
  int shift = p.flags & kAttendBottomRight ? columns - p.seqlen_q : 0;
  int begin = p.first == -kNoBound ? 0 : max(0, first_packed / p.group + p.first + shift);
  int end = p.last == kNoBound ? columns : min(columns, last_packed / p.group + p.last + shift + 1);
  auto part = Part<kTileN>::template of<true>(p, cache, begin, end);
  // NOTE: past the parts blockIdx.y times a part's columns may not fit 32 bits, and give rows below
  // 0.
  if (part.none) return;

  bool of_k = threadIdx.x % 32 < 16, paged = cache && p.block_table != nullptr;
  tc_int64 outer_stride = of_k ? p.k_stride[0] : p.v_stride[0];
  tc_int64 head_stride = of_k ? p.k_stride[1] : p.v_stride[1];
  tc_int64 row_stride = of_k ? p.k_stride[2] : p.v_stride[2];
  int row_bytes = (of_k ? p.head_dim : p.head_dim_v) * kElement;
  tc_int64 outer = cache && !paged ? cached_batch<true>(p, batch) : batch;
  int column = part.begin + threadIdx.x / 32 * 16 + threadIdx.x % 16;
  end = min(part.end, column + p.prefetched * kTileN);
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
