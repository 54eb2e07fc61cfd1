// Softmax over the rows of attention scores, its derivative, and dropout, for attention composed of
// products and a softmax. softmax_params.h defines the computation.
//
// A row belongs to one warp (tiles of 8 rows) or to the whole block (tiles of 1, for long rows).
// Any grid.x is correct: blocks take the tiles round-robin. The order of sums depends on seqlen_k
// only, so the same inputs give the same bits.
//
// Roles: all threads do the same.
#include <limits>

#include "common/dropout.cuh"
#include "common/score_rule.cuh"
#include "softmax_params.h"

namespace torch_cubin::TC_KERNEL {

enum class Kind { forward, backward, dropout };

struct Config {
  using Real = TC_REAL;
  static constexpr Kind kKind = Kind::TC_KIND;
  static constexpr int kTileM = TC_TILE_M, kThreads = TC_THREADS;
};

constexpr Kind kKind = Config::kKind;
using Real = Config::Real;
constexpr int kRows = Config::kTileM;               // rows of a block at a time
constexpr int kThreads = Config::kThreads / kRows;  // of one row
static_assert(kThreads == 32 || kRows == 1, "a row belongs to a warp or to the block");

constexpr Real kInfinity = std::numeric_limits<Real>::infinity();

TC_DEVICE Real real_of(tc_int64 bits) { return static_cast<Real>(__longlong_as_double(bits)); }

// Reduces one value per thread of a row; all threads get the same bits, since `join` commutes
// exactly.
template <class Value, class Join>
TC_DEVICE Value joined(Value value, Join join) {
#pragma unroll
  for (int lane = 16; lane > 0; lane /= 2) value = join(value, value.of_lane(lane));
  if constexpr (kThreads > 32) {
    __shared__ Value parts[kThreads / 32];
    __syncthreads();  // the last values have been read
    if (threadIdx.x % 32 == 0) parts[threadIdx.x / 32] = value;
    __syncthreads();
    value = parts[0];
    for (int i = 1; i < kThreads / 32; ++i) value = join(value, parts[i]);
  }
  return value;
}

struct Sum {
  Real value;
  TC_DEVICE Sum of_lane(int lane) const { return {__shfl_xor_sync(~0u, value, lane)}; }
};

// total = sum of exp(logit - max) over the logits so far. NaN propagates to total; max is never
// NaN.
struct ExpSum {
  Real max, total;

  TC_DEVICE void add(Real logit) {
    if (logit > max) {
      total = total * exp(max - logit) + 1;
      max = logit;
    } else if (logit != -kInfinity) {
      total += exp(logit - max);
    }
  }
  TC_DEVICE ExpSum of_lane(int lane) const {
    return {__shfl_xor_sync(~0u, max, lane), __shfl_xor_sync(~0u, total, lane)};
  }
};

TC_DEVICE ExpSum join_sums(const ExpSum& a, const ExpSum& b) {
  const ExpSum& high = a.max >= b.max ? a : b;
  const ExpSum& low = a.max >= b.max ? b : a;
  ExpSum sum = high;
  // Equal maxima are special because the difference of two infinities would be NaN.
  sum.total += low.max == high.max ? low.total : low.total * exp(low.max - high.max);
  return sum;
}

struct Row {
  tc_int64 number;  // index among all rows
  tc_int64 offset;  // of its first element
  tc_int64 mask;    // offset of its first element in the mask
  int head;         // index into sinks
  int dropout_head;
  int i;
  int begin, end;  // the columns within the band
  Real slope;
};

TC_DEVICE Row row_of(const SoftmaxParams& p, tc_int64 number) {
  Row row;
  tc_int64 matrix = number / p.seqlen_q;
  int batch = static_cast<int>(matrix / p.heads);
  row.number = number;
  row.offset = number * p.seqlen_k;
  row.head = static_cast<int>(matrix - static_cast<tc_int64>(batch) * p.heads);
  row.i = static_cast<int>(number - matrix * p.seqlen_q);
  row.mask = batch * p.mask_stride[0] + row.head * p.mask_stride[1] + row.i * p.mask_stride[2];
  row.dropout_head = p.first_head + batch * p.all_heads + row.head;
  tc_int64 begin = static_cast<tc_int64>(row.i) + p.first;
  tc_int64 end = static_cast<tc_int64>(row.i) + p.last + 1;
  tc_int64 columns = p.seqlen_k;
  row.begin = static_cast<int>(max(tc_int64(0), min(begin, columns)));
  row.end = static_cast<int>(max(tc_int64(0), min(end, columns)));
  row.slope = has_alibi(p) ? *slope_of(p, batch, row.head) : Real(0);
  return row;
}

TC_DEVICE Real add_mask(const SoftmaxParams& p, Real logit, tc_int64 at) {
  switch (p.mask_kind) {
    case kMaskBool:
      return logit + (static_cast<const unsigned char*>(p.mask)[at] != 0 ? Real(0) : -kInfinity);
    case kMaskFloat16:
      return logit + f16_to_float(static_cast<const u16*>(p.mask)[at]);
    case kMaskBFloat16:
      return logit + bf16_to_float(static_cast<const u16*>(p.mask)[at]);
    case kMaskFloat32:
      return logit + static_cast<const float*>(p.mask)[at];
    default:
      return logit + static_cast<Real>(static_cast<const double*>(p.mask)[at]);
  }
}

// Whether dropout keeps the weight at column j; see common/dropout.cuh.
TC_DEVICE bool kept(const SoftmaxParams& p, const Row& row, int j) {
  DropoutBits bits(*p.dropout_seed, row.dropout_head, row.i, j / 32, j % 8 / 2);
  int word = j % 32 / 8;
  u32 both = word < 2 ? (word == 0 ? bits.words[0] : bits.words[1])
                      : (word == 2 ? bits.words[2] : bits.words[3]);
  return static_cast<int>(j % 2 == 0 ? both & 0xFFFF : both >> 16) >= p.drop_below;
}

// The rule's numbers, converted once.
struct RowNumbers {
#define TC_MEMBER(name) Real name;
#define TC_CONVERTED(name) name = real_of(params.name);
  TC_SCORE_NUMBERS(TC_MEMBER)
  TC_DEVICE explicit RowNumbers(const SoftmaxParams& params) { TC_SCORE_NUMBERS(TC_CONVERTED) }
#undef TC_MEMBER
#undef TC_CONVERTED
};

// The score rule (common/score_rule.cuh) of one row.
struct RowRule : RuleOf<RowNumbers> {
  const SoftmaxParams& params;
  const Row& row;
  const Real* scores;

  TC_DEVICE RowRule(const SoftmaxParams& params, const Row& row)
      : RuleOf<RowNumbers>{RowNumbers(params)},
        params(params),
        row(row),
        scores(static_cast<const Real*>(params.scores) + row.offset) {}

  TC_DEVICE Real cap_tanh(Real score) const { return tanh(score / cap()); }
  TC_DEVICE bool has_alibi() const { return torch_cubin::has_alibi(params); }
  TC_DEVICE Real alibi(Real score, int i, int j) const {
    int distance = i + params.seqlen_k - params.seqlen_q - j;
    return score - row.slope * static_cast<Real>(distance < 0 ? -distance : distance);
  }
  TC_DEVICE bool has_mask() const { return params.mask_kind != kMaskNone; }
  TC_DEVICE Real masked(Real score, int, int j) const {
    return add_mask(params, score, row.mask + j * params.mask_stride[3]);
  }

  // The logit of a column within the band.
  TC_DEVICE Real logit(int j) const {
    Real x = scores[j], no_grad = 0;
    auto element = [&](auto&& function) { function(x, no_grad, row.i, j, 0); };
    apply_rule(*this, element, element);
    return x;
  }
};

// The factor by which dropout multiplies a weight and its gradient.
struct Dropout {
  const SoftmaxParams& p;
  const Row& row;
  Real keep_scale;

  TC_DEVICE Dropout(const SoftmaxParams& p, const Row& row)
      : p(p), row(row), keep_scale(real_of(p.keep_scale)) {}

  TC_DEVICE Real operator()(int j) const {
    return p.drop_below == 0 ? Real(1) : kept(p, row, j) ? keep_scale : Real(0);
  }
};

// The value of hidden columns: NaN if the row contains a NaN, as in PyTorch, else 0.
TC_DEVICE Real nan_or_zero(Real sum) { return sum != sum ? sum : Real(0); }

TC_DEVICE void forward(const SoftmaxParams& p, const Row& row, int lane) {
  const RowRule rule(p, row);
  const Dropout dropout(p, row);
  ExpSum sum = {-kInfinity, 0};
  for (int j = row.begin + lane; j < row.end; j += kThreads) sum.add(rule.logit(j));
  sum = joined(sum, join_sums);
  if (p.sinks != nullptr) sum.add(p.sinks[row.head]);
  // An infinite logit makes the sum exp(inf - inf) = NaN, also if it was its thread's first.
  if (sum.max == kInfinity) sum.total = kInfinity - sum.max;
  bool nothing = sum.total == 0;
  if (p.logsumexp != nullptr && lane == 0) {
    static_cast<Real*>(p.logsumexp)[row.number] = nothing ? -kInfinity : sum.max + log(sum.total);
  }
  Real shift = sum.max == -kInfinity ? Real(0) : sum.max;  // -inf: all hidden, or NaN
  Real hidden = nan_or_zero(sum.total);
  auto weights = static_cast<Real*>(p.weights) + row.offset;
  for (int j = lane; j < p.seqlen_k; j += kThreads) {
    bool visible = j >= row.begin && j < row.end && !nothing;
    weights[j] = visible ? exp(rule.logit(j) - shift) / sum.total * dropout(j) : hidden;
  }
}

TC_DEVICE void backward(const SoftmaxParams& p, const Row& row, int lane) {
  const RowRule rule(p, row);
  const Dropout dropout(p, row);
  auto probs = static_cast<const Real*>(p.probs) + row.offset;
  auto grad = static_cast<const Real*>(p.grad) + row.offset;
  Real logsumexp = p.given_probs ? Real(0) : static_cast<const Real*>(p.logsumexp)[row.number];
  int begin = p.given_probs ? 0 : row.begin;
  int end = p.given_probs ? p.seqlen_k : logsumexp == -kInfinity ? row.begin : row.end;
  auto prob = [&](int j) { return p.given_probs ? probs[j] : exp(rule.logit(j) - logsumexp); };

  Real delta;
  if (p.delta != nullptr) {
    delta = static_cast<const Real*>(p.delta)[row.number];
  } else {
    Sum sum = {0};
    for (int j = begin + lane; j < end; j += kThreads) sum.value += prob(j) * dropout(j) * grad[j];
    delta = joined(sum, [](const Sum& a, const Sum& b) { return Sum{a.value + b.value}; }).value;
  }
  if (p.grad_logsumexp != nullptr) {
    delta -= static_cast<const Real*>(p.grad_logsumexp)[row.number];
  }

  Real hidden = nan_or_zero(logsumexp);
  auto grad_scores = static_cast<Real*>(p.grad_scores) + row.offset;
  auto weights = static_cast<Real*>(p.weights) + row.offset;
  for (int j = lane; j < p.seqlen_k; j += kThreads) {
    Real weight = hidden, grad_score = hidden;
    if (j >= begin && j < end) {
      // If probs are given, only softcap needs scores; they may be null otherwise.
      weight = !p.given_probs || rule.cap() != 0 ? rule.scores[j] : Real(0);
      grad_score = grad[j];
      Real keep = dropout(j);
      auto element = [&](auto&& function) { function(weight, grad_score, row.i, j, 0); };
      differentiate_rule(
          rule, true, element, element, [&](int) { return keep; }, [] {},
          [&](int) { return delta; }, [] {},
          [&](Real logit, int) { return p.given_probs ? probs[j] : exp(logit - logsumexp); });
      grad_score *= rule.scale();
    }
    if (p.weights != nullptr) weights[j] = weight;
    grad_scores[j] = grad_score;
  }
}

TC_DEVICE void drop(const SoftmaxParams& p, const Row& row, int lane) {
  const Dropout dropout(p, row);
  auto from = static_cast<const Real*>(p.scores) + row.offset;
  auto to = static_cast<Real*>(p.weights) + row.offset;
  for (int j = lane; j < p.seqlen_k; j += kThreads) to[j] = from[j] * dropout(j);
}

extern "C" __global__ void __launch_bounds__(Config::kThreads)
    TC_KERNEL(const __grid_constant__ SoftmaxParams p) {
  wait_for_previous_kernel();
  const int lane = threadIdx.x % kThreads;
  const tc_int64 step = static_cast<tc_int64>(gridDim.x) * kRows;
  for (tc_int64 number = static_cast<tc_int64>(blockIdx.x) * kRows + threadIdx.x / kThreads;
       number < p.rows; number += step) {
    const Row row = row_of(p, number);
    if constexpr (kKind == Kind::forward) forward(p, row, lane);
    if constexpr (kKind == Kind::backward) backward(p, row, lane);
    if constexpr (kKind == Kind::dropout) drop(p, row, lane);
  }
}

}  // namespace torch_cubin::TC_KERNEL

// The table accepts spills: ptxas saves a few registers around calls to the slow paths of log and
// division, which it compiles to subroutines.
/* torch_cubin kernels
{"kernels": [
  {"name": "rows_softmax_{d.name}_{kind}_{rows}", "kind": "{kind}", "math": "{d.dtype}",
   "alignment": "{d.bytes}", "tile": ["{rows}", 1, 1], "block": [256, 1, 1],
   "accepted_spill": {"sm_86": 32, "sm_89": 32, "sm_90a": 64, "sm_100a": 64},
   "cost": {"k_tile": 0, "fixed": 0}, "defines": {"TC_KIND": "{kind}", "TC_REAL": "{d.real}"},
   "for": {
    "kind": ["forward", "backward", "dropout"],
    "d": [
     ["name", "dtype", "real", "bytes"],
     ["f32", "float32", "float",  4],
     ["f64", "float64", "double", 8]],
    "rows": [8, 1]}}]}
*/
