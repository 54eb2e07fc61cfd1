// The backends of the kernels for every arch, forward and backward.
//
// The forward: portable/mma.cu, portable/pair.cu and portable/tf32x3.cu of csrc/kernels/attention,
// decode/decode.cu for few rows of queries, and portable/combine.cu, which combines the results of
// split keys. The backward: three kernels in sequence. For 16-bit types portable/delta.cu (the
// rows' sums of grad_out * out; it also clears the counters by which blocks add to dq in a fixed
// order), portable/backward.cu, and portable/convert.cu, which rounds the float sums of dq; for
// float32 portable/delta.cu, then portable/gradient.cu twice: for dk and dv, and for dq, which
// share nothing.
#include <algorithm>

#include "ops/attention/portable/decode.h"

namespace torch_cubin {
namespace {

constexpr int64_t kFewestColumns = 256;  // of a split
constexpr int64_t kDecodeQueries = 16;
constexpr int64_t kDecodeRows = 64;  // above it, tiles of more rows read keys less often
// A mask is read element by element: measured on the H200 a call then takes 4 to 9 times as long.
constexpr double kMaskedTime = 4;

struct PortableForwardPlan {
  PackageKernel* kernel = nullptr;
  const AttentionRow* combine = nullptr;  // with splits > 1
  int64_t blocks = 0;                     // for one batch
  int64_t columns_per_split = 0;
  int32_t splits = 1;
  bool decodes = false;         // uses the kernel for few queries
  int64_t dynamic_shared = -1;  // of a block, if it differs from the kernel's own
  int prefetched = 0;
};

// Cycles until the last of `blocks` is done.
double cycles_of(const AttentionRow& row, int64_t blocks, int64_t columns) {
  const double waves = static_cast<double>(ceil_div(blocks, row.slots));
  return waves *
         (static_cast<double>(ceil_div(columns, row.columns)) * row.cost_tile + row.cost_fixed);
}

constexpr AttentionStep kForwardStep{"forward", "attention", sizeof(AttentionParams), true};

class PortableForward : public AttentionForwardKernels {
 public:
  PortableForward(const Device& device, const AttentionEntries& entries)
      : device_(device),
        forward_(entries.table(kForwardStep)),
        combine_(entries.table(kCombineStep)) {
    entries.each(kDecodeStep, [&](const AttentionRow& row) {
      if (!row.e4m3) decode_.add(row);  // otherwise for caches only
    });
  }

  ForwardPlan plan(const AttentionCase& problem) const override {
    ForwardPlan plan;
    const AttentionDtype dtype = attention_dtype(problem.dtype);
    if (dtype == kAttendDtypes) return plan;
    const int64_t head_dim = std::max(problem.head_dim, problem.head_dim_v);
    if (forward_.first(dtype, problem.needs, head_dim) == nullptr) return plan;
    PortableForwardPlan details;
    const AttentionRow* chosen = decodes(dtype, problem, head_dim);
    details.decodes = chosen != nullptr;
    if (chosen != nullptr) {
      details.blocks =
          ceil_div(problem.seqlen_q * problem.group(), chosen->rows) * problem.kv_heads;
      const DecodeSplit wanted =
          split_decode(*chosen, std::max<int64_t>(1, details.blocks * problem.batch),
                       kMostCombinedParts, device_);
      split(details, dtype, *chosen, problem, wanted.parts);
      details.dynamic_shared = wanted.dynamic_shared;
      if (!problem.packed) details.prefetched = wanted.prefetched;
    } else {
      double best = 0;
      forward_.for_each(dtype, problem.needs, head_dim, [&](const AttentionRow& row) {
        const int64_t blocks = ceil_div(problem.seqlen_q, row.rows) * problem.heads;
        const double cost = cycles_of(row, blocks * problem.batch, problem.seqlen_k);
        if (chosen != nullptr && cost >= best) return;
        best = cost;
        chosen = &row;
        details.blocks = blocks;
      });
      split(details, dtype, *chosen, problem,
            chosen->slots / std::max<int64_t>(1, details.blocks * problem.batch));
    }
    details.kernel = chosen->kernel;
    const double cycles = cycles_of(*chosen, details.blocks * problem.batch * details.splits,
                                    details.columns_per_split) +
                          combine_cycles(details, problem);
    plan.microseconds = cycles / device_.cycles_per_microsecond;
    if (problem.has(kAnyMask) && !details.decodes) plan.microseconds *= kMaskedTime;
    plan.set(details);
    return plan;
  }

  void launch(const ForwardPlan& plan, const AttentionCase& problem, const FusedOperands& operands,
              float* logsumexp) const override {
    const auto chosen = plan.get<PortableForwardPlan>();
    AttentionParams params = operands.params(problem.head_dim, problem.head_dim_v);
    params.splits = chosen.splits;
    params.columns_per_split = static_cast<int>(chosen.columns_per_split);
    const int64_t rows = problem.batch * problem.heads * problem.seqlen_q;
    const Tensor parts_of_keys = allocate_parts(params, rows, device_);
    const int64_t parts = operands.problem.parts();
    for (int64_t part = 0; part < parts; ++part) {
      operands.fill(params, part);
      params.logsumexp = logsumexp == nullptr ? nullptr : logsumexp + part * rows;
      const int64_t blocks = chosen.blocks * problem.batch;
      if (chosen.decodes) {
        DecodeParams decode{};
        static_cast<AttentionParams&>(decode) = params;
        decode.prefetched = chosen.prefetched;
        launch_attention(*chosen.kernel, decode, blocks, chosen.splits, device_,
                         chosen.dynamic_shared);
      } else {
        launch_attention(*chosen.kernel, params, blocks, chosen.splits, device_);
      }
      if (chosen.splits > 1) {
        launch_combine(*chosen.combine, params, rows, false, device_);
      }
    }
  }

 private:
  // The kernel for few queries, if these are few: it reads keys and values once for all heads of a
  // group.
  const AttentionRow* decodes(AttentionDtype dtype, const AttentionCase& problem,
                              int64_t head_dim) const {
    if ((problem.packed && problem.batch_invariant) || problem.seqlen_q > kDecodeQueries ||
        problem.seqlen_q * problem.group() > kDecodeRows) {
      return nullptr;
    }
    const int64_t blocks = ceil_div(problem.seqlen_q * problem.group(), 16) * problem.kv_heads;
    return decode_row(decode_, dtype, problem.needs, head_dim,
                      problem.batch_invariant ? INT64_MAX : blocks * problem.batch, device_);
  }

  // Splits the columns into this many parts, but no finer than a second kernel is worth.
  void split(PortableForwardPlan& plan, AttentionDtype dtype, const AttentionRow& row,
             const AttentionCase& problem, int64_t parts) const {
    const int64_t blocks = plan.blocks * problem.batch;
    plan.columns_per_split = problem.seqlen_k;
    // The lengths of packed sequences are not known here.
    const AttentionRow* combine = combine_.first(dtype);
    if (combine == nullptr || blocks == 0 || problem.packed) return;
    const int64_t tiles = ceil_div(problem.seqlen_k, row.columns);
    const int64_t fewest = std::max<int64_t>(1, kFewestColumns / row.columns);
    const int64_t wanted = std::min<int64_t>({parts, tiles / fewest, kMostCombinedParts});
    if (wanted <= 1) return;
    const int64_t tiles_per_split = ceil_div(tiles, wanted);
    plan.columns_per_split = tiles_per_split * row.columns;
    plan.splits = static_cast<int32_t>(ceil_div(tiles, tiles_per_split));
    plan.combine = combine;
  }

  // The cycles of the second kernel of a split. On an H200 64, 256, 512, 1,024 and 2,048 blocks of
  // it took 0.8, 2, 5.5, 8.5 and 15 us, with 2 to 16 parts of 32 to 128 columns.
  static double combine_cycles(const PortableForwardPlan& plan, const AttentionCase& problem) {
    if (plan.combine == nullptr) return 0;
    const int64_t rows = problem.batch * problem.heads * problem.seqlen_q;
    const CombineGrid grid(*plan.combine, plan.splits, rows, problem.head_dim_v, false);
    const auto blocks = static_cast<double>(grid.blocks * grid.blocks_per_row);
    return plan.combine->cost_fixed + plan.combine->cost_tile * blocks / plan.combine->slots;
  }

  const Device& device_;
  AttentionTable forward_, combine_, decode_;
};

const AttentionBackend g_portable_forward(
    {&kForwardStep, &kDecodeStep, &kCombineStep, &kAppendStep, &kGatherStep},
    [](const Device& device, const AttentionEntries& entries, AttentionKernels& made) {
      made.add(std::make_unique<PortableForward>(device, entries));
      made.add(make_portable_kv_cache(device, entries));
    });

}  // namespace

Tensor allocate_parts(AttentionParams& params, int64_t rows, const Device& device) {
  if (params.splits <= 1) return {};
  const int64_t floats = params.splits * rows * (int64_t{params.head_dim_v} + 1);
  Tensor parts = empty_cuda(&floats, 1, ScalarType::Float, device.index);
  params.partial_out = static_cast<float*>(parts.mutable_data_ptr());
  params.partial_logsumexp = params.partial_out + params.splits * rows * params.head_dim_v;
  return parts;
}

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

const AttentionBackend g_portable_backward({&kDeltaStep, &kBackwardStep, &kConvertStep,
                                            &kGradientStep},
                                           &make_kernels<PortableBackward>);

}  // namespace

}  // namespace torch_cubin
