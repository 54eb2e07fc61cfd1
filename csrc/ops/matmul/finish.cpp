// The backend of csrc/kernels/matmul/finish.cu: an epilogue that the quickest kernels cannot do
// themselves. The product goes, with its sums unrounded, to whichever kernels are quickest for
// that, and a second kernel does the rest.
#include <algorithm>
#include <iterator>

#include "kernels/matmul/finish_params.h"
#include "ops/common/launch.h"
#include "ops/matmul/backend.h"
#include "ops/matmul/plan.h"

namespace torch_cubin {
namespace {

constexpr int64_t kFinishColumns = 4;       // of a thread
constexpr int64_t kFinishBlocksOfOne = 16;  // most blocks a multiprocessor; they share the rows out

class FinishKernels : public MatmulKernels {
 public:
  FinishKernels(const Device& device, const std::vector<PackageKernel*>& kernels)
      : device_(device) {
    for (PackageKernel* kernel : kernels) {
      const KernelFields fields(*kernel);
      kernels_[fields.integer("splits", 0, 1)][fields.index("dtype", kFinishDtypes)] = kernel;
      cost_ = CopyCost(fields);
    }
  }

  static constexpr const char* kFinishDtypes[] = {"float16", "bfloat16", "float32", "float64"};

  static void check(PackageKernel& kernel) {
    const KernelFields fields(kernel);
    fields.integer("splits", 0, 1);
    fields.index("dtype", kFinishDtypes);
    CopyCost{fields};  // throws for a figure that is wrong
  }

  void configs(const MatmulCase& c, MatmulConfigs& out) const override {
    // A wider output without an epilogue is what other kernels leave to this one.
    const bool widens = c.output != c.input;
    if (widens && (c.output != sums_dtype(c.input) || c.only_bias())) return;
    if (c.split_sums || c.row_parts || !has_kernels_for(c.output)) return;
    // A second product is quicker than single elements of three tensors (H200, 300 x 1001 x 264:
    // 8.0 us, not 10.7).
    if (c.aux && !c.out_vectors) return;
    MatmulCase sums = c;
    sums.row_parts = c.row_sums;
    sums.row_sums = false;
    if (is_finished(c)) rewrite(c, sums, {false}, out);
    sums.activation = kActivationNone;
    sums.scaled = sums.has_addend = sums.has_bias = sums.aux = false;
    sums.output = sums_dtype(c.input);
    sums.needs_mirror = false;  // the addend comes after it
    if (!c.only_bias()) rewrite(c, sums, {false}, out);
    const bool short_types = c.math == kMathFloat16 || c.math == kMathBFloat16;
    // Under batch_invariant K is split into its parts alone, whose sums are added as elsewhere.
    if (!short_types || c.batch_dims > 0 || (c.batch_invariant && c.k_parts == 1)) return;
    sums.split_sums = true;
    rewrite(c, sums, {true}, out);
  }

  // What the product itself runs on is chosen by itself.
  std::string name(const MatmulPlan& plan) const override {
    return plan.get<FinishPlan>().split ? "split" : "finish";
  }

  void launch(const MatmulPlan& plan, const MatmulProblem& p,
              const MatmulOperands& operands) const override {
    const bool split = plan.get<FinishPlan>().split;
    const bool finishes = split || !is_finished(matmul_case(p, operands));
    const int64_t rows = p.batch() * p.m;
    MatmulProblem product = p;
    product.split_sums = split;
    product.row_parts = operands.row_sums != nullptr;
    if (p.symmetry == Symmetry::kLower) product.symmetry = Symmetry::kProduct;
    if (finishes) {
      product.output = sums_dtype(p.input);
      product.activation = kActivationNone;
      product.alpha = 1;
    }
    MatmulOperands own = operands;
    if (finishes) own.bias = own.addend = own.aux = nullptr;
    const MatmulPlan inner = plan_matmul(device_, matmul_case(product, own));
    check_forced_inner(name(plan), inner);
    const int64_t bytes = element_size(sums_dtype(p.input));
    const Workspace sums(device_, finishes ? inner.splits * rows * p.n * bytes : 0);
    const Workspace row_sums(device_, inner.row_parts * p.m * bytes);
    if (finishes) own.c = sums.data();
    if (operands.row_sums != nullptr) own.row_sums = row_sums.data();
    inner.kernels->launch(inner, product, own);
    if (operands.row_sums != nullptr) {
      FinishParams of_m{};  // one row of M sums
      of_m.sums = row_sums.data();
      of_m.out = operands.row_sums;
      of_m.rows = of_m.m = 1;
      of_m.n = p.m;
      of_m.alpha = 1;
      of_m.splits = inner.row_parts;
      of_m.activation = kActivationNone;
      launch_finish(of_m, p);
    }
    if (!finishes) return;

    FinishParams params{};
    params.sums = sums.data();
    params.out = operands.c;
    params.bias = operands.bias;
    params.addend = operands.addend;
    params.aux = operands.aux;
    params.rows = rows;
    params.m = p.m;
    params.n = p.n;
    params.bias_stride = operands.bias_stride;
    params.addend_stride_m = p.addend_stride_m;
    params.addend_stride_n = p.addend_stride_n;
    static_assert(sizeof(params.batch_size) == kMaxPlannedBatchDims * sizeof(tc_int64));
    for (int i = 0; i < kMaxPlannedBatchDims; ++i) {
      params.batch_size[i] = i < p.batch_dims ? p.batch_size[i] : 1;
      params.addend_batch_stride[i] = i < p.batch_dims ? p.addend_batch_stride[i] : 0;
    }
    params.alpha = p.alpha;
    params.beta = p.beta;
    params.activation = p.activation;
    params.splits = inner.splits;
    params.curve = kActivationCurves[p.activation];
    launch_finish(params, p);
  }

 private:
  struct FinishPlan {
    bool split;  // K
  };

  // Whether kernels of products do all of the epilogue themselves; they leave sums of rows in
  // parts.
  static bool is_finished(const MatmulCase& c) { return c.only_bias() && c.row_sums; }

  void rewrite(const MatmulCase& c, const MatmulCase& sums, FinishPlan chosen,
               MatmulConfigs& out) const {
    const auto sum_bytes = static_cast<double>(element_size(sums_dtype(c.input)));
    const auto out_bytes = static_cast<double>(element_size(c.output));
    const auto m = static_cast<double>(c.m);
    RewriteBytes bytes;
    if (c.row_sums) {
      bytes.of_part = m * sum_bytes;
      bytes.always = m * out_bytes;
    }
    if (chosen.split || !is_finished(c)) {
      const double outputs = static_cast<double>(c.batch) * m * static_cast<double>(c.n);
      bytes.of_split = outputs * sum_bytes;
      bytes.always += outputs * (1 + c.has_addend + c.aux) * out_bytes;
    }
    MatmulPlan plan;
    plan.set(chosen);
    out.rewrite(plan, sums, bytes, cost_);
  }

  void launch_finish(FinishParams& params, const MatmulProblem& p) const {
    const int64_t vector = std::min(kVectorBytes, kFinishColumns * element_size(p.output));
    const auto is_aligned = [&](const void* to) {
      return reinterpret_cast<uintptr_t>(to) % vector == 0;
    };
    params.vectors =
        params.n % kFinishColumns == 0 && is_aligned(params.out) && is_aligned(params.aux);
    PackageKernel& kernel = *kernels_[params.splits > 1][index_of(p.output)];
    const int64_t threads = params.rows * ceil_div(params.n, kFinishColumns);
    const int64_t blocks = std::min(ceil_div(threads, int64_t{kernel.entry().block[0]}),
                                    kFinishBlocksOfOne * device_.multiprocessors);
    torch_cubin::launch(kernel, {blocks}, device_, params);
  }

  static int64_t index_of(ScalarType dtype) {
    constexpr ScalarType kFirst[] = {ScalarType::Half, ScalarType::BFloat16, ScalarType::Float};
    return std::find(std::begin(kFirst), std::end(kFirst), dtype) - kFirst;
  }
  // Sums of float64 are never in splits.
  bool has_kernels_for(ScalarType dtype) const {
    return kernels_[0][index_of(dtype)] != nullptr &&
           (dtype == ScalarType::Double || kernels_[1][index_of(dtype)] != nullptr);
  }

  const Device& device_;
  PackageKernel* kernels_[2][4] = {};  // for one matrix of sums, for those of splits
  CopyCost cost_;
};

const MatmulBackendOf<FinishKernels, FinishParams> g_finish("matmul/finish", {"finish"});

}  // namespace
}  // namespace torch_cubin
