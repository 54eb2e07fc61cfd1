// Attention's gradients on Hopper, from logsumexp and delta (sm90/backward_delta.cu); dq as sums
// that sm90/backward_round.cuh or sm90/backward_convert.cu rounds:
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
// ptxas needs 32 beside the accumulators. `general` kernels of 128 columns spill what they need
// once for each work item, and one address that each step reads.
#include "backward_general.cuh"
#include "backward_round.cuh"

namespace torch_cubin::TC_KERNEL {

using namespace sm90;

template <class C>
struct Keys : KeyGroup<C> {
  using Group = KeyGroup<C>;
  using Group::p, Group::shared, Group::items, Group::keys64, Group::number, Group::step;
  using Group::warp, Group::lane, Group::work, Group::own_key, Group::q, Group::score, Group::q_at,
      Group::grad_at, Group::sums_at, Group::wait_for_grad;
  static constexpr bool kScoresAhead = C::kD == 128 && !C::kAdded && !C::kGeneral;
  float dk[C::kD / 2], dv[C::kD / 2], s[C::kRows / 2], dp[C::kRows / 2];

  TC_DEVICE Keys(const Sm90BackwardParams& p, u32 shared, const KeyBlock* items, int group)
      : Group{p, shared, items, group} {}

  // This warp's rows of dS.
  TC_DEVICE u32 score_rows(u32 slot) const {
    return shared + C::kScore + slot * C::kScoreBytes + (64 * keys64 + 16 * warp()) * 128;
  }

  TC_DEVICE void begin_scores() {
    wgmma_fence();
    multiply_keys<C>(s, shared + C::kK + keys64 * 8192, q_at());
  }

  TC_DEVICE void begin_dp() {
    wait_for_grad();
    wgmma_fence();
    multiply_keys<C>(dp, shared + C::kV + keys64 * 8192, grad_at());
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
    TC_DEVICE float cap() const { return kEarly ? 0.0f : TileRule<true>::cap(); }
  };

  // Scores to weights, in `general` kernels. kEarly: without the part that needs dP, softcap.
  template <bool kEarly>
  TC_DEVICE void weigh(bool adds) {
    StepPlace of = StepPlace::read<C>(shared, q(), keys64);
    Rule<kEarly> rule(p.score, work().sequence, of.query + lane() % 4 * 2, own_key(),
                      slope_of(p, work(), of.head));
    auto each = [&](auto&& function) {
#pragma unroll
      for (int i = 0; i < C::kRows / 2; ++i) {
        float none = 0.0f;
        function(s[i], kEarly ? none : dp[i], i / 2 % 2, i / 4 * 8 + i % 2, i);
      }
    };
    torch_cubin::apply_rule(rule, each, each);
    if (adds) {
      for_each_added<C>(p, work(), of, keys64, [&](int i, float value) { add<kEarly>(i, value); });
    }
    u32 from = sums_at();
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
    u32 from = sums_at();
    if constexpr (C::kAdded) {
      exponentiate_added<C>(s, p, adds, shared, work(), q(), keys64, from);
    } else {
      exponentiate<C>(s, from, p.unit);
    }
  }

  // For `general` kernels: a bit for each weight that dropout keeps.
  TC_DEVICE u64 choose_kept() const {
    StepPlace of = StepPlace::read<C>(shared, q(), keys64);
    return kept_weights<C>(p, work(), of.head, of.query + lane() % 4 * 2, own_key());
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
    u32 from = sums_at();
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
    for_each_hidden<C>(work().sequence, shared, q(), keys64, own_key(),
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

  TC_DEVICE void run_steps(u32 end) {
    u32 first = step;
#pragma unroll 1
    for (;;) {
      this->wait_for_q();
      begin_scores();
      wgmma_wait<1>();
      keep_in_place(dk);
      keep_in_place(dv);
      if (step != first) {
        end_step<C>(shared, keys64, step - 1);
      } else {
        this->wait_for_values();
      }
      begin_dp();
      wgmma_wait<1>();
      keep_in_place(s);
      bool adds = adds_mask<C>(p, shared, q(), keys64), late = false, drops = false;
      u64 kept = 0;
      if constexpr (C::kGeneral) {
        drops = p.score.drop_below > 0;
        late = drops || changes_scores(p.score);
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
        differentiate<C>(dp, s, sums_at() + C::kRows * 4);
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
      add_rows<C>(dv, weights, grad_at());
      add_rows<C>(dk, ds, q_at());
      barrier_wait(shared + C::kScoreEmpty + 8 * score(), phase<C::kScoreStages>(step) ^ 1);
      store_scores<C>(ds, score_rows(score()) + lane() % 16 * 128,
                      shared + C::kScoreFull + 8 * score());
      if (++step == end) break;
    }
    release_keys<C>(shared);
    wgmma_wait<0>();
    keep_in_place(dk);
    keep_in_place(dv);
    end_step<C>(shared, keys64, step - 1);
  }

  // The same, but the next step's scores are multiplied before this step's dv and dk, whose time
  // the exponentials then share: with 128 columns 0.97 of the time of long sequences, 1.00 of 512
  // rows (H200); with 64, 1.02 to 1.1. After the last step those scores are of no meaning.
  TC_DEVICE void run_steps_ahead(u32 end) {
    constexpr int kHalf = C::kRows / 16;  // of the octets of queries
    u32 first = step;
    this->wait_for_q();
    begin_scores();
    this->wait_for_values();
    wgmma_wait<0>();
    keep_in_place(s);
#pragma unroll 1
    for (;;) {
      exponentiate<C, 0, kHalf>(s, sums_at(), p.unit);
      keep_in_place(s);
      wait_for_grad();
      wgmma_wait<0>();
      keep_in_place(dk);
      keep_in_place(dv);
      begin_dp();
      if (step != first) end_step<C>(shared, keys64, step - 1);
      exponentiate<C, kHalf>(s, sums_at(), p.unit);
      keep_in_place(s);
      wgmma_wait<0>();
      keep_in_place(dp);
      differentiate<C>(dp, s, sums_at() + C::kRows * 4);
      hide();
      u32 weights[C::kRows / 16][4], ds[C::kRows / 16][4];
      pack(weights, ds);
      u32 grad = grad_at(), rows = q_at(), at = score(), parity = phase<C::kScoreStages>(step) ^ 1;
      bool last = ++step == end;
      if (!last) this->wait_for_q();
      begin_scores();
      add_rows<C>(dv, weights, grad);
      add_rows<C>(dk, ds, rows);
      barrier_wait(shared + C::kScoreEmpty + 8 * at, parity);
      store_scores<C>(ds, score_rows(at) + lane() % 16 * 128, shared + C::kScoreFull + 8 * at);
      wgmma_wait<2>();
      keep_in_place(s);
      if (last) break;
    }
    release_keys<C>(shared);
    wgmma_wait<0>();
    keep_in_place(dk);
    keep_in_place(dv);
    end_step<C>(shared, keys64, step - 1);
  }

  TC_DEVICE void run() {
#pragma unroll 1
    for (;; ++number) {
      if (!begin_work<C>(shared, items, number)) {
        tma_store_wait_read<0>();  // shared memory must outlive the store's reads
        return;
      }
#pragma unroll
      for (int i = 0; i < C::kD / 2; ++i) dk[i] = dv[i] = 0.0f;
      barrier_wait(shared + C::kKeysFull, phase<1>(number));
      if (lane() == 0) tma_store_wait_read<0>();  // the last work item's dk, where dS will be
      __syncwarp();
      keep_in_place(dk);
      keep_in_place(dv);
      for_each_step<C>(*this, [&](u32 end) {
        if constexpr (kScoresAhead) {
          run_steps_ahead(end);
        } else {
          run_steps(end);
        }
      });
      if (p.part_sums != nullptr) {
        store_part<C::kD>(p, work().index, kPartDv, keys64, dv);
        store_part<C::kD>(p, work().index, kPartDk, keys64, dk);
      } else {
        send();
      }
      __syncwarp();
      if (lane() == 0) release_work<C>(shared, number);
    }
  }

 private:
  // Through the warp's own rows of dS that no other warp reads any more: of the next step, and with
  // one panel a step, of the one after it.
  TC_DEVICE void send() const {
    auto buffer = [&](int i) {
      u32 of = step + (C::kRowPanels > 1 ? 0 : i % 2);
      u32 at = slot<C::kScoreStages>(of);
      barrier_wait(shared + C::kScoreEmpty + 8 * at, phase<C::kScoreStages>(of) ^ 1);
      return score_rows(at) + (C::kRowPanels > 1 ? i % 2 * C::kScorePanelBytes : 0);
    };
    int first = work().key_tile * C::kKeys + 64 * keys64 + 16 * warp();
    send_rows<C, 1>(dv, C::kGeneral ? p.score.keep_scale : 1.0f, p.dv_map, work(), first, buffer);
    send_rows<C, 1>(dk, p.scale, p.dk_map, work(), first,
                    [&](int i) { return buffer(C::kPanels + i); });
  }
};

struct Roles : RoundingRoles {
  template <class C>
  static TC_DEVICE void run(const Sm90BackwardParams& p, u32 shared, const KeyBlock* items,
                            int group, PairPlace) {
    Keys<C>(p, shared, items, group).run();
  }
};

extern "C" __global__ void __launch_bounds__(TC_THREADS, 1)
    TC_KERNEL(const __grid_constant__ Sm90BackwardParams p) {
  using Base = BackwardConfig<DType::TC_DTYPE, TC_TILE_M, TC_TILE_K, TC_STAGES, TC_GRAD_STAGES,
                              TC_GENERAL, TC_ADDED>;
  using C = std::conditional_t<TC_ROUNDS, RoundingConfig<Base>, Base>;
  static_assert(C::kThreads == TC_THREADS && C::kSharedBytes == TC_DYNAMIC_SHARED);
  static_assert(C::kKeys == TC_TILE_N);
  run<C, Roles>(p);
}

}  // namespace torch_cubin::TC_KERNEL
/* torch_cubin kernels
{"virtual_arch": ["90a"],
 "defaults": {
  "kind": "backward", "tile": "{t.tile}", "block": [512, 1, 1], "stages": 3,
  "dynamic_shared": "{t.shared}", "accepted_spill": {"sm_90a": 40},
  "cost": {"k_tile": "{t.k_tile}", "fixed": "{t.fixed}"},
  "defines": {"TC_DTYPE": "{d.dtype}", "TC_GRAD_STAGES": 2}, "for": {"d": "bf16 f16"}},
 "kernels": [
  {"name": "sm90_backward_attention_{d.short}_{t.tile.0}x{t.tile.1}x{t.tile.2}",
   "takes": ["plain", "unmasked", "bool_mask", "sinks"], "rounds": "{t.rounds}",
   "defines": {"TC_GENERAL": 0, "TC_ADDED": 0, "TC_ROUNDS": "{t.rounds}"},
   "for": {
    "t": [
     ["tile", "shared", "rounds", "k_tile", "fixed"],
     [[96, 128, 64],  226576, 1, 2900, 6000],
     [[48, 128, 128], 222352, 1, 3000, 7000],
     [[64, 128, 96],  218048, 0, 3000, 6500]]}},
  {"name": "sm90_backward_attention_{d.short}_{g.name}{t.tile.0}x{t.tile.1}x{t.tile.2}",
   "takes": "{g.takes}", "defines": {"TC_GENERAL": "{g.general}", "TC_ADDED": 1, "TC_ROUNDS": 0},
   "for": {
    "g": [{"name": "added_", "general": 0,
           "takes": ["plain", "unmasked", "bool_mask", "added_alone", "float_mask", "sinks"]},
          {"name": "general_", "general": 1,
           "takes": ["plain", "unmasked", "bool_mask", "added_alone", "added_mask", "float_mask",
                     "sinks", "rule"]}],
    "t": [
     ["tile", "shared", "k_tile", "fixed"],
     [[96, 128, 64],  217760, 2900, 6000],
     [[48, 128, 128], 213568, 3000, 7000]]}}]}
*/
