// The epilogue of tiles of sm90_symmetric.cu whose K is divided by more blocks than a tile has
// squares: each block of the cluster adds up and stores some columns of them, in groups of eight.
// It multiplies nothing.
//
// Results are stored from registers, as they are and transposed, those below the diagonal alone. So
// few of them are a block's that staging them in shared memory takes longer (benchmarks/NOTES.md).
#pragma once

#include "sm90_epilogue.cuh"
#include "sm90_squares.cuh"

namespace torch_cubin {
namespace sm90 {

// Kernels that finish tiles so where a cluster has more blocks than a tile has squares. Fewer
// blocks have whole squares, which the TMA stores.
template <class C>
constexpr bool kTakesColumns = C::kTileM == 128 && C::kTileN <= 128 && !Layout<C>::kPingPong;
template <class C>
TC_DEVICE bool has_columns(const Team& team) {
  return kTakesColumns<C> && team.size > 2 * C::kTileN / C::kPanel;
}

// Who of a cluster finishes which columns of a warpgroup's rows, and where their sums are received:
// in the stages, whose memory is free after the products; of each block a part.
template <class C>
struct Columns {
  static constexpr int kBytes = Layout<C>::kRows * 8 * 4;  // sums of eight columns
  static constexpr int kMost = C::kTileN / 8;
  static_assert(Layout<C>::kWarpgroups * (kMost + 7) * kBytes <= Layout<C>::kStaging,
                "all parts of clusters of up to eight blocks");

  const Team& team;
  int count;   // by eight: those with results on or below the diagonal
  u32 scale;   // blocks for each of them, times 2^16
  u32 stride;  // bytes of a part
  u32 parts;   // the thread's own sums

  TC_DEVICE Columns(const Work& w, const Team& team, u32 shared, int group) : team(team) {
    const u32 size = team.size;
    count = max(0, min((w.m0 + (group + 1) * Layout<C>::kRows - w.n0) / 8, kMost));
    scale = (size << 16) / static_cast<u32>(max(count, 1)) + 1;
    stride = (kMost + size - 1) / size * kBytes;
    parts = shared + group * size * stride + threadIdx.x % kWarpgroup * 16;
  }
  TC_DEVICE int owner(int column) const { return column * scale >> 16; }
  TC_DEVICE int first(int rank) const {
    return static_cast<u32>(count * rank + team.size - 1) / static_cast<u32>(team.size);
  }
};

// Sends the block's sums to those that finish them. Contains a cluster barrier, for all threads of
// the cluster.
template <class C>
TC_DEVICE void send_columns(const Columns<C>& columns, u32 barrier,
                            const float (&sum)[C::kBlocksM][C::kTileN / 2]) {
  const u32 own = columns.parts + columns.team.rank * columns.stride;
  cluster_meet();  // all blocks have read their last stage
  int last = -1;
  u32 to = 0, arrived = 0;
#pragma unroll
  for (int column = 0; column < Columns<C>::kMost; ++column) {
    if (column >= columns.count) break;
    const int owner = columns.owner(column);
    const bool is_own = owner == columns.team.rank;
    to += Columns<C>::kBytes;
    if (owner != last) {
      last = owner;
      to = is_own ? own : map_to_rank(own, owner);
      arrived = map_to_rank(barrier, owner);
    }
    const float* x = sum[0] + 4 * column;
    if (is_own) {
      asm volatile("st.shared.v4.f32 [%0], {%1, %2, %3, %4};" ::"r"(to), "f"(x[0]), "f"(x[1]),
                   "f"(x[2]), "f"(x[3])
                   : "memory");
    } else {
      store_remote_async(to, x, arrived);
    }
  }
}

// The transpose of 8 x 8 elements of 16 bits, of which a lane has two of row lane / 4.
TC_DEVICE u32 transpose_pairs(u32 pairs) {
  u32 transposed;
  asm("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(transposed) : "r"(pairs));
  return transposed;
}

// Stores eight columns of a warp's 16 rows, which begin at m and n, and their transpose; the
// results above the diagonal are not stored. `x` has the accumulators' layout.
template <class C>
TC_DEVICE void store_eight_columns(const Sm90MatmulParams& p,
                                   typename DTypeTraits<C::kType>::Storage* out, int m, int n,
                                   const float (&x)[4]) {
  const int lane = threadIdx.x % 32, of_row = lane / 4, of_pair = lane % 4 * 2;
  const tc_int64 stride = p.n;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    if constexpr (C::kElement == 2) {
      const u32 pair = DTypeTraits<C::kType>::pack(x[2 * half], x[2 * half + 1]);
      const u32 transposed = transpose_pairs(pair);
      const int first = m + 8 * half;
      {
        const int row = first + of_row, column = n + of_pair;
        const bool exists = row < p.n && column < p.n;
        u16* at = out + row * stride + column;
        store_pair_if(exists && column < row, at, pair);
        store_element_if(exists && column == row, at, pair);
      }
      const int row = n + of_row, column = first + of_pair;
      const bool exists = row < p.n && column < p.n;
      u16* at = out + row * stride + column;
      store_pair_if(exists && row < column, at, transposed);
      store_element_if(exists && row == column, at + 1, transposed >> 16);
    } else {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const int row = m + 8 * half + of_row, column = n + of_pair + i;
        if (row >= p.n || column > row) continue;
        out[row * stride + column] = x[2 * half + i];
        out[column * stride + row] = x[2 * half + i];
      }
    }
  }
}

// Adds up the columns that are the block's own, in the order of K, and stores them.
template <class C>
TC_DEVICE void finish_columns(const Sm90MatmulParams& p, const Work& w, const Columns<C>& columns,
                              u32 barrier, int group) {
  using Traits = DTypeTraits<C::kType>;
  using Storage = typename Traits::Storage;
  constexpr int kTogether = 4;  // whose addends are requested before the first is used
  const int rank = columns.team.rank, size = columns.team.size;
  const int first = columns.first(rank), count = columns.first(rank + 1) - first;
  if (threadIdx.x % kWarpgroup == 0) {
    barrier_expect(barrier, count * (size - 1) * Columns<C>::kBytes);
  }
  const int lane = threadIdx.x % 32;
  const int m = w.m0 + group * Layout<C>::kRows + threadIdx.x / 32 % 4 * 16;
  const tc_int64 matrix = (static_cast<tc_int64>(w.b2) * p.batch[1] + w.b1) * p.batch[0] + w.b0;
  const auto out = static_cast<Storage*>(p.out) + matrix * p.n * p.n;
  const auto addend = static_cast<const Storage*>(p.addend) + w.b0 * p.addend_batch_stride[0] +
                      w.b1 * p.addend_batch_stride[1] + w.b2 * p.addend_batch_stride[2];
#pragma unroll 1
  for (int done = 0; done < count; done += kTogether) {
    const int n = w.n0 + (first + done) * 8;
    float added[kTogether][4];
#pragma unroll
    for (int i = 0; i < kTogether; ++i) {
#pragma unroll
      for (int c = 0; c < 4; ++c) {
        const int row = m + lane / 4 + c / 2 * 8, column = n + 8 * i + lane % 4 * 2 + c % 2;
        added[i][c] = 0.0f;
        if (p.addend != nullptr && done + i < count && row < p.n && column <= row) {
          added[i][c] = Traits::load(addend[row * p.addend_stride_m + column * p.addend_stride_n]);
        }
      }
    }
    if (done == 0) barrier_wait(barrier, 0);
#pragma unroll
    for (int i = 0; i < kTogether; ++i) {
      if (done + i >= count) break;
      u32 from = columns.parts + (done + i) * Columns<C>::kBytes;
      float x[4];
      load_shared(x, from);
#pragma unroll 1
      for (int part = 1; part < size; ++part) {
        float other[4];
        load_shared(other, from += columns.stride);
#pragma unroll
        for (int c = 0; c < 4; ++c) x[c] += other[c];
      }
#pragma unroll
      for (int c = 0; c < 4; ++c) {
        x[c] = p.alpha * x[c];
        if (p.addend != nullptr) x[c] = __fmaf_rn(p.beta, added[i][c], x[c]);
      }
      store_eight_columns<C>(p, out, m, n + 8 * i, x);
    }
  }
}

}  // namespace sm90
}  // namespace torch_cubin
