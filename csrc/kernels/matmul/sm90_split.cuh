// Tiles whose K is split: over clusters, through global memory (join), or over the two blocks of a
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

// Combines the parts of a streamed tile; `sum` holds this cluster's part. Returns true for the
// warpgroup that finishes the tile, whose `sum` is then that of the whole tile: the finisher's part
// first, then the others in the order of K. With `adds`, `total` (the sums of rows) likewise.
template <class C>
TC_DEVICE bool join(const Sm90MatmulParams& p, const Work& w, int group, u32 word,
                    float (&sum)[C::kBlocksM][C::kTileN / 2], bool adds,
                    float (&total)[C::kBlocksM]) {
  constexpr int kVectors = C::kTileM * C::kTileN / 4;  // per part
  int thread = threadIdx.x % kWarpgroup;
  auto parts = reinterpret_cast<float4*>(p.partial) + group * (kVectors / C::kConsumers) + thread;
  float* rows = p.row_partial + group * (C::kTileM / C::kConsumers);
  auto move = [&](auto how, int part) {
    constexpr Move kMove = decltype(how)::value;
    move_part<C, kMove>(parts + static_cast<tc_int64>(part) * kVectors, sum);
    if constexpr (C::kRowSums) {
      if (adds) move_rows<C, kMove>(rows + static_cast<tc_int64>(part) * C::kTileM, total);
    }
  };
  int* counter = p.counters + w.counter + group;
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
  if (!(w.finisher && all([&] { return wait_for_parts(counter, w.parts - 1, p.polls); }))) {
    move(Moved<Move::store>{}, w.part);
    if (!all([&] { return count_part(counter) == w.parts - 1; })) return false;
    if (!w.finisher) move(Moved<Move::load>{}, w.last_part);
  }
  if (thread == 0) *counter = 0;  // for the next launch
  int step = 2 << ClusterShape(p.flags).log_size();
#pragma unroll 1
  for (int number = 0; number < w.parts - 1; ++number) {
    move(Moved<Move::add>{}, w.first_part + number * step);
  }
  return true;
}

// Each block of a cluster has half of K. Warpgroup g of block g (of block 0, if there is only one
// warpgroup) adds the other block's sums and returns true. Contains two cluster barriers, for all
// threads of both blocks.
template <class C>
TC_DEVICE bool exchange(int group, u32 shared, float (&sum)[C::kBlocksM][C::kTileN / 2]) {
  constexpr int kVectors = C::kTileN / 8;
  int thread = threadIdx.x % kWarpgroup;
  int rank = cluster_rank();
  bool keep = rank == (C::kConsumers == 1 ? 0 : group);
  u32 at = shared + thread * 16;
  cluster_sync_unaligned();  // both blocks have read their last stage: its memory is free
  if (!keep) {
    u32 remote = map_to_rank(at, rank ^ 1);
#pragma unroll
    for (int i = 0; i < C::kBlocksM; ++i) {
#pragma unroll
      for (int j = 0; j < kVectors; ++j) {
        const float* s = sum[i] + 4 * j;
        store_remote(remote + (i * kVectors + j) * 2048, s[0], s[1], s[2], s[3]);
      }
    }
  }
  cluster_sync_unaligned();
  if (!keep) return false;
#pragma unroll
  for (int i = 0; i < C::kBlocksM; ++i) {
#pragma unroll
    for (int j = 0; j < kVectors; ++j) {
      float x[4];
      asm volatile("ld.shared.v4.f32 {%0, %1, %2, %3}, [%4];"
                   : "=f"(x[0]), "=f"(x[1]), "=f"(x[2]), "=f"(x[3])
                   : "r"(at + (i * kVectors + j) * 2048)
                   : "memory");
#pragma unroll
      for (int c = 0; c < 4; ++c) sum[i][4 * j + c] += x[c];
    }
  }
  return true;
}

}  // namespace sm90
}  // namespace torch_cubin
