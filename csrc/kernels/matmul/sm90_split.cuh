// Tiles whose K is split: over clusters, through global memory (join), or over the blocks of a
// cluster, through shared memory (exchange).
#pragma once

#include "sm90_row_sums.cuh"
#include "sm90_schedule.cuh"

namespace torch_cubin {
namespace sm90 {

// Stores a part of a streamed tile to memory, or loads it into the sums, or adds it to them.
enum class Move { store, load, add };
template <Move kMove>
struct Moved {
  static constexpr Move value = kMove;
};

template <class C, Move kMove>
TC_DEVICE void move_part(float4* part, float (&sum)[C::kBlocksM][C::kTileN / 2]) {
#pragma unroll
  for (int i = 0; i < C::kBlocksM; ++i) {
#pragma unroll
    for (int j = 0; j < C::kTileN / 8; ++j) {
      float* s = sum[i] + 4 * j;
      float4* at = part + (i * (C::kTileN / 8) + j) * kWarpgroup;
      if constexpr (kMove == Move::store) {
        __stcg(at, make_float4(s[0], s[1], s[2], s[3]));
      } else {
        float4 x = __ldcg(at);
        s[0] = kMove == Move::add ? s[0] + x.x : x.x;
        s[1] = kMove == Move::add ? s[1] + x.y : x.y;
        s[2] = kMove == Move::add ? s[2] + x.z : x.z;
        s[3] = kMove == Move::add ? s[3] + x.w : x.w;
      }
    }
  }
}

// move_part for sums of rows, by the first 64 threads of a warpgroup.
template <class C, Move kMove>
TC_DEVICE void move_rows(float* part, float (&total)[C::kBlocksM]) {
  const int thread = threadIdx.x % kWarpgroup;
  if (thread >= 64) return;
#pragma unroll
  for (int i = 0; i < C::kBlocksM; ++i) {
    float* at = part + i * 64 + thread;
    if constexpr (kMove == Move::store) {
      __stcg(at, total[i]);
    } else {
      total[i] = kMove == Move::add ? total[i] + __ldcg(at) : __ldcg(at);
    }
  }
}

// Increments the counter of a tile's parts, by one thread for its warpgroup, and returns the old
// value. A release of the warpgroup's earlier writes, and an acquire of the writes of those that
// counted before.
TC_DEVICE int count_part(int* counter) {
  int before;
  asm volatile("fence.acq_rel.gpu;" ::: "memory");
  asm volatile("atom.relaxed.gpu.global.add.s32 %0, [%1], 1;"
               : "=r"(before)
               : "l"(counter)
               : "memory");
  asm volatile("fence.acq_rel.gpu;" ::: "memory");
  return before;
}

TC_DEVICE bool wait_for_parts(const int* counter, int wanted, int polls) {
  for (;;) {
    int parts;
    asm volatile("ld.acquire.gpu.global.s32 %0, [%1];" : "=r"(parts) : "l"(counter) : "memory");
    if (parts == wanted) return true;
    if (--polls < 0) return false;
    __nanosleep(100);
  }
}

// Where the parts of a streamed tile are: a thread's sums of part 0, its warpgroup's sums of rows,
// and how many parts lie from one that adds to the next.
struct Parts {
  float4* sums;
  float* rows;
  int* counter;
  int step, polls;
};

// Combines the parts of a streamed tile; `sum` holds this cluster's part. Returns true for the
// warpgroup that finishes the tile, whose `sum` is then that of the whole tile: the finisher's part
// first, then the others in the order of K. With `adds`, `total` (the sums of rows) likewise.
template <class C>
TC_DEVICE bool join_parts(const Parts& parts, const Work& w, int group, u32 word,
                          float (&sum)[C::kBlocksM][C::kTileN / 2], bool adds,
                          float (&total)[C::kBlocksM]) {
  constexpr int kVectors = C::kTileM * C::kTileN / 4;  // per part
  int thread = threadIdx.x % kWarpgroup;
  auto move = [&](auto how, int part) {
    constexpr Move kMove = decltype(how)::value;
    move_part<C, kMove>(parts.sums + static_cast<tc_int64>(part) * kVectors, sum);
    if constexpr (C::kRowSums) {
      if (adds) move_rows<C, kMove>(parts.rows + static_cast<tc_int64>(part) * C::kTileM, total);
    }
  };
  // One thread decides for the warpgroup.
  auto all = [&](auto decide) {
    named_sync(kGroupBarrier + group, kWarpgroup);
    if (thread == 0) {
      u32 answer = decide();
      asm volatile("st.shared.u32 [%0], %1;" ::"r"(word), "r"(answer) : "memory");
    }
    named_sync(kGroupBarrier + group, kWarpgroup);
    u32 answer;
    asm volatile("ld.shared.u32 %0, [%1];" : "=r"(answer) : "r"(word) : "memory");
    return answer != 0;
  };
  if (!(w.finisher &&
        all([&] { return wait_for_parts(parts.counter, w.parts - 1, parts.polls); }))) {
    move(Moved<Move::store>{}, w.part);
    if (!all([&] { return count_part(parts.counter) == w.parts - 1; })) return false;
    if (!w.finisher) move(Moved<Move::load>{}, w.last_part);
  }
  if (thread == 0) *parts.counter = 0;  // for the next launch
#pragma unroll 1
  for (int number = 0; number < w.parts - 1; ++number) {
    move(Moved<Move::add>{}, w.first_part + number * parts.step);
  }
  return true;
}

// join_parts() of a tile that warpgroups share.
template <class C>
TC_DEVICE bool join(const Sm90MatmulParams& p, const Work& w, int group, u32 word,
                    float (&sum)[C::kBlocksM][C::kTileN / 2], bool adds,
                    float (&total)[C::kBlocksM]) {
  constexpr int kVectors = C::kTileM * C::kTileN / 4 / C::kConsumers;
  const int thread = threadIdx.x % kWarpgroup;
  const Parts parts = {reinterpret_cast<float4*>(p.partial) + group * kVectors + thread,
                       p.row_partial + group * (C::kTileM / C::kConsumers),
                       p.counters + w.counter + group, 2 << ClusterShape(p.flags).log_size(),
                       p.polls};
  return join_parts<C>(parts, w, group, word, sum, adds, total);
}

// Bytes of sums that a warp has of a tile, and how many warps' rows one block finishes, where the
// blocks of a cluster split K.
template <class C>
constexpr int kWarpSums = C::kBlocksM * 16 * C::kTileN * 4;
template <class C>
TC_DEVICE int warps_to_finish(int log_parts) {
  return max(4 * C::kConsumers >> log_parts, 1);
}

// Initializes the barrier at which the other blocks' sums arrive, by one thread.
template <class C>
TC_DEVICE void expect_sums(const Sm90MatmulParams& p, u32 arrived) {
  const int log = log_parts<C>(p), warps = warps_to_finish<C>(log);
  barrier_init(arrived, 1);
  if (cluster_rank() * warps >= 4 * C::kConsumers) return;
  barrier_expect(arrived, ((1 << log) - 1) * warps * kWarpSums<C>);
}

// Each block of a cluster has a part of K. The rows of each warp are finished by one of them, to
// which the others send their sums. Returns true in that block; `sum` is then its own sums and the
// others' in the order of K, added from zero: of two blocks what all kernels have that add parts of
// K. Contains a cluster barrier, for all threads of all blocks.
template <class C>
TC_DEVICE bool exchange(const Sm90MatmulParams& p, int warp, u32 shared, u32 arrived,
                        float (&sum)[C::kBlocksM][C::kTileN / 2]) {
  constexpr int kVectors = C::kTileN / 8;
  const int log = log_parts<C>(p), warps = warps_to_finish<C>(log);
  const int rank = cluster_rank(), finisher = warp / warps;
  const u32 own = shared + warp % warps * kWarpSums<C> + threadIdx.x % 32 * 16;
  const u32 of_block = warps * kWarpSums<C>;
  cluster_meet();  // all blocks have read their last stage: the memory of stages is free
  if (rank != finisher) {
    const u32 to = map_to_rank(own + (rank - (rank > finisher)) * of_block, finisher);
    const u32 barrier = map_to_rank(arrived, finisher);
#pragma unroll
    for (int i = 0; i < C::kBlocksM; ++i) {
#pragma unroll
      for (int j = 0; j < kVectors; ++j) {
        store_remote_async(to + (i * kVectors + j) * 512, sum[i] + 4 * j, barrier);
      }
    }
    return false;
  }
#pragma unroll
  for (int i = 0; i < C::kBlocksM; ++i) {
#pragma unroll
    for (int j = 0; j < C::kTileN / 2; ++j) sum[i][j] += 0.0f;  // the sum of -0 and -0 is 0 then
  }
  barrier_wait(arrived, 0);
#pragma unroll 1
  for (int other = 0; other < (1 << log) - 1; ++other) {
    const u32 from = own + other * of_block;
#pragma unroll
    for (int i = 0; i < C::kBlocksM; ++i) {
#pragma unroll
      for (int j = 0; j < kVectors; ++j) {
        float x[4];
        asm volatile("ld.shared.v4.f32 {%0, %1, %2, %3}, [%4];"
                     : "=f"(x[0]), "=f"(x[1]), "=f"(x[2]), "=f"(x[3])
                     : "r"(from + (i * kVectors + j) * 512)
                     : "memory");
#pragma unroll
        for (int c = 0; c < 4; ++c) sum[i][4 * j + c] += x[c];
      }
    }
  }
  return true;
}

}  // namespace sm90
}  // namespace torch_cubin
