// The backend of the backward kernels for every arch. Three kernels in sequence: for 16-bit types
// portable/delta.cu (the rows' sums of grad_out * out; it also clears the counters by which blocks
// add to dq in a fixed order), portable/backward.cu, and portable/convert.cu, which rounds the
// float sums of dq; for float32 portable/delta.cu, then portable/gradient.cu twice: for dk and dv,
// and for dq, which share nothing.
#include <algorithm>

#include "ops/attention/portable/portable.h"

namespace torch_cubin {
namespace {

// With this few rows of queries float32's kernel of dq has one block for each head, and the scores
// of a composition are small. The composition is also more exact if a gradient has one term: a
// product of three of TF32 has twice the error of float32's.
constexpr int64_t kFewRows = 16;

constexpr AttentionStep kDeltaStep{"delta", "attention", sizeof(AttentionParams)};
constexpr AttentionStep kBackwardStep{"backward", "attention", sizeof(AttentionParams), true};
constexpr AttentionStep kConvertStep{"convert", "attention", sizeof(AttentionParams)};
constexpr AttentionStep kGradientStep{"gradient", "attention", sizeof(AttentionParams), true};

struct PortableBackwardPlan {
  const AttentionRow* delta = nullptr;
  const AttentionRow* backward = nullptr;
  const AttentionRow* convert = nullptr;
  const AttentionRow* gradient_k = nullptr;
  const AttentionRow* gradient_q = nullptr;

  bool joined() const { return backward != nullptr && convert != nullptr; }
  bool apart() const { return gradient_k != nullptr && gradient_q != nullptr; }
  bool complete() const { return delta != nullptr && (joined() || apart()); }
};

// The memory in which the blocks of a backward kernel accumulate dq, and the counters of their
// turns; see portable/backward_dq.cuh.
struct DqSum {
  Tensor sum, turns;
  int64_t tiles_of_head = 0;

  DqSum() = default;
  DqSum(const Device& device, const AttentionCase& problem, const FusedOperands& operands,
        int64_t delta_blocks, AttentionParams& params)
      : tiles_of_head(ceil_div(problem.seqlen_q, 16)) {
    int64_t tiles = problem.batch * problem.heads * tiles_of_head;
    if (problem.packed) {
      const AttentionShape& shape = operands.call.shape;
      tiles = problem.heads * (shape.total_q / 16 + shape.batch.sizes[0]);
    }
    const int64_t floats = tiles * 16 * problem.head_dim;
    sum = empty_cuda(&floats, 1, ScalarType::Float, device.index);
    turns = empty_cuda(&delta_blocks, 1, ScalarType::Int, device.index);  // one for each block
    params.dq_sum = static_cast<float*>(sum.mutable_data_ptr());
    params.dq_turn = static_cast<int*>(turns.mutable_data_ptr());
  }
};

class PortableBackward : public AttentionBackwardKernels {
 public:
  PortableBackward(const Device& device, const AttentionEntries& entries)
      : device_(device),
        delta_(entries.table(kDeltaStep)),
        backward_(entries.table(kBackwardStep)),
        convert_(entries.table(kConvertStep)) {
    entries.each(kGradientStep, [&](const AttentionRow& row) {
      (row.of == "keys" ? gradient_k_ : gradient_q_).add(row);
    });
  }

  BackwardPlan plan(const AttentionCase& problem) const override {
    BackwardPlan plan;
    const AttentionDtype dtype = attention_dtype(problem.dtype);
    if (dtype == kAttendDtypes) return plan;
    const int64_t head_dim = std::max(problem.head_dim, problem.head_dim_v);
    PortableBackwardPlan details;
    details.backward = backward_.first(dtype, problem.needs, head_dim);
    details.gradient_k = gradient_k_.first(dtype, problem.needs, head_dim);
    details.gradient_q = gradient_q_.first(dtype, problem.needs, head_dim);
    details.delta = delta_.first(dtype);
    details.convert = convert_.first(dtype);
    const bool few = !details.joined() && !problem.packed && problem.seqlen_q <= kFewRows;
    if (!details.complete() || few) return plan;
    // The manifest has no costs for these kernels. Five products of 2 * rows * columns * head_dim
    // operations, about 1,000 a cycle on a multiprocessor, are close enough.
    const double products = 5.0 * problem.batch * problem.heads * problem.seqlen_q *
                            static_cast<double>(problem.seqlen_k) * 2 * head_dim;
    plan.microseconds =
        products / (1000.0 * device_.multiprocessors * device_.cycles_per_microsecond);
    plan.set(details);
    return plan;
  }

  void launch(const BackwardPlan& plan, const AttentionCase& problem, const FusedOperands& operands,
              const float* logsumexp) const override {
    const auto chosen = plan.get<PortableBackwardPlan>();
    const int64_t parts = operands.problem.parts();
    const int64_t sums = operands.call.shape.logsumexp.numel() / parts;
    Tensor delta = empty_cuda(&sums, 1, ScalarType::Float, device_.index);
    AttentionParams params = operands.params(problem.head_dim, problem.head_dim_v);
    params.delta = static_cast<const float*>(delta.data_ptr());
    const int64_t heads = problem.batch * problem.heads;
    const int64_t delta_blocks = heads * ceil_div(problem.seqlen_q, chosen.delta->rows);
    DqSum dq;
    if (chosen.joined()) dq = DqSum(device_, problem, operands, delta_blocks, params);
    const auto run = [&](PackageKernel& kernel, int64_t blocks) {
      launch_attention(kernel, params, blocks, 1, device_);
    };
    const auto run_keys = [&](const AttentionRow& row) {
      run(*row.kernel, problem.batch * problem.kv_heads * ceil_div(problem.seqlen_k, row.columns));
    };
    for (int64_t part = 0; part < parts; ++part) {
      operands.fill(params, part);
      params.logsumexp = const_cast<float*>(logsumexp) + part * sums;
      run(*chosen.delta->kernel, delta_blocks);
      if (chosen.joined()) {
        run_keys(*chosen.backward);
        PackageKernel& convert = *chosen.convert->kernel;
        const int64_t warps = convert.entry().block[0] / 32;
        run(convert, ceil_div(heads * dq.tiles_of_head, warps));
      } else {
        run_keys(*chosen.gradient_k);
        const AttentionRow& row = *chosen.gradient_q;
        run(*row.kernel, heads * ceil_div(problem.seqlen_q, row.rows));
      }
    }
  }

  bool launch_sink_terms(ScalarType type, const AttentionParams& params) const override {
    const AttentionRow* row = delta_.first(attention_dtype(type));
    if (row == nullptr) return false;
    const int64_t heads = int64_t{params.batch} * params.heads;
    launch_attention(*row->kernel, params, heads * ceil_div(params.seqlen_q, row->rows), 1,
                     device_);
    return true;
  }

 private:
  const Device& device_;
  AttentionTable delta_, backward_, convert_, gradient_k_, gradient_q_;
};

class PortableBackwardBackend : public AttentionBackend {
 public:
  PortableBackwardBackend()
      : AttentionBackend({&kDeltaStep, &kBackwardStep, &kConvertStep, &kGradientStep}) {}
  std::unique_ptr<AttentionBackwardKernels> backward(
      const Device& device, const AttentionEntries& entries) const override {
    return std::make_unique<PortableBackward>(device, entries);
  }
};

const PortableBackwardBackend g_portable_backward;

}  // namespace
}  // namespace torch_cubin
