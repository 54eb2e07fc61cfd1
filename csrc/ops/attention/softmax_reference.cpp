// The softmax family on the CPU: a reference that is easy to read, in double (long double for
// float64) and one row after the other.
//
// NOTE: expl, logl and tanhl, because exp and log of double are newer than glibc 2.28
// (tests/unit/test_abi.py).
#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <vector>

#include "ops/attention/dropout_bits.h"
#include "ops/attention/softmax.h"

namespace torch_cubin {
namespace {

using Wide = long double;
constexpr Wide kInfinity = std::numeric_limits<Wide>::infinity();

double double_of(tc_int64 bits) {
  double value;
  std::memcpy(&value, &bits, sizeof(value));
  return value;
}

Wide float16_value(uint16_t bits) {
  const int exponent = bits >> 10 & 31, fraction = bits & 1023;
  Wide value = exponent == 0 ? std::ldexp(static_cast<Wide>(fraction), -24)
                             : std::ldexp(static_cast<Wide>(1024 + fraction), exponent - 25);
  if (exponent == 31) value = fraction == 0 ? kInfinity : std::numeric_limits<Wide>::quiet_NaN();
  return bits >> 15 != 0 ? -value : value;
}

Wide bfloat16_value(uint16_t bits) {
  const uint32_t wide = static_cast<uint32_t>(bits) << 16;
  float value;
  std::memcpy(&value, &wide, sizeof(value));
  return value;
}

template <class Real>
class Rows {
 public:
  explicit Rows(const SoftmaxParams& params)
      : p(params), scale(double_of(p.scale)), softcap(double_of(p.softcap)) {}

  void run(SoftmaxKind kind) {
    for (row = 0; row < p.rows; ++row) {
      const int64_t matrix = row / p.seqlen_q;
      batch = matrix / p.heads;
      head = matrix % p.heads;
      i = row % p.seqlen_q;
      if (kind == kSoftmaxForward) forward();
      if (kind == kSoftmaxBackward) backward();
      if (kind == kSoftmaxDropout) drop();
    }
  }

 private:
  Wide at(const void* tensor, int64_t j) const {
    return static_cast<const Real*>(tensor)[row * p.seqlen_k + j];
  }
  Wide of_row(const void* tensor) const { return static_cast<const Real*>(tensor)[row]; }
  void put(void* tensor, int64_t j, Wide value) const {
    static_cast<Real*>(tensor)[row * p.seqlen_k + j] = static_cast<Real>(value);
  }

  Wide masked(Wide logit, int64_t j) const {
    const int64_t element = batch * p.mask_stride[0] + head * p.mask_stride[1] +
                            i * p.mask_stride[2] + j * p.mask_stride[3];
    switch (p.mask_kind) {
      case kMaskNone:
        return logit;
      case kMaskBool:
        return logit + (static_cast<const uint8_t*>(p.mask)[element] != 0 ? 0 : -kInfinity);
      case kMaskFloat16:
        return logit + float16_value(static_cast<const uint16_t*>(p.mask)[element]);
      case kMaskBFloat16:
        return logit + bfloat16_value(static_cast<const uint16_t*>(p.mask)[element]);
      case kMaskFloat32:
        return logit + static_cast<const float*>(p.mask)[element];
      default:
        return logit + static_cast<const double*>(p.mask)[element];
    }
  }

  Wide logit(int64_t j) const {
    if (j < i + p.first || j > i + p.last) return -kInfinity;
    Wide value = scale * at(p.scores, j);
    if (softcap != 0) value = softcap * std::tanh(value / softcap);
    if (p.alibi_slopes != nullptr) {
      value -= static_cast<Wide>(p.alibi_slopes[batch * p.alibi_stride + head]) *
               std::abs(i + p.seqlen_k - p.seqlen_q - j);
    }
    return masked(value, j);
  }

  // Of the logit with respect to the score.
  Wide derivative(int64_t j) const {
    if (softcap == 0) return scale;
    const Wide t = std::tanh(scale * at(p.scores, j) / softcap);
    return scale * (1 - t * t);
  }

  Wide dropout(int64_t j) const {
    if (p.drop_below == 0) return 1;
    const int64_t own = p.first_head + batch * p.all_heads + head;
    const auto seed = static_cast<uint64_t>(*p.dropout_seed);
    return dropout_bits(seed, own, i, j) < p.drop_below ? 0 : double_of(p.keep_scale);
  }

  void forward() const {
    std::vector<Wide> logits(p.seqlen_k);
    Wide top = p.sinks != nullptr ? Wide{p.sinks[head]} : -kInfinity;
    for (int64_t j = 0; j < p.seqlen_k; ++j) {
      logits[j] = logit(j);
      top = std::max(top, logits[j]);
    }
    if (top == -kInfinity) top = 0;  // hidden all, or NaN
    Wide total = p.sinks != nullptr ? std::exp(p.sinks[head] - top) : 0;
    for (const Wide each : logits) total += std::exp(each - top);
    const bool nothing = total == 0;
    if (p.logsumexp != nullptr) {
      static_cast<Real*>(p.logsumexp)[row] =
          static_cast<Real>(nothing ? -kInfinity : top + std::log(total));
    }
    for (int64_t j = 0; j < p.seqlen_k; ++j) {
      put(p.weights, j, nothing ? 0 : std::exp(logits[j] - top) / total * dropout(j));
    }
  }

  void backward() const {
    std::vector<Wide> probs(p.seqlen_k);
    Wide delta = 0;
    for (int64_t j = 0; j < p.seqlen_k; ++j) {
      if (p.given_probs) {
        probs[j] = at(p.probs, j);
      } else {
        // Rounded as logsumexp was: under masks of -1e9 what rounding took away would show.
        const Wide value = static_cast<Real>(logit(j)), sum = of_row(p.logsumexp);
        probs[j] = sum == -kInfinity ? 0 : std::exp(value - sum);
      }
      delta += probs[j] * dropout(j) * at(p.grad, j);
    }
    if (p.delta != nullptr) delta = of_row(p.delta);
    if (p.grad_logsumexp != nullptr) delta -= of_row(p.grad_logsumexp);
    for (int64_t j = 0; j < p.seqlen_k; ++j) {
      const Wide factor = dropout(j);
      const bool hidden = !p.given_probs && probs[j] == 0;
      const Wide grad = probs[j] * (factor * at(p.grad, j) - delta) * derivative(j);
      if (p.weights != nullptr) put(p.weights, j, probs[j] * factor);
      put(p.grad_scores, j, hidden ? 0 : grad);
    }
  }

  void drop() const {
    for (int64_t j = 0; j < p.seqlen_k; ++j) put(p.weights, j, at(p.scores, j) * dropout(j));
  }

  const SoftmaxParams& p;
  const Wide scale, softcap;
  int64_t row = 0, batch = 0, head = 0, i = 0;
};

}  // namespace

void softmax_reference(SoftmaxKind kind, ScalarType dtype, const SoftmaxParams& params) {
  if (dtype == ScalarType::Double) {
    Rows<double>(params).run(kind);
  } else {
    Rows<float>(params).run(kind);
  }
}

}  // namespace torch_cubin
