// The softmax family on the CPU: a reference that is easy to read, in float64 for every dtype of
// the scores, one row after the other on each of PyTorch's threads.
//
// NOTE: this is one parallel loop instead of a chain of ATen's ops in float64. The chain took as
// long on one thread, but two to three times as long on two threads of a busy machine, because the
// threads waited for each other after each of its ten passes over the scores.
// benchmarks/bench_reference.py compares attention with PyTorch's math backend: it takes 0.8 to 2.0
// times as long, and up to 2.7 times with a random mask. The products stay in the dtype of the
// scores: in float64 they would take twice as long.
#include <torch/headeronly/util/BFloat16.h>
#include <torch/headeronly/util/Half.h>

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <type_traits>
#include <vector>

#include "ops/attention/compose/softmax.h"
#include "ops/common/stable_ops.h"

// The newer versions of these need glibc 2.29 (tests/unit/test_abi.py) and differ only in errno.
#if defined(__GLIBC__) && defined(__x86_64__)
__asm__(".symver exp,exp@GLIBC_2.2.5");
__asm__(".symver log,log@GLIBC_2.2.5");
#endif

namespace torch_cubin {
namespace {

constexpr double kInfinity = std::numeric_limits<double>::infinity();
constexpr int64_t kElementsOfAThread = 32768;  // a minimum; PyTorch's own grain

double double_of(tc_int64 bits) {
  double value;
  std::memcpy(&value, &bits, sizeof(value));
  return value;
}

// Computes rows one at a time, in buffers of its own.
template <class Real>
class SoftmaxRows {
 public:
  explicit SoftmaxRows(const SoftmaxParams& params)
      : p_(params),
        columns_(params.seqlen_k),
        scale_(double_of(params.scale)),
        softcap_(double_of(params.softcap)),
        keep_scale_(double_of(params.keep_scale)),
        values_(columns_),
        factors_(params.drop_below != 0 ? columns_ : 0),
        slopes_(params.softcap != 0 ? columns_ : 0) {}

  void run(SoftmaxKind kind, int64_t row) {
    const int64_t matrix = row / p_.seqlen_q;
    row_ = row;
    batch_ = matrix / p_.heads;
    head_ = matrix % p_.heads;
    i_ = row % p_.seqlen_q;
    begin_ = std::clamp<int64_t>(i_ + p_.first, 0, columns_);
    end_ = std::clamp<int64_t>(i_ + p_.last + 1, begin_, columns_);
    if (p_.drop_below != 0) fill_factors();
    if (kind == kSoftmaxForward) forward();
    if (kind == kSoftmaxBackward) backward();
    if (kind == kSoftmaxDropout) drop();
  }

 private:
  const Real* of_row(const void* tensor) const {
    return static_cast<const Real*>(tensor) + row_ * columns_;
  }
  Real* of_row(void* tensor) const { return static_cast<Real*>(tensor) + row_ * columns_; }
  double number_of_row(const void* tensor) const { return static_cast<const Real*>(tensor)[row_]; }

  // Dropout's factor of the weight in column j.
  double factor(int64_t j) const { return p_.drop_below != 0 ? factors_[j] : 1; }

  void fill_factors() {
    const int64_t head = p_.first_head + batch_ * p_.all_heads + head_;
    const auto seed = static_cast<uint64_t>(*p_.dropout_seed);
    for (int64_t first = 0; first < columns_; first += first % 8 == 6 ? 26 : 2) {
      const DropoutBits bits(seed, head, i_, first / 32, first % 8 / 2);
      for (int each = 0; each < 8; ++each) {
        const int64_t j = first + each / 2 * 8 + each % 2;
        if (j >= columns_) break;
        const bool dropped = bits.number(each / 2, each % 2) < p_.drop_below;
        factors_[j] = dropped ? 0 : keep_scale_;
      }
    }
  }

  // Adds the row of a mask with numbers of type Value.
  template <class Value>
  void add_mask() {
    const auto* mask = static_cast<const Value*>(p_.mask) + batch_ * p_.mask_stride[0] +
                       head_ * p_.mask_stride[1] + i_ * p_.mask_stride[2];
    const int64_t stride = p_.mask_stride[3];
    constexpr double kBias[] = {-kInfinity, 0};
    for (int64_t j = begin_; j < end_; ++j) {
      const Value value = mask[j * stride];
      if constexpr (std::is_same_v<Value, uint8_t>) {
        values_[j] += kBias[value != 0];  // a branch would be mispredicted in every other column
      } else {
        values_[j] += static_cast<double>(value);
      }
    }
  }

  void add_mask_of_kind() {
    switch (p_.mask_kind) {
      case kMaskNone:
        return;
      case kMaskBool:
        return add_mask<uint8_t>();
      case kMaskFloat16:
        return add_mask<torch::headeronly::Half>();
      case kMaskBFloat16:
        return add_mask<torch::headeronly::BFloat16>();
      case kMaskFloat32:
        return add_mask<float>();
      default:
        return add_mask<double>();
    }
  }

  // values_ become the logits, and slopes_ the derivatives of the softcap.
  void compute_logits() {
    const Real* scores = of_row(p_.scores);
    std::fill(values_.begin(), values_.begin() + begin_, -kInfinity);
    std::fill(values_.begin() + end_, values_.end(), -kInfinity);
    for (int64_t j = begin_; j < end_; ++j) values_[j] = scale_ * scores[j];
    if (softcap_ != 0) cap(begin_, end_);
    if (has_alibi(p_)) {
      const double slope = *slope_of(p_, batch_, head_);
      const int64_t diagonal = i_ + p_.seqlen_k - p_.seqlen_q;
      for (int64_t j = begin_; j < end_; ++j) {
        values_[j] -= slope * static_cast<double>(std::abs(diagonal - j));
      }
    }
    add_mask_of_kind();
  }

  void cap(int64_t begin, int64_t end) {
    for (int64_t j = begin; j < end; ++j) {
      const double t = std::tanh(values_[j] / softcap_);
      values_[j] = softcap_ * t;
      slopes_[j] = 1 - t * t;
    }
  }

  void forward() {
    compute_logits();
    const double sink = p_.sinks != nullptr ? p_.sinks[head_] : -kInfinity;
    double top = sink;
    for (const double logit : values_) top = std::max(top, logit);
    if (top == -kInfinity) top = 0;  // all hidden, or NaN
    double total = std::exp(sink - top);
    for (double& value : values_) {
      value = std::exp(value - top);
      total += value;
    }
    const bool nothing = total == 0;
    if (p_.logsumexp != nullptr) {
      static_cast<Real*>(p_.logsumexp)[row_] =
          static_cast<Real>(nothing ? -kInfinity : top + std::log(total));
    }
    Real* weights = of_row(p_.weights);
    for (int64_t j = 0; j < columns_; ++j) {
      weights[j] = static_cast<Real>(nothing ? 0 : values_[j] / total * factor(j));
    }
  }

  // values_ become the weights before dropout, as in the forward.
  void compute_probs() {
    if (!p_.given_probs) {
      compute_logits();
      const double sum = number_of_row(p_.logsumexp);
      for (double& value : values_) {
        // Rounded like logsumexp: under masks of -1e9 the difference would show.
        const double logit = static_cast<Real>(value);
        value = sum == -kInfinity ? 0 : std::exp(logit - sum);
      }
      return;
    }
    if (softcap_ != 0) {
      const Real* scores = of_row(p_.scores);
      for (int64_t j = 0; j < columns_; ++j) values_[j] = scale_ * scores[j];
      cap(0, columns_);
    }
    const Real* probs = of_row(p_.probs);
    std::copy(probs, probs + columns_, values_.begin());
  }

  void backward() {
    compute_probs();
    const Real* grad = of_row(p_.grad);
    double delta = 0;
    if (p_.delta != nullptr) {
      delta = number_of_row(p_.delta);
    } else {
      for (int64_t j = 0; j < columns_; ++j) delta += values_[j] * factor(j) * grad[j];
    }
    if (p_.grad_logsumexp != nullptr) delta -= number_of_row(p_.grad_logsumexp);
    Real* weights = p_.weights != nullptr ? of_row(p_.weights) : nullptr;
    Real* grad_scores = of_row(p_.grad_scores);
    for (int64_t j = 0; j < columns_; ++j) {
      const double prob = values_[j], slope = softcap_ != 0 ? slopes_[j] : 1;
      const double grad_score = prob * (factor(j) * grad[j] - delta) * (scale_ * slope);
      // Hidden elements do not contribute, even if their gradient is not finite.
      const bool hidden = !p_.given_probs && prob == 0;
      if (weights != nullptr) weights[j] = static_cast<Real>(prob * factor(j));
      grad_scores[j] = static_cast<Real>(hidden ? 0 : grad_score);
    }
  }

  void drop() {
    const Real* probs = of_row(p_.scores);
    Real* weights = of_row(p_.weights);
    for (int64_t j = 0; j < columns_; ++j) weights[j] = static_cast<Real>(probs[j] * factor(j));
  }

  const SoftmaxParams& p_;
  const int64_t columns_;
  const double scale_, softcap_, keep_scale_;
  std::vector<double> values_, factors_, slopes_;
  // The current row; it attends to the columns from begin_ to end_.
  int64_t row_ = 0, batch_ = 0, head_ = 0, i_ = 0, begin_ = 0, end_ = 0;
};

template <class Real>
void run_rows(SoftmaxKind kind, const SoftmaxParams& params) {
  const auto some = [&](int64_t begin, int64_t end) {
    SoftmaxRows<Real> rows(params);
    for (int64_t row = begin; row < end; ++row) rows.run(kind, row);
  };
  const int64_t grain = kElementsOfAThread / std::max(params.seqlen_k, 1) + 1;
  torch::stable::parallel_for(0, params.rows, grain, some);
}

}  // namespace

void softmax_reference(SoftmaxKind kind, ScalarType dtype, const SoftmaxParams& params) {
  if (dtype == ScalarType::Double) {
    run_rows<double>(kind, params);
  } else {
    run_rows<float>(kind, params);
  }
}

}  // namespace torch_cubin
