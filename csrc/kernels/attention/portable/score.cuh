// From q . k to the logit that enters the softmax: the rule of AttentionParams
// (common/score_rule.cuh), dropout and the band. `full` kernels support scale and band only;
// `general` ones everything.
#pragma once

#include "common/dropout.cuh"
#include "common/score_rule.cuh"
#include "tile.cuh"

namespace torch_cubin {

// For one block: one sequence, one head. Scores are in natural units.
template <DType kDType>
struct ScoreRule : RuleOf<const AttentionParams&> {
  const Sequence& s;
  const char* mask;  // of this batch and head, or null
  float slope;       // ALiBi's, 0 for none
  int shift;         // seqlen_k - seqlen_q

  TC_DEVICE ScoreRule(const AttentionParams& p_, const Sequence& s_)
      : RuleOf<const AttentionParams&>{p_}, s(s_) {
    mask = static_cast<const char*>(p.mask);
    if (mask != nullptr) {
      mask += (s.batch * p.mask_stride[0] + s.head * p.mask_stride[1]) * mask_element(p);
    }
    slope = has_alibi() ? *slope_of(p, s.batch, s.head) : 0.0f;
    shift = s.columns - s.rows;
  }

  static TC_DEVICE int mask_element(const AttentionParams& p) {
    if (p.flags & kAttendBoolMask) return 1;
    return p.flags & kAttendFloatMask
               ? 4
               : static_cast<int>(sizeof(typename DTypeTraits<kDType>::Storage));
  }

  TC_DEVICE bool has_mask() const { return p.mask != nullptr; }

  // tanh(score / cap()), within 3 ulp. 1 - 2 / (exp(2 t) + 1) cancels for small t, where a
  // polynomial is used instead.
  TC_DEVICE float cap_tanh(float score) const {
    float e = exp2_approx(score * (2.0f * kLog2e / cap()));
    float tanh = 1.0f - __fdividef(2.0f, e + 1.0f);  // 1 and -1 at the ends, NaN for NaN
    // NOTE: a branch on purpose: selecting between both takes registers that some kernels lack.
    if (fabsf(tanh) < 0.5f) {
      float t = __fdividef(score, cap()), u = t * t;
      float g = fmaf(fmaf(fmaf(0.01630167f, u, -0.05260332f), u, 0.13319714f), u, -0.33332906f);
      tanh = fmaf(t * u, g, t);
    }
    return tanh;
  }

  // The mask's addend for element (i, j), which must exist.
  TC_DEVICE float mask_value(int i, int j) const {
    tc_int64 at = i * p.mask_stride[2] + j * p.mask_stride[3];
    if (p.flags & kAttendBoolMask) return mask[at] != 0 ? 0.0f : -kInfinity;
    if (p.flags & kAttendFloatMask) return reinterpret_cast<const float*>(mask)[at];
    using Traits = DTypeTraits<kDType>;
    return Traits::load(reinterpret_cast<const typename Traits::Storage*>(mask)[at]);
  }

  TC_DEVICE float alibi(float score, int i, int j) const {
    return score - slope * fabsf(static_cast<float>(i + shift - j));
  }

  // -inf beyond the sequence, where nothing is read.
  TC_DEVICE float masked(float score, int i, int j) const {
    return i < s.rows && j < s.columns ? score + mask_value(i, j) : -kInfinity;
  }
};

// Applies everything but the band to kTiles adjacent m16n8 accumulator tiles of q . k; the lane's
// first element is (i, j).
template <DType kDType, int kTiles>
TC_DEVICE void apply_to_tiles(const ScoreRule<kDType>& rule, float (&tiles)[kTiles][4], int i,
                              int j) {
  auto each = [&](auto&& function) {
#pragma unroll
    for (int n = 0; n < kTiles; ++n)
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        float no_grad = 0.0f;
        function(tiles[n][e], no_grad, i + 8 * (e / 2), j + 8 * n + e % 2, 0);
      }
  };
  apply_rule(rule, each, each);
}

// Drops weights of the four tiles (or two, if there are only two) from `n` on, among those that
// begin at `column`; the lane's first row is i.
template <int kTiles>
TC_DEVICE void drop_weights(float (&tiles)[kTiles][4], const AttentionParams& p, const Sequence& s,
                            int i, int column, int n) {
  constexpr int kCount = kTiles < 4 ? kTiles : 4;
  static_assert(kCount == 4 || kCount == 2, "numbers come for 32 columns");
  bool right = kCount == 2 && column % 32 != 0;
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    DropoutBits bits(*p.dropout_seed, s.batch * p.heads + s.head, i + 8 * h, (column + 8 * n) / 32,
                     threadIdx.x % 4);
#pragma unroll
    for (int k = 0; k < kCount; ++k)
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        bool kept = bits.kept(k, e, p.drop_below);
        if (kCount == 2 && right) kept = bits.kept(k + 2, e, p.drop_below);
        if (!kept) tiles[n + k][2 * h + e] = 0.0f;
      }
  }
}

// The columns visible to a row, counted from `column`: [low, high].
struct SeenColumns {
  int low, high;

  TC_DEVICE SeenColumns(const Sequence& s, int row, int column)
      : low(row + s.first - column), high(min(row + s.last, s.columns - 1) - column) {}
  TC_DEVICE bool operator()(int offset) const { return offset >= low && offset <= high; }
};

// Hides elements outside the band, or beyond the last column, of kTiles adjacent m16n8 accumulator
// tiles; the lane's first element is (i, j).
template <int kTiles>
TC_DEVICE void hide_outside(float (&tiles)[kTiles][4], const Sequence& s, int i, int j) {
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    SeenColumns seen(s, i + 8 * h, j);
#pragma unroll
    for (int n = 0; n < kTiles; ++n)
#pragma unroll
      for (int e = 2 * h; e < 2 * h + 2; ++e) {
        if (!seen(8 * n + e % 2)) tiles[n][e] = -kInfinity;
      }
  }
}

}  // namespace torch_cubin
