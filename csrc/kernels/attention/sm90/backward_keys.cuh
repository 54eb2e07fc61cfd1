// What the warpgroups of keys of attention's backward kernels on Hopper have in common: their
// products, from scores to weights and gradients, dS to shared memory, and the steps of a
// work item. The other roles of a block are in sm90/backward_block.cuh.
#pragma once

#include "backward_block.cuh"

namespace torch_cubin {
namespace sm90 {

constexpr int kGroupBarrier = 1;  // named barriers start here: one for each warpgroup of keys

// out = keys * rows^T, for 64 keys.
template <class C>
TC_DEVICE void multiply_keys(float (&out)[C::kRows / 2], u32 keys, u32 rows) {
  const u64 high = wgmma_descriptor(0, 0, 1024);
#pragma unroll
  for (int i = 0; i < C::kD / 16; ++i) {
    Wgmma<C::kRows>::template run<C::kType, 0, 0>(
        out, descriptor(high, descriptor_low<C>(keys), k_major_offset(i, C::kKeys)),
        descriptor(high, descriptor_low<C>(rows), k_major_offset(i, C::kRows)), i > 0);
  }
  wgmma_commit();
}

// sum += w * rows. NOTE: ptxas refuses products of 256 columns in a kernel of 512 threads, whatever
// registers setmaxnreg gives a warpgroup, so those are two of 128.
template <class C>
TC_DEVICE void add_rows(float (&sum)[C::kD / 2], const u32 (&w)[C::kRows / 16][4], u32 rows) {
  constexpr int kColumns = C::kD < 128 ? C::kD : 128;
  const u64 high = wgmma_descriptor(0, C::kRows * 128, 1024);  // 64 columns: one panel further
#pragma unroll
  for (int i = 0; i < C::kRows / 16; ++i) {
#pragma unroll
    for (int part = 0; part < C::kD / kColumns; ++part) {
      WgmmaRegisters<kColumns>::template run<C::kType, 1>(
          reinterpret_cast<float (&)[kColumns / 2]>(sum[part * (kColumns / 2)]), w[i],
          descriptor(high, descriptor_low<C>(rows), i * kMnMajorStep + part * (2 * C::kRows * 128)),
          1);
    }
  }
  wgmma_commit();
}

// s = q.k becomes P; `from`: this thread's logsumexp of the step.
template <class C, int kBegin = 0, int kEnd = C::kRows / 8>
TC_DEVICE void exponentiate(float (&s)[C::kRows / 2], u32 from, float unit) {
#pragma unroll
  for (int j = kBegin; j < kEnd; ++j) {
    float lse[2];
    load_shared(lse, from + j * 32);
#pragma unroll
    for (int r = 0; r < 4; ++r) s[4 * j + r] = exp2_approx(fmaf(s[4 * j + r], unit, -lse[r % 2]));
  }
}

// Calls hide(i) for each element i hidden from this thread's first key, `own`, or the key 8
// further, in the step of slot `q`. `group`: which 64 keys of the block.
template <class C, class Hide>
TC_DEVICE void for_each_hidden(const Sm90Sequence& of, u32 shared, u32 q, int group, int own,
                               Hide&& hide) {
  u32 first_row;
  load_shared(first_row, shared + C::kFirstRow + 4 * q);
  if ((first_row >> group & 1) == 0) return;
  int low[2], high[2], column = static_cast<int>(first_row / 8) + threadIdx.x % 4 * 2;
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    int key = own + 8 * h;
    low[h] = key < of.columns ? key - of.last - column : 1 << 30;
    high[h] = min(key - of.first, of.rows - 1) - column;
  }
#pragma unroll
  for (int i = 0; i < C::kRows / 2; ++i) {
    int at = i / 4 * 8 + i % 2, h = i / 2 % 2;
    if (at < low[h] || at > high[h]) hide(i);
  }
  if ((first_row & 4) == 0) return;
  u32 words = shared + C::kMask + q * C::kMaskBytes +
              (kWarpgroup * group + threadIdx.x % kWarpgroup) * (C::kMaskWords * 4);
#pragma unroll
  for (int word = 0; word < C::kMaskWords; ++word) {
    u32 seen;
    load_shared(seen, words + 4 * word);
#pragma unroll
    for (int i = 32 * word; i < 32 * word + 32 && i < C::kRows / 2; ++i) {
      if ((seen >> i % 32 & 1) == 0) hide(i);
    }
  }
}

// Stores a warp's dS to shared memory, [key][query]; `to`: this thread's row.
template <class C>
TC_DEVICE void store_matrices(const u32 (&w)[C::kRows / 16][4], u32 to) {
  u32 lane = threadIdx.x % 32, swizzle = lane % 8 * 16;
#pragma unroll
  for (int i = 0; i < C::kRows / 16; ++i) {
    stmatrix(to + i / 4 * C::kScorePanelBytes + ((i % 4 * 32 + lane / 16 * 16) ^ swizzle), w[i][0],
             w[i][1], w[i][2], w[i][3]);
  }
  fence_async_proxy();
  __syncwarp();
}

template <class C>
TC_DEVICE void store_scores(const u32 (&w)[C::kRows / 16][4], u32 to, u32 full) {
  store_matrices<C>(w, to);
  if (threadIdx.x % 32 == 0) barrier_arrive(full);
}

// What the warpgroups of keys have in common. `keys64`: which 64 keys of the work item.
template <class C, class Params = Sm90BackwardParams>
struct KeyGroup {
  const Params& p;
  u32 shared;
  const KeyBlock* items;
  int keys64;
  u32 number = 0;  // of the work item
  u32 step = 0;    // of all work items

  static TC_DEVICE int warp() { return threadIdx.x / 32 % 4; }
  static TC_DEVICE int lane() { return threadIdx.x % 32; }
  TC_DEVICE const KeyBlock& work() const { return items[slot<C::kWorkItems>(number)]; }
  TC_DEVICE int own_key() const {
    return work().key_tile * C::kWorkKeys + 64 * keys64 + 16 * warp() + lane() / 4;
  }
  TC_DEVICE u32 q() const { return slot<C::kQStages>(step); }
  TC_DEVICE u32 grad() const { return slot<C::kGradStages>(step); }
  TC_DEVICE u32 score() const { return slot<C::kScoreStages>(step); }
  TC_DEVICE u32 q_at() const { return shared + C::kQ + q() * C::kQBytes; }
  TC_DEVICE u32 grad_at() const { return shared + C::kGrad + grad() * C::kQBytes; }
  TC_DEVICE u32 sums_at() const { return shared + C::kSums + q() * C::kSumBytes + lane() % 4 * 8; }

  TC_DEVICE void wait_for_q() const {
    barrier_wait(shared + C::kQFull + 8 * q(), phase<C::kQStages>(step));
  }
  TC_DEVICE void wait_for_grad() const {
    barrier_wait(shared + C::kGradFull + 8 * grad(), phase<C::kGradStages>(step));
  }
  TC_DEVICE void wait_for_values() const {
    barrier_wait(shared + C::kValuesFull, phase<1>(number));
  }
};

// dp becomes dS; `from`: this thread's delta of the step.
template <class C>
TC_DEVICE void differentiate(float (&dp)[C::kRows / 2], const float (&weight)[C::kRows / 2],
                             u32 from) {
#pragma unroll
  for (int j = 0; j < C::kRows / 8; ++j) {
    float delta[2];
    load_shared(delta, from + j * 32);
#pragma unroll
    for (int r = 0; r < 4; ++r) {
      dp[4 * j + r] = (dp[4 * j + r] - delta[r % 2]) * weight[4 * j + r];
    }
  }
}

// Frees a step's rows, in one of two warpgroups of keys. Call when all four warps have read their
// sums, and waited for their products.
template <class C>
TC_DEVICE void end_step(u32 shared, int group, u32 step) {
  named_sync(kGroupBarrier + group, kWarpgroup);
  if (threadIdx.x % kWarpgroup == 0) {
    barrier_arrive(shared + C::kGradEmpty + 8 * slot<C::kGradStages>(step));
    barrier_arrive(shared + C::kQEmpty + 8 * slot<C::kQStages>(step));
  }
}

// A warp's dk or dv, of 16 keys, to memory by the TMA, 64 columns at a time. `buffer(i)`: shared
// memory for them, 2 KB, which the last kPending ones do not use.
template <class C, int kPending, class Buffer>
TC_DEVICE void send_rows(const float (&sum)[C::kD / 2], float factor, const Sm90AttentionMap& map,
                         const KeyTile& of, int first_key, Buffer&& buffer) {
  u32 lane = threadIdx.x % 32;
  asm volatile("" : "+r"(lane));  // or addresses are computed, and spilled, before the steps
  u32 swizzle = lane % 8 * 16;
#pragma unroll
  for (int panel = 0; panel < C::kPanels; ++panel) {
    if (lane == 0) tma_store_wait_read<kPending>();
    __syncwarp();
    u32 from = buffer(panel), to = from + lane % 16 * 128;
#pragma unroll
    for (int i = 0; i < 4 && 64 * panel + 16 * i < C::kD; ++i) {
      u32 word[4];
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        int at = 32 * panel + 8 * i + 2 * j;
        word[j] = DTypeTraits<C::kDType>::pack(sum[at] * factor, sum[at + 1] * factor);
      }
      stmatrix(to + ((i * 32 + lane / 16 * 16) ^ swizzle), word[0], word[1], word[2], word[3]);
    }
    fence_async_proxy();
    __syncwarp();
    if (lane != 0) continue;
    const Sm90Sequence& s = of.sequence;
    tma_store(&map, from, 64 * panel, s.k.place + first_key, of.head, s.k.batch, s.wrap,
              kEvictNormal);
    tma_store_commit();
  }
}

// In a warp, when it has multiplied k and v for the last time in a work item.
template <class C>
TC_DEVICE void release_keys(u32 shared) {
  __syncwarp();
  if (threadIdx.x % 32 != 0) return;
  barrier_arrive(shared + C::kValuesEmpty);
  barrier_arrive(shared + C::kKeysEmpty);
}

// A work item's steps in one of two warpgroups of keys: run(n) takes the next n, and ends with
// release_keys(); those of which only the other warpgroup's keys see a query are skipped.
template <class C, class Group, class Run>
TC_DEVICE void for_each_step(Group& of, Run&& run) {
  // NOTE: one loop skips at both edges: with two loops ptxas computes descriptors in each lane.
#pragma unroll 1
  for (int edge = 0; edge < 2; ++edge) {
    of.step = whole_warp(of.step);
    u32 end = of.step + whole_warp(edge == of.keys64 ? of.work().skipped[edge] : 0);
#pragma unroll 1
    for (; of.step != end; ++of.step) {
      of.wait_for_q();
      of.wait_for_grad();
      end_step<C>(of.shared, of.keys64, of.step);
      barrier_wait(of.shared + C::kScoreEmpty + 8 * of.score(),
                   phase<C::kScoreStages>(of.step) ^ 1);
      __syncwarp();
      if (of.lane() == 0) barrier_arrive(of.shared + C::kScoreFull + 8 * of.score());
    }
    of.step = whole_warp(of.step);
    u32 steps = whole_warp(of.work().steps - of.work().skipped[of.keys64]);
    if (edge != 0) continue;
    if (steps > 0) {
      run(of.step + steps);
    } else {
      of.wait_for_values();
      release_keys<C>(of.shared);
    }
  }
}

}  // namespace sm90
}  // namespace torch_cubin
