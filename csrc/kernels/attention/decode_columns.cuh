// Which columns a block of decode.cu takes, and their prefetch. Lengths and pages of a cache are numbers in
// memory: with kEarly they are read before the kernel ahead has ended, may be old, and serve the prefetch alone.
#pragma once

#include "decode_params.h"
#include "tile.cuh"

namespace torch_cubin {

// What a block computes: 16 rows of a KV head's query heads.
struct BlockPlace {
  u32 batch, kv_head, tile;

  TC_DEVICE BlockPlace(const DecodeParams& p, u32 block) {
    u32 tiles = (static_cast<u32>(p.seqlen_q) * p.group + 15) / 16, kv_heads = p.heads / p.group;
    u32 head = block / tiles;
    tile = block - head * tiles;
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

// Columns of a cache's sequence.
template <bool kEarly>
TC_DEVICE int cached_columns(const DecodeParams& p, int batch) {
  if (p.cache_seqlens == nullptr) return p.seqlen_k;
  int cached = read_number<kEarly>(p.cache_seqlens + batch);
  return min(min(max(cached, 0), p.seqlen_k) + p.new_columns, p.seqlen_k);
}

// Which sequence of the cache is sequence `batch`.
template <bool kEarly>
TC_DEVICE int cached_batch(const DecodeParams& p, int batch) {
  if (p.cache_batch_idx == nullptr) return batch;
  return min(max(read_number<kEarly>(p.cache_batch_idx + batch), 0), p.cache_batch - 1);
}

// Into how many parts a sequence's `columns` are cut. A whole warp must ask together.
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

// The part of columns [begin, end) that this block takes, from a multiple of kTileN on. A block past the
// parts of a cache's sequence takes none. A whole warp must ask together.
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

#if __CUDA_ARCH__ >= 900  // others start no kernel early
// Has the L2 cache fetch the first p.prefetched tiles of this block, before the kernel ahead has ended:
// keys and values stream from memory while that one ends and this one waits for it. Where the rows of all
// heads lie together, 16 of them are one piece, of which the block of each head asks for its share: a
// request for each row costs a block more time than it saves. Other layouts go without.
// Lane l of a warp asks for the warp's columns of tile l % 16, of k below lane 16, else of v.
template <int kTileN, int kElement>
TC_DEVICE void prefetch_part(const DecodeParams& p, bool cache) {
  u32 block = blockIdx.x, thread = threadIdx.x;
  asm volatile("" : "+r"(block), "+r"(thread));  // nothing of this is kept in registers for later
  auto [batch, kv_head, row_tile] = BlockPlace(p, block);
  int first_packed = row_tile * 16;
  bool of_k = thread % 32 < 16;
  tc_int64 outer_stride = of_k ? p.k_stride[0] : p.v_stride[0];
  tc_int64 head_stride = of_k ? p.k_stride[1] : p.v_stride[1];
  tc_int64 row_stride = of_k ? p.k_stride[2] : p.v_stride[2];
  int head_columns = of_k ? p.head_dim : p.head_dim_v;
  bool paged = cache && p.block_table != nullptr;
  bool together = head_stride == head_columns && row_stride == p.heads / p.group * head_stride;
  if (p.prefetched == 0 || (paged && p.page_size % 16 != 0)) return;

  int columns = cache ? cached_columns<true>(p, batch) : p.seqlen_k;
  int shift = p.flags & kAttendBottomRight ? columns - p.seqlen_q : 0;
  int last_packed = min(first_packed + 16, p.seqlen_q * p.group) - 1;
  int begin = p.first == -kNoBound ? 0 : max(0, first_packed / p.group + p.first + shift);
  int end = p.last == kNoBound ? columns : min(columns, last_packed / p.group + p.last + shift + 1);
  auto part = Part<kTileN>::template of<true>(p, cache, begin, end);
  int tile = thread % 16;
  int column = part.begin + tile * kTileN + thread / 32 * 16;
  if (!together || tile >= p.prefetched || column + 16 > part.end) return;

  tc_int64 outer = cache && !paged ? cached_batch<true>(p, batch) : batch;
  if (paged) {
    u32 page = read_early(p.block_table + batch * p.block_table_stride + column / p.page_size);
    outer = min(page, p.pages - 1u);
    column %= p.page_size;
  }
  tc_int64 from = outer * outer_stride + column * row_stride + kv_head * 16 * head_columns;
  prefetch_l2(static_cast<const char*>(of_k ? p.k : p.v) + from * kElement,
              16 * head_columns * kElement);
}
#endif

}  // namespace torch_cubin
