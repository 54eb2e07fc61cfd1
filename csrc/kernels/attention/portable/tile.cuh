// What the attention kernels share below the softmax: the tile and sequence of a block, tiles of q,
// k, v in shared memory, their copies and fragments, and the columns visible to a tile of rows.
// Independent of scores.
//
// Lane 4 g + t of a warp holds of an m16n8 accumulator tile: rows g and g + 8, columns 2 t and 2 t
// + 1, in the order (g, 2t), (g, 2t + 1), (g + 8, 2t), (g + 8, 2t + 1).
#pragma once

#include "attention/attention_params.h"
#include "attention/numbers.cuh"
#include "common/mma.cuh"
#include "common/uniform.cuh"

namespace torch_cubin {

// Keeps the compiler from keeping values derived from x in registers: recomputing them is cheaper.
TC_DEVICE void forget(int& x) { asm volatile("" : "+r"(x)); }

TC_DEVICE int clamp(int x, int least, int most) { return max(least, min(x, most)); }

// One (batch, head)'s sequence: its sizes, and the offset of its rows in packed tensors.
// Constructed by a whole warp.
struct Sequence {
  int batch, head;  // of the query
  int kv_head;
  int rows, columns;
  int q_row, k_row;  // first rows in packed tensors, else 0
  int first, last;   // the band of this sequence: i + first <= j <= i + last

  TC_DEVICE Sequence(const AttentionParams& p, int batch_, int head_) : batch(batch_), head(head_) {
    int q_begin = 0, q_end = p.seqlen_q, k_begin = 0, k_end = p.seqlen_k;
    if (p.cu_seqlens_q != nullptr) {
      q_begin = p.cu_seqlens_q[batch];
      q_end = p.cu_seqlens_q[batch + 1];
    }
    if (p.cu_seqlens_k != nullptr) {
      k_begin = p.cu_seqlens_k[batch];
      k_end = p.cu_seqlens_k[batch + 1];
    }
    // NOTE: uniform() must be outside of every condition. Inside one, ptxas 13.0 makes predicated
    // REDUX instructions of it, some with a wrong predicate (d256 backward hung on packed
    // sequences). Invalid offsets must not lead outside of the tensors, nor a bound that is too
    // small outside of the buffers that it sized.
    q_row = clamp(uniform(q_begin), 0, p.total_q);
    rows = clamp(uniform(q_end), q_row, min(p.total_q, q_row + p.seqlen_q)) - q_row;
    k_row = clamp(uniform(k_begin), 0, p.total_k);
    columns = clamp(uniform(k_end), k_row, min(p.total_k, k_row + p.seqlen_k)) - k_row;
    kv_head = uniform(p.group > 1 ? head / p.group : head);
    int shift = p.flags & kAttendBottomRight ? columns - rows : 0;
    first = p.first == -kNoBound ? -kNoBound : p.first + shift;
    last = p.last == kNoBound ? kNoBound : p.last + shift;
  }

  // Elements from a tensor's base to row `row` of this sequence. Packed tensors ignore the batch.
  TC_DEVICE tc_int64 q_offset(const AttentionParams& p, const tc_int64 (&stride)[3],
                              tc_int64 row) const {
    return (p.cu_seqlens_q ? 0 : batch * stride[0]) + head * stride[1] + (q_row + row) * stride[2];
  }
  TC_DEVICE tc_int64 k_offset(const AttentionParams& p, const tc_int64 (&stride)[3],
                              tc_int64 row) const {
    return (p.cu_seqlens_k ? 0 : batch * stride[0]) + kv_head * stride[1] +
           (k_row + row) * stride[2];
  }

  // Index of a row in logsumexp and delta.
  TC_DEVICE tc_int64 row_index(const AttentionParams& p, int row) const {
    if (p.cu_seqlens_q != nullptr) {
      return static_cast<tc_int64>(head) * p.total_q + q_row + row;
    }
    return (static_cast<tc_int64>(batch) * p.heads + head) * p.seqlen_q + row;
  }
};

// A block's tile, of rows or of columns, and its head, of the query or of k and v.
struct Work {
  int tile, head, batch;
};

// Assigns the tiles to the blocks: bundles of heads one after the other, and within a bundle the
// first tile of every head, then the second ones. Integer divisions take 100 cycles each, hence the
// shortcuts.
TC_DEVICE Work schedule_work(u32 tiles, u32 heads, u32 batch_size, u32 bundle) {
  u32 all = heads * batch_size;
  u32 index = bundle < all ? blockIdx.x / (tiles * bundle) : 0;
  u32 within = blockIdx.x - index * (tiles * bundle);
  u32 here = min(bundle, all - index * bundle);
  u32 tile = here > 1 ? within / here : within;
  u32 pair = index * bundle + within - tile * here;
  u32 batch = batch_size > 1 ? pair / heads : 0;
  return {static_cast<int>(tile), static_cast<int>(pair - batch * heads), static_cast<int>(batch)};
}

TC_DEVICE Work uniform(const Work& work) {
  return {uniform(work.tile), uniform(work.head), uniform(work.batch)};
}

// The size of a bundle, in units of `step` heads that read the same `bytes`, whose data fit in the
// L2 cache.
TC_DEVICE u32 bundle_in_l2(float bytes, u32 step, u32 all) {
  constexpr float kL2 = 24 << 20;
  float resident = fmaxf(__fdividef(kL2, bytes), 1.0f);
  return resident * step < all ? static_cast<u32>(resident) * step : all;
}

// Tiles of kTileM rows. Under a band the longest tiles come first, so that short ones fill the end,
// for as many heads as leave their k and v in L2; otherwise the tiles of one head are adjacent.
template <int kTileM>
TC_DEVICE Work find_work(const AttentionParams& p) {
  u32 tiles = (p.seqlen_q + kTileM - 1u) / kTileM;
  u32 bundle = 1;
  if (p.last != kNoBound) {
    float bytes = 2.0f * (p.head_dim + p.head_dim_v) * max(p.seqlen_k, 1);
    bundle = bundle_in_l2(bytes, p.group, static_cast<u32>(p.heads) * p.batch);
  }
  Work work = uniform(schedule_work(tiles, p.heads, p.batch, bundle));
  work.tile = tiles - 1 - work.tile;
  return work;
}

// The tiles of columns that a tile of rows [row, row_end) attends to: [begin, end), of which
// [whole_begin, whole_end) are entirely visible to every row. `from` and `to` limit the columns
// (split KV); `from` is a multiple of kColumns.
template <int kColumns>
struct ColumnTiles {
  int begin, end, whole_begin, whole_end;

  TC_DEVICE ColumnTiles(const Sequence& s, int row, int row_end, int from, int to) {
    int seen_begin = max(from, row + s.first);
    int seen_end = min(min(to, s.columns), row_end + s.last);
    begin = seen_begin / kColumns;
    end = max((seen_end + kColumns - 1) / kColumns, begin);
    whole_begin = max((max(row_end - 1 + s.first, 0) + kColumns - 1) / kColumns, begin);
    whole_end = min(max(min(s.columns, row + s.last + 1), 0) / kColumns, end);
    if (seen_end <= seen_begin) end = begin;
    if (whole_end <= whole_begin) whole_begin = whole_end = begin;
  }

  TC_DEVICE bool whole(int tile) const { return tile >= whole_begin && tile < whole_end; }
};

// Copies 16 bytes to shared memory if `wanted`.
TC_DEVICE void cp_async_if(bool wanted, u32 shared, const void* global) {
  asm volatile(
      "{ .reg .pred wanted; setp.ne.u32 wanted, %2, 0;"
      " @wanted cp.async.cg.shared.global.L2::128B [%0], [%1], 16; }" ::"r"(shared),
      "l"(global), "r"(static_cast<u32>(wanted)));
}

// cp.async of tiles of kRows rows of kRowBytes bytes, by kThreads threads: 8 adjacent threads copy
// a row, 128 bytes at a time. Missing elements are not read. All members are the same for all
// threads; a thread's offset is computed anew for each tile, which is cheaper than keeping it in
// registers.
template <int kRows, int kRowBytes, int kThreads, class Layout = Swizzle<kRowBytes, true>>
struct RowCopy {
  static constexpr int kVectors = kRowBytes / 128;
  static constexpr int kRowsPerPass = kThreads / 8;
  static constexpr int kPasses = kRows < kRowsPerPass ? 1 : kRows / kRowsPerPass;
  static_assert((kRows < kRowsPerPass || kRows % kRowsPerPass == 0) && kRowsPerPass % 8 == 0,
                "whole passes");

  const char* tile;    // to copy next
  tc_int64 row_bytes;  // between rows
  int column_bytes;    // of a row

  TC_DEVICE RowCopy(const void* tile_, tc_int64 row_bytes_, int column_bytes_)
      : tile(static_cast<const char*>(tile_)), row_bytes(row_bytes_), column_bytes(column_bytes_) {}

  struct Place {
    int row;
    u32 shared;
    const char* global;
    int bytes_left;  // of the row, from this thread's first vector on
  };
  TC_DEVICE Place place(u32 stage) const {
    int thread = threadIdx.x;
    forget(thread);
    u32 lane = thread % 8u, row = static_cast<u32>(thread) % kThreads / 8;
    return {static_cast<int>(row), stage + Layout::offset(row, lane),
            tile + (row * row_bytes + lane * 16), column_bytes - static_cast<int>(lane) * 16};
  }

  // A tile of which rows_left rows exist; the rest, and missing columns, become zeros.
  TC_DEVICE void copy_filling(u32 stage, int rows_left) const {
    Place at = place(stage);
    if (kRows < kRowsPerPass && at.row >= kRows) return;
#pragma unroll
    for (int pass = 0; pass < kPasses; ++pass)
#pragma unroll
      for (int v = 0; v < kVectors; ++v) {
        bool exists = at.row + pass * kRowsPerPass < rows_left && v * 128 < at.bytes_left;
        cp_async<16>(at.shared + pass * kRowsPerPass * kRowBytes + v * 128,
                     at.global + pass * kRowsPerPass * row_bytes + v * 128, exists);
      }
  }

  // A tile whose rows all exist. Missing columns are not written.
  TC_DEVICE void copy_whole(u32 stage) const {
    Place at = place(stage);
    if (kRows < kRowsPerPass && at.row >= kRows) return;
#pragma unroll
    for (int pass = 0; pass < kPasses; ++pass) {
#pragma unroll
      for (int v = 0; v < kVectors; ++v) {
        cp_async_if(v * 128 < at.bytes_left, at.shared + pass * kRowsPerPass * kRowBytes + v * 128,
                    at.global + v * 128);
      }
      at.global = advance(at.global, kRowsPerPass * row_bytes);
    }
  }

  TC_DEVICE void clear_missing_columns(u32 stage) const {
    Place at = place(stage);
    if (kRows < kRowsPerPass && at.row >= kRows) return;
#pragma unroll
    for (int pass = 0; pass < kPasses; ++pass)
#pragma unroll
      for (int v = 0; v < kVectors; ++v) {
        if (v * 128 < at.bytes_left) continue;
        asm volatile("st.shared.v4.u32 [%0], {%1, %1, %1, %1};" ::"r"(
                         at.shared + pass * kRowsPerPass * kRowBytes + v * 128),
                     "r"(0u));
      }
  }
};

// The tiles of k and v of one block, passing through a ring of kStages stages (k, then v) in shared
// memory, from the last tile to the first.
template <class KCopy, class VCopy, int kColumns, int kTileBytes, int kStages>
struct KvRing {
  static constexpr int kStageBytes = 2 * kTileBytes;

  KCopy k;
  VCopy v;
  u32 shared;

  // `tile`: the last one.
  TC_DEVICE KvRing(const AttentionParams& p, const Sequence& s, int element, int tile, u32 shared_)
      : k(place(p.k, s.k_offset(p, p.k_stride, static_cast<tc_int64>(tile) * kColumns), element),
          p.k_stride[2] * element, p.head_dim * element),
        v(place(p.v, s.k_offset(p, p.v_stride, static_cast<tc_int64>(tile) * kColumns), element),
          p.v_stride[2] * element, p.head_dim_v * element),
        shared(shared_) {}
  static TC_DEVICE const char* place(const void* tensor, tc_int64 offset, int element) {
    return static_cast<const char*>(tensor) + offset * element;
  }

  TC_DEVICE void step() {
    k.tile -= kColumns * k.row_bytes;
    v.tile -= kColumns * v.row_bytes;
  }

  // Copies as many tiles as fit, but one: the last of the sequence may be partial, all others are
  // complete. k of the first tile is a group of its own, with the caller's earlier copies, so that
  // the first product need not wait for v.
  TC_DEVICE void start(const AttentionParams& p, int tile, int begin, int columns,
                       int column_limit) {
#pragma unroll
    for (int stage = 0; stage < kStages - 1; ++stage) {
      bool exists = tile - stage >= begin;
      int rows_left = columns - (tile - stage) * kColumns;
      u32 to = shared + stage * kStageBytes;
      if (exists) k.copy_filling(to, rows_left);
      if (stage == 0) cp_async_commit();
      if (exists) v.copy_filling(to + kTileBytes, rows_left);
      cp_async_commit();
      step();
    }
    // Later copies do not write missing columns. In the other stages those above have made zeros of
    // them, and may not have arrived yet.
    if (p.head_dim < column_limit || p.head_dim_v < column_limit) {
      u32 empty = shared + (kStages - 1) * kStageBytes;
      k.clear_missing_columns(empty);
      v.clear_missing_columns(empty + kTileBytes);
    }
  }

  // While `tile` is in the stage at `read`: copies the tile that replaces the previous one, if
  // there is one.
  TC_DEVICE void copy_next(int tile, int begin, u32 read) {
    if (tile - (kStages - 1) >= begin) {
      u32 to = read == shared ? shared + (kStages - 1) * kStageBytes : read - kStageBytes;
      k.copy_whole(to);
      v.copy_whole(to + kTileBytes);
      step();
    }
    cp_async_commit();
  }

  TC_DEVICE u32 next(u32 read) const {
    read += kStageBytes;
    return read == shared + kStages * kStageBytes ? shared : read;
  }
};

// Which half of a 16 x 16 block of 16-bit elements each 8 x 8 matrix of an ldmatrix.x4 is, so that
// the four registers are a fragment. Rows and columns are those of shared memory.
//   a:             A, rows along M          a_transposed: A, rows along K (needs .trans)
//   b:             two n8 tiles, rows along N       b_transposed: rows along K (needs .trans)
enum class Fragment { a, a_transposed, b, b_transposed };

template <Fragment kFragment, int kRowBytes>
struct FragmentAddress {
  static constexpr bool kTranspose =
      kFragment == Fragment::a_transposed || kFragment == Fragment::b_transposed;
  u32 base;

  // For the block with first row `row` (a multiple of 8) and first column `column` (of 8).
  TC_DEVICE explicit FragmentAddress(int row, int column = 0) {
    constexpr bool kRowsFirst = kFragment == Fragment::a || kFragment == Fragment::b_transposed;
    int lane = threadIdx.x % 32;
    int low = (lane >> 3) & 1, high = lane >> 4;
    base = Swizzle<kRowBytes, true>::offset(row + lane % 8 + 8 * (kRowsFirst ? low : high),
                                            column / 8 + (kRowsFirst ? high : low));
  }

  // Loads the block `rows` (of 8) down and `columns` (of 16) to the right, both constants after
  // unrolling. The base's column must be a multiple of 64 if the columns cross one.
  TC_DEVICE void load(u32 (&out)[4], u32 stage, int rows, int columns) const {
    int bytes = columns * 2;
    ldmatrix<kTranspose>(out, (base ^ (bytes & 127)) + (stage + (bytes & ~127) + rows * kRowBytes));
  }
};

// The accumulators of two adjacent n8 tiles, rounded: the A fragment with these 16 columns as
// depth.
template <DType kDType>
TC_DEVICE void pack_fragment(u32 (&out)[4], const float (&left)[4], const float (&right)[4]) {
  using Traits = DTypeTraits<kDType>;
  out[0] = Traits::pack(left[0], left[1]);
  out[1] = Traits::pack(left[2], left[3]);
  out[2] = Traits::pack(right[0], right[1]);
  out[3] = Traits::pack(right[2], right[3]);
}

}  // namespace torch_cubin
