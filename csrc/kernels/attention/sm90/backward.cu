// Attention's gradients on Hopper, from logsumexp and delta (sm90/backward_delta.cu); dq as sums
// that sm90/backward_convert.cu rounds:
//
//   S = scale q k^T      P = exp(S - logsumexp)      dP = grad_out v^T     dS = P (dP - delta)
//   dv = P^T grad_out    dk = scale dS^T q           dq = scale dS k
//
// A block owns 128 keys of one head of keys at a time; it loops over the tiles of queries that
// attend to them, last queries first, each for all heads of the group, or, where tiles of keys are
// few, over a part of these steps (sm90/backward_parts.cuh). Its warpgroups:
//
//   producer, queries   of sm90/backward_block.cuh: loads, dq
//   keys (2)            64 keys each: S, dP and dS, transposed, so that P and dS are operands in
//                       registers as they are; dk and dv stay in registers
//
// The warpgroups of keys wait only for their own products, so that one exponentiates while the
// other multiplies, and storing dq is off the critical path. Registers limit the length of a step:
// ptxas needs 32 beside the accumulators. The warp that fetches work items spills, once for each.
#include "backward_general.cuh"

namespace torch_cubin::TC_KERNEL {

using namespace sm90;

constexpr int kGroupBarrier = 1;  // named barriers start here: one for each warpgroup of keys

template <class C>
struct Keys {
  const Sm90BackwardParams& p;
  u32 shared;
  const KeyBlock* items;
  int group, key;        // key: the warpgroup's first
  u32 number = 0;        // of the work item
  u32 step = 0;          // of all work items
  u32 sums, store_base;  // this thread's
  float dk[C::kD / 2], dv[C::kD / 2], s[C::kRows / 2], dp[C::kRows / 2];

  TC_DEVICE Keys(const Sm90BackwardParams& params, u32 memory, const KeyBlock* all, int own_group)
      : p(params), shared(memory), items(all), group(own_group) {
    sums = shared + C::kSums + lane() % 4 * 8;
    store_base = shared + C::kScore + (64 * group + 16 * warp() + lane() % 16) * 128;
  }

  TC_DEVICE const KeyBlock& work() const { return items[slot<C::kWorkItems>(number)]; }
  static TC_DEVICE int warp() { return threadIdx.x / 32 % 4; }
  static TC_DEVICE int lane() { return threadIdx.x % 32; }
  TC_DEVICE u32 q() const { return slot<C::kQStages>(step); }
  TC_DEVICE u32 grad() const { return slot<C::kGradStages>(step); }
  TC_DEVICE u32 score() const { return slot<C::kScoreStages>(step); }

  TC_DEVICE void begin_scores() {
    barrier_wait(shared + C::kQFull + 8 * q(), phase<C::kQStages>(step));
    wgmma_fence();
    multiply_keys<C>(s, shared + C::kK + group * 8192, shared + C::kQ + q() * C::kQBytes);
  }

  TC_DEVICE void wait_for_grad() {
    barrier_wait(shared + C::kGradFull + 8 * grad(), phase<C::kGradStages>(step));
  }

  TC_DEVICE void begin_dp() {
    wait_for_grad();
    wgmma_fence();
    multiply_keys<C>(dp, shared + C::kV + group * 8192, shared + C::kGrad + grad() * C::kQBytes);
  }

  // dp becomes dS.
  TC_DEVICE void differentiate() {
    u32 from = sums + q() * C::kSumBytes + C::kRows * 4;
#pragma unroll
    for (int j = 0; j < C::kRows / 8; ++j) {
      float delta[2];
      load_shared(delta, from + j * 32);
#pragma unroll
      for (int r = 0; r < 4; ++r) dp[4 * j + r] = (dp[4 * j + r] - delta[r % 2]) * s[4 * j + r];
    }
  }

  // `value`: the mask's, for element i. kEarly: dP's sums are not complete. Where the mask is -inf,
  // scores and gradients that are not finite have no effect.
  template <bool kEarly>
  TC_DEVICE void add(int i, float value) {
    bool hidden = value == -kInfinity;
    s[i] = hidden ? value : s[i] + value;
    if (!kEarly && hidden) dp[i] = 0.0f;
  }

  template <bool kEarly>
  class Rule : public TileRule<true> {
   public:
    using TileRule<true>::TileRule;
    TC_DEVICE float softcap() const { return kEarly ? 0.0f : TileRule<true>::softcap(); }
  };

  // Scores to weights, in `general` kernels. kEarly: without the part that needs dP, softcap.
  template <bool kEarly>
  TC_DEVICE void weigh(bool adds) {
    StepPlace of = StepPlace::read<C>(shared, q(), group);
    Rule<kEarly> rule(p.score, work().sequence, of.query + lane() % 4 * 2,
                      key + 16 * warp() + lane() / 4, slope_of(p, work(), of.head));
    auto each = [&](auto&& function) {
#pragma unroll
      for (int i = 0; i < C::kRows / 2; ++i) {
        float none = 0.0f;
        function(s[i], kEarly ? none : dp[i], i / 2 % 2, i / 4 * 8 + i % 2, i);
      }
    };
    torch_cubin::apply_rule(rule, each, each);
    if (adds) {
      for_each_added<C>(p, work(), of, group, [&](int i, float value) { add<kEarly>(i, value); });
    }
    u32 from = sums + q() * C::kSumBytes;
#pragma unroll
    for (int j = 0; j < C::kRows / 8; ++j) {
      float lse[2];
      load_shared(lse, from + j * 32);
#pragma unroll
      for (int r = 0; r < 4; ++r) {
        s[4 * j + r] = weight_of((s[4 * j + r] - lse[r % 2]) * kLog2e);
      }
    }
  }

  // Scores to weights, in the other kernels.
  TC_DEVICE void weigh_full(bool adds) {
    u32 from = sums + q() * C::kSumBytes;
    if constexpr (C::kAdded) {
      exponentiate_added<C>(s, p, adds, shared, work(), q(), group, from);
    } else {
      exponentiate<C>(s, from, p.unit);
    }
  }

  // For `general` kernels: a bit for each weight that dropout keeps.
  TC_DEVICE u64 choose_kept() const {
    StepPlace of = StepPlace::read<C>(shared, q(), group);
    return kept_weights<C>(p, work(), of.head, of.query + lane() % 4 * 2,
                           key + 16 * warp() + lane() / 4);
  }

  // For `general` kernels with softcap or dropout: scores to weights, of which dropout then drops
  // some, and dp becomes dS.
  TC_DEVICE void differentiate_late(bool adds, bool drops, u64 kept) {
    if (drops) {
#pragma unroll
      for (int i = 0; i < C::kRows / 2; ++i) {
        dp[i] = (kept >> i & 1) != 0 ? dp[i] * p.score.keep_scale : 0.0f;
      }
    }
    u32 from = sums + q() * C::kSumBytes;
#pragma unroll
    for (int j = 0; j < C::kRows / 8; ++j) {
      float delta[2];
      load_shared(delta, from + C::kRows * 4 + j * 32);
#pragma unroll
      for (int r = 0; r < 4; ++r) dp[4 * j + r] -= delta[r % 2];
    }
    weigh<false>(adds);
#pragma unroll
    for (int i = 0; i < C::kRows / 2; ++i) dp[i] *= s[i];
    if (!drops) return;
#pragma unroll
    for (int i = 0; i < C::kRows / 2; ++i) {
      if ((kept >> i & 1) == 0) s[i] = 0.0f;
    }
  }

  // Sets P and dS of hidden elements to 0, for any values of q, k, v and grad_out there.
  TC_DEVICE void hide() {
    for_each_hidden<C>(work().sequence, shared, q(), group, key + 16 * warp() + lane() / 4,
                       [&](int i) { s[i] = dp[i] = 0.0f; });
  }

  // P and dS interleaved: one after the other, ptxas runs out of registers.
  TC_DEVICE void pack(u32 (&weights)[C::kRows / 16][4], u32 (&ds)[C::kRows / 16][4]) const {
    using Traits = DTypeTraits<C::kDType>;
#pragma unroll
    for (int i = 0; i < C::kRows / 16; ++i)
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        int at = 8 * i + 2 * j;
        weights[i][j] = Traits::pack(s[at], s[at + 1]);
        ds[i][j] = Traits::pack(dp[at], dp[at + 1]);
      }
  }

  TC_DEVICE void release(u32 barrier) {
    __syncwarp();
    if (lane() == 0) barrier_arrive(barrier);
  }

  // Call when all four warps have read their sums, and waited for their products.
  TC_DEVICE void end_step(u32 q_empty, u32 grad_empty) {
    named_sync(kGroupBarrier + group, kWarpgroup);
    if (threadIdx.x % kWarpgroup == 0) {
      barrier_arrive(grad_empty);
      barrier_arrive(q_empty);
    }
  }

  TC_DEVICE void run_steps(u32 end) {
    u32 first = step, q_empty = 0, grad_empty = 0;
#pragma unroll 1
    for (;;) {
      begin_scores();
      wgmma_wait<1>();
      keep_in_place(dk);
      keep_in_place(dv);
      if (step != first) end_step(q_empty, grad_empty);
      begin_dp();
      wgmma_wait<1>();
      keep_in_place(s);
      bool adds = adds_mask<C>(p, shared, q(), group), late = false, drops = false;
      u64 kept = 0;
      if constexpr (C::kGeneral) {
        drops = p.score.drop_below > 0;
        late = drops || p.score.softcap != 0;
        if (!late) weigh<true>(adds);
        if (drops) kept = choose_kept();  // overlaps with dP's product
      } else {
        weigh_full(adds);
      }
      keep_in_place(s);
      // dP is complete. Without this ptxas would wait for dP before the exponentials.
      wait_for_grad();
      wgmma_wait<0>();
      keep_in_place(dp);
      if (C::kGeneral && late) {
        differentiate_late(adds, drops, kept);
      } else {
        differentiate();
        if (adds) {
#pragma unroll
          for (int i = 0; i < C::kRows / 2; ++i) {
            if (s[i] == 0.0f) dp[i] = 0.0f;
          }
        }
      }
      hide();
      u32 weights[C::kRows / 16][4], ds[C::kRows / 16][4];
      pack(weights, ds);
      wgmma_fence();
      add_rows<C>(dv, weights, shared + C::kGrad + grad() * C::kQBytes);
      add_rows<C>(dk, ds, shared + C::kQ + q() * C::kQBytes);
      barrier_wait(shared + C::kScoreEmpty + 8 * score(), phase<C::kScoreStages>(step) ^ 1);
      store_scores<C>(ds, store_base + score() * C::kScoreBytes,
                      shared + C::kScoreFull + 8 * score());
      q_empty = shared + C::kQEmpty + 8 * q();
      grad_empty = shared + C::kGradEmpty + 8 * grad();
      if (++step == end) break;
    }
    wgmma_wait<0>();
    keep_in_place(dk);
    keep_in_place(dv);
    end_step(q_empty, grad_empty);
  }

  TC_DEVICE void run() {
#pragma unroll 1
    for (;; ++number) {
      if (!begin_work<C>(shared, items, number)) {
        tma_store_wait_read<0>();  // shared memory must outlive the store's reads
        return;
      }
      key = work().key_tile * C::kKeys + 64 * group;
#pragma unroll
      for (int i = 0; i < C::kD / 2; ++i) dk[i] = dv[i] = 0.0f;
      barrier_wait(shared + C::kKeysFull, phase<1>(number));
      keep_in_place(dk);
      keep_in_place(dv);
      step = whole_warp(step);
      u32 steps = whole_warp(work().steps);
      if (steps > 0) run_steps(step + steps);
      release(shared + C::kKeysEmpty);
      if (p.part_sums != nullptr) {
        store_part<C::kD>(p, work().index, kPartDv, group, dv);
        store_part<C::kD>(p, work().index, kPartDk, group, dk);
      } else {
        store_rows();
      }
      __syncwarp();
      if (lane() == 0) release_work<C>(shared, number);
    }
  }

 private:
  TC_DEVICE void store_rows() {
    int own = key + 16 * warp() + lane() / 4;
    // One half of each through shared memory: the last is stored while the next work item runs.
    u32 staging = shared + C::kOut + (4 * group + warp()) * C::kOutBytes;
    SumRows<C> dv_rows(dv, C::kGeneral ? p.score.keep_scale : 1.0f, p.dv, p.dv_stride, p.head_dim_v,
                       work(), own);
    dv_rows.send(0, staging);
    dv_rows.store(1);
    SumRows<C> dk_rows(dk, p.scale, p.dk, p.dk_stride, p.head_dim, work(), own);
    dk_rows.store(0);
    dk_rows.send(1, staging);
  }
};

struct Roles : BlockRoles {
  template <class C>
  static TC_DEVICE void run(const Sm90BackwardParams& p, u32 shared, const KeyBlock* items,
                            int group, PairPlace) {
    Keys<C>(p, shared, items, group).run();
  }
};

extern "C" __global__ void __launch_bounds__(TC_THREADS, 1)
    TC_KERNEL(const __grid_constant__ Sm90BackwardParams p) {
  using C = BackwardConfig<DType::TC_DTYPE, TC_TILE_M, TC_TILE_K, TC_STAGES, TC_GRAD_STAGES,
                           TC_GENERAL, TC_ADDED>;
  static_assert(C::kThreads == TC_THREADS && C::kSharedBytes == TC_DYNAMIC_SHARED);
  static_assert(C::kKeys == TC_TILE_N);
  run<C, Roles>(p);
}

}  // namespace torch_cubin::TC_KERNEL
/* torch_cubin kernels
{"virtual_arch": ["90a"],
 "defaults": {"kind": "sm90_backward", "archs": ["sm_90a"], "layout": "any", "alignment": 16,
              "stages": 3, "block": [512, 1, 1], "accepted_spill": {"sm_90a": 16}},
 "kernels": [
  {"name": "sm90_backward_attention_{d.short}_{g.name}{t.name}",
   "dtype": "{d.dtype}", "math": "{d.dtype}", "takes": "{g.takes}", "tile": "{t.tile}",
   "dynamic_shared": "{t.shared}", "cost": "{t.cost}",
   "defines": {"TC_DTYPE": "{d.dtype}", "TC_GRAD_STAGES": 2, "TC_GENERAL": "{g.general}",
               "TC_ADDED": "{g.added}"},
   "for": {
    "d": [{"short": "bf16", "dtype": "bfloat16"}, {"short": "f16", "dtype": "float16"}],
    "g": [{"name": "", "general": 0, "added": 0,
           "takes": ["plain", "unmasked", "bool_mask", "sinks"]},
          {"name": "added_", "general": 0, "added": 1,
           "takes": ["plain", "unmasked", "bool_mask", "added_alone", "float_mask", "sinks"]},
          {"name": "general_", "general": 1, "added": 1,
           "takes": ["plain", "unmasked", "bool_mask", "added_alone", "added_mask", "float_mask",
                     "sinks", "rule"]}],
    "t": [
     {"name": "96x128x64", "tile": [96, 128, 64], "shared": 225920,
      "cost": {"k_tile": 2900, "fixed": 6000}},
     {"name": "48x128x128", "tile": [48, 128, 128], "shared": 229920,
      "cost": {"k_tile": 3000, "fixed": 7000}}]}},
  {"name": "sm90_backward_attention_{d.short}_64x128x96",
   "dtype": "{d.dtype}", "math": "{d.dtype}", "takes": ["plain", "unmasked", "bool_mask", "sinks"],
   "tile": [64, 128, 96], "dynamic_shared": 230304, "cost": {"k_tile": 3000, "fixed": 6500},
   "defines": {"TC_DTYPE": "{d.dtype}", "TC_GRAD_STAGES": 2, "TC_GENERAL": 0, "TC_ADDED": 0},
   "for": {"d": [{"short": "bf16", "dtype": "bfloat16"}, {"short": "f16", "dtype": "float16"}]}}]}
*/
