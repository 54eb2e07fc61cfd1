// Before decode.cu: writes new keys and values into a cache and applies rotary embeddings to them
// and the query, computed in float32 and rounded once (to e4m3 for caches of e4m3).
//
// A thread takes one vector of 8 columns: first those of the keys, then of the values, then of the
// query; grid.x = ceil(vectors / threads).
#include "append_params.h"
#include "common/dtype.cuh"

namespace torch_cubin::TC_KERNEL {

struct Config {
  static constexpr DType kDType = DType::TC_DTYPE;
  static constexpr int kThreads = TC_THREADS;
#ifdef TC_E4M3
  static constexpr bool kE4m3 = true;  // the caches' dtype; otherwise the query's
#else
  static constexpr bool kE4m3 = false;
#endif
};

constexpr DType kDType = Config::kDType;
using Traits = DTypeTraits<kDType>;
using Storage = Traits::Storage;
constexpr int kColumns = 8;  // columns of a vector
constexpr int kCacheBytes = Config::kE4m3 ? 1 : 2;

struct Vector {
  float x[kColumns];

  TC_DEVICE explicit Vector(uint4 words) {
    const u32 all[4] = {words.x, words.y, words.z, words.w};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      x[2 * i] = Traits::load(static_cast<u16>(all[i]));
      x[2 * i + 1] = Traits::load(static_cast<u16>(all[i] >> 16));
    }
  }
  TC_DEVICE uint4 rounded() const {
    return make_uint4(Traits::pack(x[0], x[1]), Traits::pack(x[2], x[3]), Traits::pack(x[4], x[5]),
                      Traits::pack(x[6], x[7]));
  }
  TC_DEVICE uint2 quantised(float descale) const {
    u16 pair[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      pair[i] = pack_e4m3(__fdiv_rn(x[2 * i], descale), __fdiv_rn(x[2 * i + 1], descale));
    }
    return make_uint2(pair[0] | static_cast<u32>(pair[1]) << 16, pair[2] | static_cast<u32>(pair[3])
                                                                               << 16);
  }
};

TC_DEVICE uint4 load(const Storage* from) { return *reinterpret_cast<const uint4*>(from); }

// Rotates `own`, the vector at `column` of `row` (before rotary_dim), by the angles of `position`.
TC_DEVICE Vector rotated(const DecodeAppendParams& p, const Storage* row, int column, int position,
                         const Vector& own) {
  position = min(position, p.positions - 1);
  auto cos = static_cast<const Storage*>(p.cos) + position * p.cos_stride;
  auto sin = static_cast<const Storage*>(p.sin) + position * p.sin_stride;
  Vector out(own);
  if (p.interleaved) {
#pragma unroll
    for (int i = 0; i < kColumns / 2; ++i) {
      float c = Traits::load(cos[column / 2 + i]), s = Traits::load(sin[column / 2 + i]);
      out.x[2 * i] = own.x[2 * i] * c - own.x[2 * i + 1] * s;
      out.x[2 * i + 1] = own.x[2 * i] * s + own.x[2 * i + 1] * c;
    }
  } else {
    int half = p.rotary_dim / 2;
    bool low = column < half;
    int first = low ? column : column - half;
    Vector other(load(row + (low ? column + half : first)));
#pragma unroll
    for (int i = 0; i < kColumns; ++i) {
      float c = Traits::load(cos[first + i]), s = Traits::load(sin[first + i]);
      out.x[i] = low ? own.x[i] * c - other.x[i] * s : other.x[i] * s + own.x[i] * c;
    }
  }
  return out;
}

// The same for the vector in memory, in the query's dtype; unchanged from rotary_dim on.
TC_DEVICE uint4 rotated(const DecodeAppendParams& p, const Storage* row, int column, int position) {
  uint4 words = load(row + column);
  if (column >= p.rotary_dim) return words;
  return rotated(p, row, column, position, Vector(words)).rounded();
}

// A row of the query, or of new keys or values, and this thread's vector of it.
struct Place {
  int batch, row, head, column;

  TC_DEVICE Place(u32 index, int vectors, int heads, int rows) {
    u32 all = index / vectors;
    column = static_cast<int>(index - all * vectors) * kColumns;
    u32 pair = all / heads;
    head = static_cast<int>(all - pair * heads);
    batch = static_cast<int>(pair / rows);
    row = static_cast<int>(pair - static_cast<u32>(batch) * rows);
  }
  TC_DEVICE tc_int64 offset(const tc_int64 (&stride)[3]) const {
    return batch * stride[0] + row * stride[1] + head * stride[2];
  }
};

// The factor of a cache's numbers for this head.
TC_DEVICE float descale_of(const float* descale, const tc_int64 (&stride)[2], const Place& at) {
  return descale != nullptr ? descale[at.batch * stride[0] + at.head * stride[1]] : 1.0f;
}

TC_DEVICE int length_of(const DecodeAppendParams& p, int batch) {
  int length = p.cache_seqlens != nullptr ? p.cache_seqlens[batch] : p.capacity;
  return min(max(length, 0), p.capacity);
}

// The offset of the cache row that a new row is written to; negative: not written.
TC_DEVICE tc_int64 cache_row(const DecodeAppendParams& p, const Place& at, int position,
                             const tc_int64 (&stride)[3]) {
  if (position >= p.capacity) return -1;
  int sequence = p.cache_batch_idx != nullptr ? p.cache_batch_idx[at.batch] : at.batch;
  int row = position, limit = p.cache_batch;
  if (p.block_table != nullptr) {
    int page = position / p.page_size;
    row -= page * p.page_size;
    sequence = p.block_table[at.batch * p.block_table_stride + page];
    limit = p.pages;
  }
  if (sequence < 0 || sequence >= limit) return -1;
  return sequence * stride[0] + row * stride[1] + at.head * stride[2];
}

extern "C" __global__ void __launch_bounds__(Config::kThreads)
    TC_KERNEL(const __grid_constant__ DecodeAppendParams p) {
  wait_for_previous_kernel();
  int k_vectors = p.head_dim / kColumns, v_vectors = p.head_dim_v / kColumns;
  u32 new_rows = p.k == nullptr ? 0 : static_cast<u32>(p.batch) * p.new_columns * p.kv_heads;
  u32 q_rows = p.q == nullptr ? 0 : static_cast<u32>(p.batch) * p.seqlen_q * p.heads;
  u32 index = blockIdx.x * Config::kThreads + threadIdx.x;

  if (index < new_rows * k_vectors) {
    Place at(index, k_vectors, p.kv_heads, p.new_columns);
    int position = length_of(p, at.batch) + at.row;
    tc_int64 to = cache_row(p, at, position, p.k_cache_stride);
    if (to < 0) return;
    auto from = static_cast<const Storage*>(p.k) + at.offset(p.k_stride);
    auto cache = static_cast<char*>(p.k_cache) + (to + at.column) * kCacheBytes;
    if constexpr (Config::kE4m3) {
      Vector vector(load(from + at.column));
      if (at.column < p.rotary_dim) vector = rotated(p, from, at.column, position, vector);
      *reinterpret_cast<uint2*>(cache) =
          vector.quantised(descale_of(p.k_descale, p.k_descale_stride, at));
    } else {
      *reinterpret_cast<uint4*>(cache) = rotated(p, from, at.column, position);
    }
    return;
  }
  index -= new_rows * k_vectors;
  if (index < new_rows * v_vectors) {
    Place at(index, v_vectors, p.kv_heads, p.new_columns);
    tc_int64 to = cache_row(p, at, length_of(p, at.batch) + at.row, p.v_cache_stride);
    if (to < 0) return;
    auto from = static_cast<const Storage*>(p.v) + at.offset(p.v_stride);
    auto cache = static_cast<char*>(p.v_cache) + (to + at.column) * kCacheBytes;
    uint4 words = load(from + at.column);
    if constexpr (Config::kE4m3) {
      *reinterpret_cast<uint2*>(cache) =
          Vector(words).quantised(descale_of(p.v_descale, p.v_descale_stride, at));
    } else {
      *reinterpret_cast<uint4*>(cache) = words;
    }
    return;
  }
  index -= new_rows * v_vectors;
  if (index < q_rows * k_vectors) {
    Place at(index, k_vectors, p.heads, p.seqlen_q);
    int position = length_of(p, at.batch) + (p.q_one_position ? 0 : at.row);
    auto from = static_cast<const Storage*>(p.q) + at.offset(p.q_stride);
    auto to = static_cast<Storage*>(p.q_out) + static_cast<tc_int64>(index) * kColumns;
    *reinterpret_cast<uint4*>(to) = rotated(p, from, at.column, position);
  }
}

}  // namespace torch_cubin::TC_KERNEL
/* torch_cubin kernels
{"defaults": {
  "kind": "append", "tile": [1, 1, 256], "block": [256, 1, 1], "cost": {"k_tile": 0, "fixed": 1000},
  "defines": {"TC_DTYPE": "{d.dtype}"}, "for": {"d": "f16 bf16"}},
 "kernels": [
  {"name": "decode_append_attention_{d.short}"},
  {"name": "decode_append_attention_{d.short}_e4m3", "dtype": "float8_e4m3fn", "archs": ["sm_90a"],
   "defines": {"TC_E4M3": 1}}]}
*/
