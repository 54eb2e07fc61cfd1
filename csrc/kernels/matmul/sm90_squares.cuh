// The epilogue of sm90_symmetric.cu: stores a warpgroup's rows of a tile square by square, each
// square twice, the second time transposed, after adding what other blocks of the cluster send of
// it, and the addend. It multiplies nothing and chooses no tiles.
//
// A square has 128 bytes of columns (64 columns of 16-bit types, 32 of TF32). Tiles begin at
// multiples of a square's size, so each square is below the diagonal, and stored twice; or above
// it, and skipped; or on it: then its upper half is replaced by its transpose's. So the result is
// symmetric bit by bit, whatever the operands.
#pragma once

#include "sm90_epilogue.cuh"
#include "sm90_transposed.cuh"

namespace torch_cubin {
namespace sm90 {

constexpr int kItemsAhead = 2;  // work items that are found, and not loaded yet

// The shared memory of a block. A warpgroup has one or two staging buffers: 64 rows of 128 bytes
// for squares as they are, and as many for transposed ones.
template <class C>
struct Layout {
  static constexpr int kRows = 64, kHalfBytes = kRows * 128, kBufferBytes = 2 * kHalfBytes;
  static constexpr int kWarpgroups = 2;  // that multiply
  // Each warpgroup multiplies whole tiles, in turns: one stores while the other multiplies.
  static constexpr bool kPingPong = C::kConsumers == 1;
  static constexpr int kTurnBytes = kPingPong ? 16 * kWarpgroups : 0;
  static constexpr int kItemBytes = kPingPong ? (64 + 16) * kItemsAhead : 0;  // and their barriers
  static constexpr int kControlBytes =
      16 * C::kStages + 16 + kTurnBytes + 64 * C::kRing + kItemBytes;
  static constexpr int kStaging = C::kStages * C::kStageBytes;
  static constexpr int kFit =
      (kMaxShared - kControlBytes - kStaging) / (kWarpgroups * kBufferBytes);
  static constexpr int kBuffers = kFit > 2 ? 2 : kFit;
  static constexpr int kBarriers = kStaging + kWarpgroups * kBuffers * kBufferBytes;
  static constexpr int kWords = kBarriers + 16 * C::kStages, kParts = kWords + 8;
  static constexpr int kTurns = kWords + 16, kRing = kTurns + kTurnBytes;
  static constexpr int kItems = kRing + 64 * C::kRing, kFound = kItems + 64 * kItemsAhead;
  static constexpr int kSharedBytes = kItems + kItemBytes;
  static_assert(kBuffers >= 1 && kSharedBytes <= kMaxShared, "shared memory of a block");
  static_assert(C::kTileM == kRows * C::kConsumers * C::kBlocksM);
  static_assert(C::kTileM % C::kPanel == 0 && C::kTileN % C::kPanel == 0);
  static_assert(C::kPanel * C::kElement == 128 && C::kRing > C::kStages && sizeof(Work) == 64);
  static_assert(!kPingPong || kRows * kWarpgroups * C::kTileN * C::kElement * 2 <= kStaging);
  static_assert(C::kConsumers * C::kBlocksM == 2, "blocks of kRows; words in front of kParts");
  // What a block of a cluster sends of a warpgroup's rows and kPanel columns of a tile.
  static constexpr int kSquareBytes = kRows * C::kPanel * 4;
  static constexpr bool kNarrows = C::kTileN == 2 * C::kTileM;  // has narrow tiles
};

// Kernels whose tiles at the diagonal can take the squares of others (sm90_extra_squares.cuh).
template <class C>
constexpr bool kTakesExtraSquares =
    !Layout<C>::kPingPong && C::kTileM == 128 && C::kTileN == 128 && !C::kAMnMajor && !C::kBMnMajor;

// Of a work item's extra square, the first row (0: it has none) and the first column.
TC_DEVICE int& extra_m0(Work& w) { return w.k_first; }
TC_DEVICE int& extra_n0(Work& w) { return w.k_step; }
TC_DEVICE int extra_m0(const Work& w) { return w.k_first; }
TC_DEVICE int extra_n0(const Work& w) { return w.k_step; }

template <class C>
TC_DEVICE bool has_extra_square(const Work& w) {
  return kTakesExtraSquares<C> && extra_m0(w) != 0;
}

// Blocks that divide the K of a tile: a cluster.
struct Team {
  int rank = cluster_rank(), size = cluster_size();

  // The cluster's own, of the grid's.
  TC_DEVICE int number() const {
    int number;
    asm volatile("mov.u32 %0, %%clusterid.x;" : "=r"(number));
    return number;
  }

  // The first k block of a rank's part, of at most 2^25.
  TC_DEVICE int k_begin(u32 k_blocks, u32 of_rank) const {
    return static_cast<int>(k_blocks * of_rank / static_cast<u32>(size));
  }
};

// The lane; values derived from it do not stay in registers from one square to the next.
TC_DEVICE int lane_of_square() {
  int lane;
  asm volatile("mov.u32 %0, %%laneid;" : "=r"(lane));
  return lane;
}

// The address of an element of 128-byte rows with the TMA's swizzle.
template <class C>
TC_DEVICE u32 element_at(u32 rows, int row, int column) {
  const int byte = column * C::kElement;
  return rows + row * 128 + ((byte / 16) ^ (row & 7)) * 16 + byte % 16;
}

// stage_columns of a warp's 16 rows, transposed: `rows` are those of the square's columns.
template <class C>
TC_DEVICE void stage_transposed(u32 rows, int warp, const float (&x)[C::kPanel / 2]) {
  const int lane = lane_of_square(), m = warp * 16 % C::kPanel;
  if constexpr (C::kElement == 2) {
#pragma unroll
    for (int j = 0; j < C::kPanel / 16; ++j) {
      const float* s = x + 8 * j;
      const int n = 16 * j + lane / 16 * 8 + lane % 8;
      stmatrix_transposed(
          element_at<C>(rows, n, m + lane / 8 % 2 * 8), DTypeTraits<C::kType>::pack(s[0], s[1]),
          DTypeTraits<C::kType>::pack(s[2], s[3]), DTypeTraits<C::kType>::pack(s[4], s[5]),
          DTypeTraits<C::kType>::pack(s[6], s[7]));
    }
  } else {
    rows += warp * 16 / C::kPanel * (C::kPanel * 128);  // each square has its own rows
#pragma unroll
    for (int i = 0; i < C::kPanel / 2; ++i) {
      const int n = i / 4 * 8 + lane % 4 * 2 + i % 2;
      store_shared(element_at<C>(rows, n, m + lane / 4 + i / 2 % 2 * 8), x[i]);
    }
  }
}

// A warp's 16 rows of a square on the diagonal, from its row `first` on: elements above it are
// replaced by those of the transposed square. A lane has 16 bytes of every fourth row.
template <class C>
TC_DEVICE void mirror_rows(u32 rows, u32 transposed, int first) {
  constexpr int kVector = 16 / C::kElement, kInWord = 4 / C::kElement;
  const int lane = lane_of_square(), column = lane % 8 * kVector;
  u32 lower[4][4], upper[4][4];
#pragma unroll
  for (int j = 0; j < 4; ++j) {
    load_shared(lower[j], element_at<C>(rows, lane / 8 + 4 * j, column));
    load_shared(upper[j], element_at<C>(transposed, lane / 8 + 4 * j, column));
  }
#pragma unroll
  for (int j = 0; j < 4; ++j) {
    const int row = lane / 8 + 4 * j, last = first + row - column;  // element kept
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      u32 kept = i * kInWord <= last ? 0xffffffff : 0;
      if (kInWord == 2 && i * kInWord == last) kept = 0xffff;
      lower[j][i] = (lower[j][i] & kept) | (upper[j][i] & ~kept);
    }
    store_shared(element_at<C>(rows, row, column), lower[j]);
  }
}

// A warp's 16 rows of a square of the addend, from row m and column n on: a lane copies 16 bytes of
// every fourth row to the warp's own staging rows, zeros for what lies outside.
template <class C>
TC_DEVICE void request_addend(const Sm90MatmulParams& p, const Work& w, u32 rows, int m, int n) {
  constexpr int kVector = 16 / C::kElement;
  const int lane = lane_of_square(), column = n + lane % 8 * kVector;
  const tc_int64 batch = w.b0 * p.addend_batch_stride[0] + w.b1 * p.addend_batch_stride[1] +
                         w.b2 * p.addend_batch_stride[2];
#pragma unroll
  for (int row = lane / 8; row < 16; row += 4) {
    const bool exists = m + row < p.n && column < p.n;
    const tc_int64 at = exists ? batch + (m + row) * p.addend_stride_m + column : 0;
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(
                     element_at<C>(rows, row, lane % 8 * kVector)),
                 "l"(static_cast<const char*>(p.addend) + at * C::kElement), "r"(exists ? 16 : 0)
                 : "memory");
  }
}

// Adds beta times what request_addend copied.
template <class C>
TC_DEVICE void add_requested(const Sm90MatmulParams& p, u32 rows, float (&x)[C::kPanel / 2]) {
  using Traits = DTypeTraits<C::kType>;
  const int lane = lane_of_square();
  asm volatile("cp.async.wait_all;" ::: "memory");
  __syncwarp();
  if constexpr (C::kElement == 2) {
#pragma unroll
    for (int j = 0; j < C::kPanel / 16; ++j) {
      u32 pairs[4];
      ldmatrix<false>(pairs, element_at<C>(rows, lane % 16, 16 * j + lane / 16 * 8));
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        float* s = x + 8 * j + 2 * i;
        s[0] = __fmaf_rn(p.beta, Traits::load(static_cast<u16>(pairs[i])), s[0]);
        s[1] = __fmaf_rn(p.beta, Traits::load(static_cast<u16>(pairs[i] >> 16)), s[1]);
      }
    }
  } else {
#pragma unroll
    for (int i = 0; i < C::kPanel / 4; ++i) {
      float low, high;
      const int row = lane / 4 + i % 2 * 8, column = i / 2 * 8 + lane % 4 * 2;
      asm volatile("ld.shared.v2.f32 {%0, %1}, [%2];"
                   : "=f"(low), "=f"(high)
                   : "r"(element_at<C>(rows, row, column))
                   : "memory");
      x[2 * i] = __fmaf_rn(p.beta, low, x[2 * i]);
      x[2 * i + 1] = __fmaf_rn(p.beta, high, x[2 * i + 1]);
    }
  }
}

// The same for an addend of other strides, read by elements; m and n are the lane's first row and
// column.
template <class C>
TC_DEVICE void add_elements(const Sm90MatmulParams& p, const Work& w, int m, int n,
                            float (&x)[C::kPanel / 2]) {
  using Traits = DTypeTraits<C::kType>;
  const tc_int64 batch = w.b0 * p.addend_batch_stride[0] + w.b1 * p.addend_batch_stride[1] +
                         w.b2 * p.addend_batch_stride[2];
  const auto from = static_cast<const typename Traits::Storage*>(p.addend) + batch;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int row = m + 8 * half;
    const auto of_row = from + row * p.addend_stride_m;
#pragma unroll
    for (int j = 0; j < C::kPanel / 8; ++j) {
      const int column = n + 8 * j;
      if (row >= p.n || column >= p.n) continue;
      float* s = x + 4 * j + 2 * half;
      const auto pair = of_row + column * p.addend_stride_n;
      s[0] = __fmaf_rn(p.beta, Traits::load(pair[0]), s[0]);
      s[1] = __fmaf_rn(p.beta, Traits::load(pair[p.addend_stride_n]), s[1]);
    }
  }
}

// Whether a warpgroup's rows have squares in these columns: none is above the diagonal only.
template <class C>
TC_DEVICE bool has_squares(const Sm90MatmulParams& p, int m0, int n0) {
  return m0 < p.n && n0 < m0 + Layout<C>::kRows;
}

// The first row of the squares of a step of the epilogue.
template <class C>
TC_DEVICE int first_row(const Work& w, int group, int step) {
  constexpr int kSteps = C::kTileN / C::kPanel;
  return w.m0 + (Layout<C>::kPingPong ? step / kSteps : group) * Layout<C>::kRows;
}

// If a step's squares are the extra one's: moves them from the place above the diagonal there.
template <class C>
TC_DEVICE void move_to_extra(const Work& w, int group, int step, int& m0, int& n0) {
  if constexpr (kTakesExtraSquares<C>) {
    const int column = step * C::kPanel - Layout<C>::kRows;
    if (group != 0 || column < 0 || !has_extra_square<C>(w)) return;
    m0 = extra_m0(w);
    n0 = extra_n0(w) + column;
  }
}

template <class C>
TC_DEVICE void store_box(const Sm90MatmulParams& p, const Work& w, u32 from, int m, int n) {
  if (m >= p.n || n >= p.n) return;
  if (p.flags & kSm90Batched) {
    tma_store(&p.out_map, from, n, m, w.b0, w.b1, w.b2, kEvictNormal);
  } else {
    tma_store(&p.out_map, from, n, m, kEvictNormal);
  }
}

// Of 64 rows and kPanel columns of a cluster's tile: the block that adds them up and stores them,
// and their number among those of that block.
struct Owner {
  int rank, number;

  TC_DEVICE Owner(const Team& team, int square) {
    number = static_cast<u32>(square) / static_cast<u32>(team.size);
    rank = square - number * team.size;
  }
};

template <class C>
TC_DEVICE Owner owner_of(const Team& team, int step, int group) {
  return Owner(team, step * C::kConsumers + group);
}

template <class C>
TC_DEVICE bool owns(const Team& team, int step, int group) {
  return team.size == 1 || owner_of<C>(team, step, group).rank == team.rank;
}

// Where an owner receives its columns, the parts of other blocks one after another: in the stages,
// whose memory is free after the products.
template <class C>
TC_DEVICE u32 received_at(const Team& team, u32 shared, const Owner& owner, int part) {
  const int square = owner.number * (team.size - 1) + part;
  return shared + square * Layout<C>::kSquareBytes + threadIdx.x % kWarpgroup * 16;
}

// Sends what others own to them, and announces what the block receives. Contains a cluster barrier,
// for all threads of the cluster.
template <class C>
TC_DEVICE void send_squares(const Sm90MatmulParams& p, const Work& w, const Team& team, int group,
                            u32 shared, const float (&sum)[C::kBlocksM][C::kTileN / 2]) {
  constexpr int kSteps = C::kTileN / C::kPanel;
  const u32 parts = shared + Layout<C>::kParts;
  cluster_meet();  // all blocks have read their last stage
  int own = 0;
#pragma unroll 1
  for (int step = 0; step < kSteps; ++step) {
    if (!has_squares<C>(p, w.m0 + group * Layout<C>::kRows, w.n0 + step * C::kPanel)) break;
    const Owner owner = owner_of<C>(team, step, group);
    if (owner.rank == team.rank) {
      ++own;
      continue;
    }
    float x[C::kPanel / 2];
#pragma unroll
    for (int i = 0; i < C::kPanel / 2; ++i) x[i] = 0.0f;
    take_sums<C, C::kPanel, 0, kSteps>(step, 1.0f, sum, x);
    const int part = team.rank - (team.rank > owner.rank ? 1 : 0);
    const u32 to = map_to_rank(received_at<C>(team, shared, owner, part), owner.rank);
    const u32 arrived = map_to_rank(parts, owner.rank);
#pragma unroll
    for (int j = 0; j < C::kPanel / 8; ++j) {
      store_remote_async(to + j * (16 * kWarpgroup), x + 4 * j, arrived);
    }
  }
  if (threadIdx.x % kWarpgroup == 0) {
    barrier_expect(parts, own * (team.size - 1) * Layout<C>::kSquareBytes);
  }
  barrier_wait(parts, 0);
}

// Adds what the owner of columns has received, in the order of K.
template <class C>
TC_DEVICE void add_received(const Team& team, u32 shared, int step, int group,
                            float (&x)[C::kPanel / 2]) {
  u32 at = received_at<C>(team, shared, owner_of<C>(team, step, group), 0);
#pragma unroll 1
  for (int part = 1; part < team.size; ++part, at += Layout<C>::kSquareBytes) {
#pragma unroll
    for (int j = 0; j < C::kPanel / 8; ++j) {
      float received[4];
      load_shared(received, at + j * (16 * kWarpgroup));
#pragma unroll
      for (int c = 0; c < 4; ++c) x[4 * j + c] += received[c];
    }
  }
}

// Stores a warpgroup's rows of a tile, square by square, and each square's transpose: the squares
// from number `first` to `last` - 1; of a cluster's tile, its own. `kHasBuffers`: `staging` has
// a buffer for each square. `kAdds`: there can be an addend.
template <class C, bool kHasBuffers, bool kAdds>
TC_DEVICE void store_squares_with(const Sm90MatmulParams& p, const Work& w, const Team& team,
                                  u32 shared, u32 staging, int& turn, int group, int first,
                                  int last, const float (&sum)[C::kBlocksM][C::kTileN / 2]) {
  constexpr int kSteps = C::kTileN / C::kPanel;  // of each block of rows
  const int warp = threadIdx.x / 32 % 4, lane = threadIdx.x % 32;
  const int first_column = w.n0;
  // Squares, of those whose addend request_first_squares has requested.
  int stored = first == 0 ? 0 : Layout<C>::kBuffers;
#pragma unroll 1
  for (int step = first; step < last; ++step) {
    int m0 = first_row<C>(w, group, step);
    int n0 = first_column + step % kSteps * C::kPanel;
    move_to_extra<C>(w, group, step, m0, n0);
    if (!has_squares<C>(p, m0, n0)) {
      if (C::kBlocksM == 1) break;
      continue;
    }
    if (!owns<C>(team, step, group)) continue;
    float x[C::kPanel / 2];
#pragma unroll
    for (int i = 0; i < C::kPanel / 2; ++i) x[i] = 0.0f;
    if (team.size > 1) add_received<C>(team, shared, step, group, x);
    take_sums<C, C::kPanel, 0, C::kBlocksM * kSteps>(step, team.size > 1 ? 1.0f : p.alpha, sum, x);
    if (team.size > 1) {
#pragma unroll
      for (int i = 0; i < C::kPanel / 2; ++i) x[i] *= p.alpha;
    }
    const u32 direct = staging + turn * Layout<C>::kBufferBytes, own = direct + warp * 2048;
    const u32 transposed = direct + Layout<C>::kHalfBytes;
    turn = turn + 1 == Layout<C>::kBuffers && !kHasBuffers ? 0 : turn + 1;
    // A square's stores, as it is and transposed, are one group.
    if (lane == 0 && !kHasBuffers) tma_store_wait_read<Layout<C>::kBuffers - 1>();
    if (kAdds && p.flags & kSm90AddVector) {
      if (stored++ >= Layout<C>::kBuffers || w.streamed) {
        __syncwarp();
        request_addend<C>(p, w, own, m0 + warp * 16, n0);
      }
      add_requested<C>(p, own, x);
    } else if (kAdds && p.addend != nullptr) {
      add_elements<C>(p, w, m0 + warp * 16 + lane / 4, n0 + lane % 4 * 2, x);
    }
    const int square = m0 + warp * 16 / C::kPanel * C::kPanel;  // its first row
    const bool below = square > n0, diagonal = square == n0;
    named_sync(kGroupBarrier + group, kWarpgroup);  // the TMA has read all warps' parts of a buffer
    if (below || diagonal) {
      stage_columns<C, C::kPanel>(own, 0, x);
      stage_transposed<C>(transposed, warp, x);
    }
    fence_async_proxy();
    named_sync(kGroupBarrier + group, kWarpgroup);
    if (diagonal) {
      mirror_rows<C>(own, transposed + warp * 2048, warp * 16 % C::kPanel);
      fence_async_proxy();
      __syncwarp();
    }
    if (lane == 0) {
      if (below || diagonal) store_box<C>(p, w, own, m0 + warp * 16, n0);
      if (below) {
        store_box<C>(p, w, transposed + warp * 2048, n0 + warp * 16 % C::kPanel, square);
      }
      tma_store_commit();
    }
  }
}

// The code without an addend is apart, so that the instructions of a square follow one another.
// Ping-pong kernels hide that time; with both, ptxas would serialise their products, and TF32's
// (C7511).
template <class C, bool kHasBuffers = false>
TC_DEVICE void store_squares(const Sm90MatmulParams& p, const Work& w, const Team& team, u32 shared,
                             u32 staging, int& turn, int group, int first, int last,
                             const float (&sum)[C::kBlocksM][C::kTileN / 2]) {
  if (!Layout<C>::kPingPong && C::kElement == 2 && p.addend == nullptr) {
    store_squares_with<C, kHasBuffers, false>(p, w, team, shared, staging, turn, group, first, last,
                                              sum);
  } else {
    store_squares_with<C, kHasBuffers, true>(p, w, team, shared, staging, turn, group, first, last,
                                             sum);
  }
}

// Requests the addend for as many of the block's squares as there are buffers, while the tile is
// multiplied.
template <class C>
TC_DEVICE void request_first_squares(const Sm90MatmulParams& p, const Work& w, u32 staging,
                                     int turn, int group) {
  const Team team;
  constexpr int kSteps = C::kTileN / C::kPanel;
  const int warp = threadIdx.x / 32 % 4;
  if (threadIdx.x % 32 == 0) tma_store_wait_read<0>();  // buffers are free
  __syncwarp();
  int requested = 0;
#pragma unroll 1
  for (int step = 0; step < C::kBlocksM * kSteps; ++step) {
    int m0 = first_row<C>(w, group, step), n0 = w.n0 + step % kSteps * C::kPanel;
    move_to_extra<C>(w, group, step, m0, n0);
    if (requested == Layout<C>::kBuffers) break;
    if (!has_squares<C>(p, m0, n0)) {
      if (C::kBlocksM == 1) break;
      continue;
    }
    if (!owns<C>(team, step, group)) continue;
    const u32 direct = staging + turn * Layout<C>::kBufferBytes;
    turn = turn + 1 == Layout<C>::kBuffers ? 0 : turn + 1;
    request_addend<C>(p, w, direct + warp * 2048, m0 + warp * 16, n0);
    ++requested;
  }
}

}  // namespace sm90
}  // namespace torch_cubin
