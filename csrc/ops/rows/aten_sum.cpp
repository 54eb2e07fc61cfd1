#include "ops/rows/aten_sum.h"

#include <algorithm>

#include "ops/common/aten.h"
#include "ops/common/serving.h"
#include "ops/rows/kernels.h"
#include "pytorch/aten_kernels.h"

namespace torch_cubin {
namespace {

// With fewer elements or rows, PyTorch's kernel is as quick (bench_rows.py --only "sum of rows").
constexpr int64_t kFewElements = 1 << 17, kFewRows = 64;

// The dims of a reduction, as a set.
struct Reduction {
  Reduction(const TensorView& self, const std::optional<std::vector<int64_t>>& dims) {
    if (!dims || dims->empty()) {
      reduced.assign(self.dim, true);
      return;
    }
    reduced.assign(self.dim, false);
    for (const int64_t dim : *dims) check_aten_dim(dim, self.dim);
    for (int64_t dim : *dims) {
      if (dim < 0) dim += self.dim;
      is_valid &= dim >= 0 && dim < self.dim && !reduced[dim];
      if (!is_valid) return;
      reduced[dim] = true;
    }
  }

  // The number of dims in front that are all the reduced ones; 0 for other reductions.
  int64_t leading() const {
    if (!is_valid) return 0;
    const auto kept = std::find(reduced.begin(), reduced.end(), false);
    const bool rest = std::find(kept, reduced.end(), true) != reduced.end();
    return rest || kept == reduced.end() ? 0 : kept - reduced.begin();
  }

  std::vector<int64_t> shape(const TensorView& self, bool keepdim) const {
    std::vector<int64_t> out;
    if (!is_valid) return out;  // PyTorch raises an error
    for (int64_t i = 0; i < self.dim; ++i) {
      if (!reduced[i]) {
        out.push_back(self.sizes[i]);
      } else if (keepdim) {
        out.push_back(1);
      }
    }
    return out;
  }

  std::vector<bool> reduced;
  bool is_valid = true;
};

bool is_integral(ScalarType dtype) {
  switch (dtype) {
    case ScalarType::Bool:
    case ScalarType::Byte:
    case ScalarType::Char:
    case ScalarType::Short:
    case ScalarType::Int:
    case ScalarType::Long:
    case ScalarType::UInt16:
    case ScalarType::UInt32:
    case ScalarType::UInt64:
      return true;
    default:
      return false;
  }
}

const char* why_not_sum(const TensorView& self, const Reduction& reduction, ScalarType out,
                        Policy policy) {
  const int64_t dims = self.dim - reduction.leading();
  const RowSizes sizes = row_sizes(self, dims);
  if (sizes.rows == 0 || sizes.columns == 0) return "no elements";
  if (const char* reason = why_not_tensor(self, CallKind::kSum, policy)) return reason;
  if (self.on_cuda() && self.dtype == ScalarType::Double) return "float64, which has no kernels";
  if (self.on_cuda() && are_too_long(sizes)) return "rows that are too long";
  if (out != self.dtype && out != ScalarType::Float) {
    return "a dtype of the result that is neither float32 nor the input's";
  }
  if (!RowsOperand::is_readable(self, dims, sizes)) {
    return "rows that are not contiguous and aligned";
  }
  if (policy == Policy::kFastest) {
    if (sizes.rows < kFewRows || sizes.rows * sizes.columns < kFewElements) {
      return "few elements, which are not known to be quicker";
    }
    if (!has_vectors(sizes)) return "rows of no whole vectors, which are not known to be quicker";
  }
  return nullptr;
}

// PyTorch's own kernel, into a new tensor: the operator with out= is not ours.
Tensor call_aten_sum(const Tensor& self, const std::optional<std::vector<int64_t>>& dims,
                     bool keepdim, std::optional<ScalarType> dtype,
                     const std::vector<int64_t>& shape, ScalarType out_dtype) {
  using torch::stable::detail::from;
  const auto dim = static_cast<int64_t>(shape.size());
  const Tensor out = empty_near(TensorView(self), shape.data(), dim, out_dtype);
  StableIValue stack[] = {from(self), from(dims), from(keepdim), from(dtype), from(out)};
  check_aten(torch_call_dispatcher("aten::sum", "IntList_out", stack, TORCH_ABI_VERSION),
             "aten::sum.dim_IntList");
  return torch::stable::detail::to<Tensor>(stack[0]);
}

}  // namespace

Tensor aten_sum_dims(const Tensor& self, std::optional<std::vector<int64_t>> dims, bool keepdim,
                     std::optional<ScalarType> dtype) {
  static const AtenOp op("aten::sum.dim_IntList", CallKind::kSum);
  const TensorView x(self);
  const Reduction reduction(x, dims);
  const std::vector<int64_t> shape = reduction.shape(x, keepdim);
  const ScalarType out_dtype = dtype.value_or(is_integral(x.dtype) ? ScalarType::Long : x.dtype);
  const Policy policy = serving_policy();
  // Other reductions are none that a product's derivative calls: they are not counted.
  if (policy != Policy::kOff && reduction.leading() > 0) {
    const char* const reason = why_not_sum(x, reduction, out_dtype, policy);
    if (reason == nullptr) {
      const ServedCall served;
      op.count_served(x);
      // The reference on the CPU is made of ATen.
      if (!x.on_cuda()) return call_aten_sum(self, dims, keepdim, dtype, shape, out_dtype);
      Tensor out = empty_near(x, shape.data(), static_cast<int64_t>(shape.size()), out_dtype);
      column_sums_cuda(self, x.dim - reduction.leading(), out);
      return out;
    }
    count_declined(op.name, reason);
  }
  return call_aten_sum(self, dims, keepdim, dtype, shape, out_dtype);
}

}  // namespace torch_cubin
