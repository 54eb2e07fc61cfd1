// The computation of sm90/backward.cu, for heads of up to 256 columns. There dk and dv of 64 keys
// take 128 registers of a thread each, so that one warpgroup cannot hold both, and a block owns 64
// keys only. Beside the roles of sm90/backward_block.cuh:
//
//   values     S and P of 64 keys, transposed; P (see below) goes to the other warpgroup through
//              shared memory, in the order of its registers; dv += P^T grad_out, P from registers
//   keys       dP of the same keys; dS = P (dP - delta); dk += dS^T q, dS from registers, and dS to
//              shared memory for dq
//
// Single blocks (TC_PAIR 0), used if clusters do not fit, add dq of their 64 keys, 64 KB a step,
// and are bound by the bandwidth into the L2 cache: it is 92% busy on an H100. Without options,
// those for additive masks serve all calls. In pairs, the two blocks of a cluster process adjacent
// keys in lockstep. They send each other dS, and each multiplies both blocks' dS with half of the
// columns of all 128 keys, so that it adds half as much. The other block's keys of those columns
// fit because dS and dq have one buffer each. Multicasting q and grad_out to both blocks took 0 to
// 3% more time. Pairs are bound by shared memory: a product of 64 x 64 from there reads both
// operands in the time of its multiplications, and dq takes 4 bytes a sum in each direction.
//
// A step of a boolean mask covers the pair's 128 keys, since both blocks wait for each other's dS:
// it is skipped if the mask hides all of them, and each block reads the bits of its own 64 if some
// of those are hidden. The same holds for additive masks.
//
// With options (`general` kernels) the other warpgroup gets, in place of P, P times the derivative
// of the softcap, with a negative sign where dropout drops P: it needs nothing else of the scores.
#include "backward_general.cuh"

namespace torch_cubin::TC_KERNEL {

using namespace sm90;

template <class C>
struct WideGroup : KeyGroup<C> {
  using Group = KeyGroup<C>;
  using Group::lane, Group::work, Group::own_key, Group::q;
  using Group::p, Group::shared, Group::items, Group::keys64, Group::number;
  PairPlace pair;

  TC_DEVICE WideGroup(const Sm90BackwardParams& p, u32 shared, const KeyBlock* items,
                      PairPlace place)
      : Group{p, shared, items, static_cast<int>(place.rank)}, pair(place) {}

  TC_DEVICE u32 weights_at() const { return shared + C::kWeights + threadIdx.x % kWarpgroup * 16; }

  // Called by each warp.
  TC_DEVICE void release(u32 barrier) {
    __syncwarp();
    if (lane() == 0) barrier_arrive(barrier);
  }

  TC_DEVICE void hide(float (&x)[C::kRows / 2]) {
    for_each_hidden<C>(work().sequence, shared, q(), 0, own_key(), [&](int i) { x[i] = 0.0f; });
  }

  // False after the last work item. `full`: the barrier of k or v.
  TC_DEVICE bool begin(u32 full) {
    if (!begin_work<C>(shared, items, number)) return false;
    barrier_wait(shared + full, phase<1>(number));
    return true;
  }
  TC_DEVICE void store(PartSum which, const float (&sum)[C::kD / 2], float factor, void* out,
                       const tc_int64 (&stride)[3], int width) const {
    if (p.part_sums != nullptr) {
      store_part<C::kD>(p, work().index, which, keys64, sum);
    } else {
      SumRows<C>(sum, factor, out, stride, width, work(), own_key()).store();
    }
  }
  // Call when the work item's sums are stored.
  TC_DEVICE void end() {
    __syncwarp();
    if (lane() == 0) release_work<C>(shared, number);
    ++number;
  }

  static TC_DEVICE void pack(u32 (&out)[C::kRows / 16][4], const float (&x)[C::kRows / 2]) {
#pragma unroll
    for (int i = 0; i < C::kRows / 4; ++i) {
      out[i / 4][i % 4] = DTypeTraits<C::kDType>::pack(x[2 * i], x[2 * i + 1]);
    }
  }
};

template <class C>
struct Values : WideGroup<C> {
  float dv[C::kD / 2], s[C::kRows / 2];

  TC_DEVICE Values(const Sm90BackwardParams& p, u32 shared, const KeyBlock* items, PairPlace pair)
      : WideGroup<C>(p, shared, items, pair) {}

  TC_DEVICE void begin_scores() {
    this->wait_for_q();
    wgmma_fence();
    multiply_keys<C>(s, this->shared + C::kK, this->q_at());
  }

  TC_DEVICE void wait_until_empty() {
    barrier_wait(this->shared + C::kWeightsEmpty, phase<1>(this->step) ^ 1);
  }

  TC_DEVICE void hand_over() {
    wait_until_empty();
    u32 to = this->weights_at();
#pragma unroll
    for (int i = 0; i < C::kRows / 8; ++i) {
      store_shared(to + i * (kWarpgroup * 16), *reinterpret_cast<float (*)[4]>(&s[4 * i]));
    }
    this->release(this->shared + C::kWeightsFull);
  }

  // S becomes P, with zeros for dropped weights. The other warpgroup gets the factor of dP - delta:
  // all of P times the derivative of the softcap, with a negative sign where dropout drops. The
  // derivative is kept in that buffer, since there are no registers for it. (Generating dropout's
  // numbers earlier, while S is computed, took 4% more time.) Hidden elements must be hidden by
  // both warpgroups afterwards.
  TC_DEVICE void weigh_general() {
    static_assert(!C::kGeneral || C::kRows <= 64,
                  "a thread's elements have a bit each in one word");
    const Sm90BackwardParams& p = this->p;
    StepPlace of = StepPlace::read<C>(this->shared, this->q(), 0);
    int query = of.query + this->lane() % 4 * 2, own = this->own_key();
    TileRule<true> rule(p.score, this->work().sequence, query, own,
                        slope_of(p, this->work(), of.head));
    bool caps = changes_scores(p.score);
    u32 to = this->weights_at();
    wait_until_empty();
#pragma unroll
    for (int j = 0; j < C::kRows / 8; ++j) {
      float derivative[4] = {1.0f, 1.0f, 1.0f, 1.0f};
      auto each = [&](auto&& function) {
#pragma unroll
        for (int r = 0; r < 4; ++r) {
          function(s[4 * j + r], derivative[r], r / 2, j * 8 + r % 2, 4 * j + r);
        }
      };
      torch_cubin::apply_rule(rule, each, each);
      if (caps) store_shared(to + j * (kWarpgroup * 16), derivative);
    }
    if (of.adds_mask) {
      for_each_added<C>(p, this->work(), of, this->keys64,
                        [&](int i, float x) { s[i] = x == -kInfinity ? x : s[i] + x; });
    }
    u32 kept = ~0u;
    if (p.score.drop_below > 0) {
      kept = static_cast<u32>(kept_weights<C>(p, this->work(), of.head, query, own));
    }
#pragma unroll
    for (int j = 0; j < C::kRows / 8; ++j) {
      float lse[2], derivative[4] = {1.0f, 1.0f, 1.0f, 1.0f}, handed[4];
      load_shared(lse, this->sums_at() + j * 32);
      if (caps) load_shared(derivative, to + j * (kWarpgroup * 16));
#pragma unroll
      for (int r = 0; r < 4; ++r) {
        int i = 4 * j + r;
        bool keeps = (kept >> i & 1) != 0;
        float weight = weight_of((s[i] - lse[r % 2]) * kLog2e);
        // The score, and so its derivative, may be NaN if an additive -inf hides it.
        float factor = weight == 0.0f ? 0.0f : fabsf(weight * derivative[r]);
        handed[r] = __uint_as_float(__float_as_uint(factor) | (keeps ? 0u : 0x80000000u));
        s[i] = keeps ? weight : 0.0f;
      }
      store_shared(to + j * (kWarpgroup * 16), handed);
    }
    this->release(this->shared + C::kWeightsFull);
  }

  TC_DEVICE void run_steps(u32 end) {
    u32 first = this->step, grad_empty = 0;
#pragma unroll 1
    for (;;) {
      begin_scores();
      wgmma_wait<1>();
      keep_in_place(dv);
      if (this->step != first) this->release(grad_empty);
      wgmma_wait<0>();
      keep_in_place(s);
      if constexpr (C::kGeneral) {
        weigh_general();
      } else if constexpr (C::kAdded) {
        bool adds = adds_mask<C>(this->p, this->shared, this->q(), 0);
        exponentiate_added<C>(s, this->p, adds, this->shared, this->work(), this->q(), this->keys64,
                              this->sums_at());
      } else {
        exponentiate<C>(s, this->sums_at(), this->p.unit);
      }
      this->hide(s);
      this->release(this->shared + C::kQEmpty + 8 * this->q());
      if constexpr (!C::kGeneral) hand_over();
      u32 weights[C::kRows / 16][4];
      this->pack(weights, s);
      this->wait_for_grad();
      wgmma_fence();
      add_rows<C>(dv, weights, this->grad_at());
      grad_empty = this->shared + C::kGradEmpty + 8 * this->grad();
      if (++this->step == end) break;
    }
    wgmma_wait<0>();
    keep_in_place(dv);
    this->release(grad_empty);
  }

  TC_DEVICE void run() {
#pragma unroll 1
    while (this->begin(C::kKeysFull)) {
#pragma unroll
      for (int i = 0; i < C::kD / 2; ++i) dv[i] = 0.0f;
      keep_in_place(dv);
      this->step = whole_warp(this->step);
      u32 steps = whole_warp(this->work().steps);
      if (steps > 0) run_steps(this->step + steps);
      this->release(this->shared + C::kKeysEmpty);
      this->store(kPartDv, dv, C::kGeneral ? this->p.score.keep_scale : 1.0f, this->p.dv,
                  this->p.dv_stride, this->p.head_dim_v);
      this->end();
    }
  }
};

template <class C>
struct WideKeys : WideGroup<C> {
  float dk[C::kD / 2], dp[C::kRows / 2];

  TC_DEVICE WideKeys(const Sm90BackwardParams& p, u32 shared, const KeyBlock* items, PairPlace pair)
      : WideGroup<C>(p, shared, items, pair) {}

  TC_DEVICE void begin_dp() {
    this->wait_for_grad();
    wgmma_fence();
    multiply_keys<C>(dp, this->shared + C::kV, this->grad_at());
  }

  // dp becomes dS.
  TC_DEVICE void differentiate() {
    u32 delta_at = this->sums_at() + C::kRows * 4, from = this->weights_at();
    bool adds = adds_mask<C>(this->p, this->shared, this->q(), 0);
#pragma unroll
    for (int i = 0; i < C::kRows / 8; ++i) {
      float delta[2], weight[4];
      load_shared(delta, delta_at + i * 32);
      load_shared(weight, from + i * (kWarpgroup * 16));
#pragma unroll
      for (int r = 0; r < 4; ++r) {
        if constexpr (C::kGeneral) {
          bool drops = static_cast<int>(__float_as_uint(weight[r])) < 0;
          dp[4 * i + r] = drops ? 0.0f : dp[4 * i + r] * this->p.score.keep_scale;
          weight[r] = fabsf(weight[r]);
        }
        dp[4 * i + r] = (dp[4 * i + r] - delta[r % 2]) * weight[r];
        // An element without weight because an added -inf hides it may have any value. (If the
        // weight is 0 because its softcap is saturated, dS is 0 too.)
        if (adds && weight[r] == 0.0f) dp[4 * i + r] = 0.0f;
      }
    }
    this->release(this->shared + C::kWeightsEmpty);
  }

  TC_DEVICE void run_steps(u32 end) {
    // This warp's 16 rows of dS, in this block's shared memory and in the other's.
    u32 own_rows = C::kScore + (this->keys64 * C::kKeys + 16 * this->warp()) * 128;
    u32 store_base = this->shared + own_rows + this->lane() % 16 * 128;
#pragma unroll 1
    for (;;) {
      begin_dp();
      this->wait_for_q();
      barrier_wait(this->shared + C::kWeightsFull, phase<1>(this->step));
      wgmma_wait<0>();
      keep_in_place(dp);
      this->release(this->shared + C::kGradEmpty + 8 * this->grad());
      differentiate();
      this->hide(dp);
      u32 ds[C::kRows / 16][4];
      this->pack(ds, dp);
      wgmma_fence();
      add_rows<C>(dk, ds, this->q_at());
      barrier_wait(this->shared + C::kScoreEmpty + 8 * this->score(),
                   phase<C::kScoreStages>(this->step) ^ 1);
      if constexpr (C::kPair) {
        // The other block's four warps send the same number of bytes.
        store_matrices<C>(ds, store_base);
        if (this->lane() == 0) {
          bulk_copy_remote(this->pair.other + own_rows, this->shared + own_rows, 16 * 128,
                           this->pair.other + C::kScoreFull);
          barrier_expect(this->shared + C::kScoreFull, 16 * 128);
        }
      } else {
        store_scores<C>(ds, store_base + this->score() * C::kScoreBytes,
                        this->shared + C::kScoreFull + 8 * this->score());
      }
      wgmma_wait<0>();
      keep_in_place(dk);
      // Before grad_out, whose next step is read when dv has been added to: q's buffer is free.
      this->release(this->shared + C::kQEmpty + 8 * this->q());
      if (++this->step == end) return;
    }
  }

  TC_DEVICE void run() {
#pragma unroll 1
    while (this->begin(C::kValuesFull)) {
#pragma unroll
      for (int i = 0; i < C::kD / 2; ++i) dk[i] = 0.0f;
      keep_in_place(dk);
      this->step = whole_warp(this->step);
      u32 steps = whole_warp(this->work().steps);
      if (steps > 0) run_steps(this->step + steps);
      this->release(this->shared + C::kValuesEmpty);
      this->store(kPartDk, dk, this->p.scale, this->p.dk, this->p.dk_stride, this->p.head_dim);
      this->end();
    }
  }
};

struct Roles : BlockRoles {
  template <class C>
  static TC_DEVICE void run(const Sm90BackwardParams& p, u32 shared, const KeyBlock* items,
                            int group, PairPlace pair) {
    if (group == 0) {
      Values<C>(p, shared, items, pair).run();
    } else {
      WideKeys<C>(p, shared, items, pair).run();
    }
  }
};

extern "C" __global__ void __launch_bounds__(TC_THREADS, 1)
    TC_KERNEL(const __grid_constant__ Sm90BackwardParams p) {
  using C = BackwardConfig<DType::TC_DTYPE, TC_TILE_M, TC_TILE_K, TC_STAGES, TC_GRAD_STAGES,
                           TC_GENERAL, TC_ADDED, TC_PAIR>;
  static_assert(C::kThreads == TC_THREADS && C::kSharedBytes == TC_DYNAMIC_SHARED);
  static_assert(C::kWorkKeys == TC_TILE_N);
  run<C, Roles>(p);
}

}  // namespace torch_cubin::TC_KERNEL
/* torch_cubin kernels
{"virtual_arch": ["90a"],
 "defaults": {
  "kind": "backward", "block": [512, 1, 1], "stages": 2, "accepted_spill": {"sm_90a": 16},
  "cost": {"k_tile": 5200, "fixed": 9000},
  "defines": {"TC_DTYPE": "{d.dtype}", "TC_GRAD_STAGES": 1}, "for": {"d": "bf16 f16"}},
 "kernels": [
  {"name": "sm90_backward_attention_{d.short}_64x128x256",
   "takes": ["plain", "unmasked", "bool_mask", "sinks"], "tile": [64, 128, 256],
   "cluster": [2, 1, 1], "dynamic_shared": 231904,
   "defines": {"TC_GENERAL": 0, "TC_ADDED": 0, "TC_PAIR": 1}},
  {"name": "sm90_backward_attention_{d.short}_{g.name}{t.tile.0}x{t.tile.1}x{t.tile.2}",
   "takes": "{g.takes}", "tile": "{t.tile}", "cluster": "{t.cluster}",
   "dynamic_shared": "{t.shared}",
   "defines": {"TC_GENERAL": "{g.general}", "TC_ADDED": 1, "TC_PAIR": "{t.pair}"},
   "for": {
    "g": [{"name": "added_", "general": 0,
           "takes": ["plain", "unmasked", "bool_mask", "added_alone", "float_mask", "sinks"]},
          {"name": "general_", "general": 1,
           "takes": ["plain", "unmasked", "bool_mask", "added_alone", "added_mask", "float_mask",
                     "sinks", "rule"]}],
    "t": [
     ["tile", "pair", "cluster", "shared"],
     [[64, 64, 256],  0, [1, 1, 1], 231920],
     [[64, 128, 256], 1, [2, 1, 1], 231904]]}}]}
*/
