#include "ops/matmul/symmetric.h"

#include <algorithm>

#include "cubin/error.h"
#include "ops/common/argument_checks.h"
#include "ops/common/aten.h"
#include "ops/common/stable_ops.h"
#include "ops/common/value_checks.h"
#include "ops/matmul/checks.h"
#include "ops/matmul/elementwise.h"
#include "ops/matmul/matmul.h"
#include "ops/matmul/sum.h"
#include "pytorch/settings.h"
#include "pytorch/tensor_type.h"

namespace torch_cubin {
namespace {

using OptionalDtype = std::optional<ScalarType>;

Tensor transposed(const Tensor& matrices) { return torch::stable::transpose(matrices, -2, -1); }

// Half the digits of the products of a dtype. Those that are symmetric in exact arithmetic, as
// those of matrices that commute, are rounded differently below the diagonal.
double symmetry_tolerance(ScalarType dtype) {
  constexpr double kHalfOfTF32 = 0x1p-5, kHalfOfFloat32 = 0x1p-12;
  switch (dtype) {
    case ScalarType::BFloat16:
      return 0x1p-4;
    case ScalarType::Half:
      return 0x1p-5;
    case ScalarType::Float:
      return tf32_allowed() ? kHalfOfTF32 : kHalfOfFloat32;
    default:
      return 0x1p-26;
  }
}

// The largest finite element of each matrix, without its sign; 1 if there is none but zeros.
Tensor largest_finite(const Tensor& matrices) {
  const std::optional<double> zero = 0.0;
  const Tensor finite = call_aten("aten::nan_to_num", matrices, zero, zero, zero);
  const Tensor largest = call_aten("aten::amax", call_aten("aten::abs", finite),
                                   std::vector<int64_t>{-2, -1}, /*keepdim=*/true);
  return call_aten("aten::maximum", largest, call_aten("aten::logical_not", largest));
}

// Throws unless each matrix equals its transpose, to a part of its largest finite element that
// rounding explains, with NaN and infinities of the same sign in the same places. Waits for the
// values.
void check_equals_transpose(const char* op, const char* name, const Tensor& matrices) {
  const Tensor own = detach(matrices);
  if (own.numel() == 0) return;
  const Tensor scaled = call_aten_overload("aten::div", "Tensor", own, largest_finite(own));
  if (aten_allclose(scaled, transposed(scaled), symmetry_tolerance(own.scalar_type()))) return;
  fail({"input", argument_text(op, name), "is not symmetric", "a tensor that equals its transpose",
        "other values below the diagonal than above",
        "Only the lower triangle would be used. Unset TORCH_CUBIN_CHECK to allow that."});
}

// One call of either op.
struct SymmetricCall {
  const char* op;
  bool square;  // a @ a; else x @ x.mT
  const Tensor& operand;
  const std::optional<Tensor>& c;
  double beta, alpha;
  ScalarType out_dtype;
  Shape shape;

  SymmetricCall(const char* op, bool square, const Tensor& operand, const std::optional<Tensor>& c,
                double beta, double alpha, const OptionalDtype& out_dtype)
      : op(op),
        square(square),
        operand(operand),
        c(c),
        beta(c ? beta : 0),
        alpha(alpha),
        out_dtype(out_dtype.value_or(TensorView(operand).dtype)),
        shape(check_symmetric_product(op, TensorView(operand), view_of(c), this->out_dtype)) {
    if (!checks_values()) return;
    if (square && alpha != 0) check_equals_transpose(op, "a", operand);
    if (this->beta != 0) check_equals_transpose(op, "c", expanded_c());
  }

  Tensor other(const Tensor& of) const { return square ? of : transposed(of); }
  Tensor expanded_c() const { return call_aten("aten::broadcast_to", *c, shape.vector()); }
};

Tensor on_cpu(const SymmetricCall& call) {
  const Tensor factor = wide(call.operand);
  Tensor sums;
  if (factor.size(-1) == 0 || call.alpha == 0) {  // alpha may be NaN
    sums = torch::stable::new_empty(factor, call.shape.vector());
    torch::stable::zero_(sums);
  } else {
    sums = scaled(matmul_cpu(factor, call.other(factor)), call.alpha);
  }
  if (call.beta != 0) sums = scaled_addend(sums, wide(*call.c), call.beta);
  const Tensor rounded = narrow_to(sums, call.out_dtype);
  Tensor none = torch::stable::new_empty(rounded, call.shape.vector(), ScalarType::Bool);
  torch::stable::zero_(none);
  const Tensor lower = call_aten("aten::tril", call_aten("aten::logical_not", none), int64_t{0});
  // A new tensor, with contiguous strides, as on every device.
  Tensor out = torch::stable::new_empty(rounded, call.shape.vector());
  return torch::stable::copy_(
      out, call_aten_overload("aten::where", "self", lower, rounded, transposed(rounded)));
}

Tensor on_cuda(const SymmetricCall& call) {
  const TensorView a(call.operand);
  int64_t sizes[kMaxDims], strides[kMaxDims];
  std::copy_n(a.sizes, a.dim, sizes);
  std::copy_n(a.strides, a.dim, strides);
  TensorView b = a;
  if (!call.square) {
    std::swap(sizes[a.dim - 2], sizes[a.dim - 1]);
    std::swap(strides[a.dim - 2], strides[a.dim - 1]);
    b.sizes = sizes;
    b.strides = strides;
  }
  // Without an addend beta is 0: any tensor serves, since none is read.
  return sum_cuda(call.c ? *call.c : call.operand, a, b, call.shape, call.out_dtype, call.beta,
                  call.alpha, Symmetry::kLower);
}

}  // namespace

Tensor syrk_cpu(const Tensor& x, const std::optional<Tensor>& c, double beta, double alpha,
                const OptionalDtype& out_dtype) {
  return on_cpu({"syrk", false, x, c, beta, alpha, out_dtype});
}

Tensor syrk_cuda(const Tensor& x, const std::optional<Tensor>& c, double beta, double alpha,
                 const OptionalDtype& out_dtype) {
  return on_cuda({"syrk", false, x, c, beta, alpha, out_dtype});
}

Tensor symm_square_cpu(const Tensor& a, const std::optional<Tensor>& c, double beta, double alpha,
                       const OptionalDtype& out_dtype) {
  return on_cpu({"symm_square", true, a, c, beta, alpha, out_dtype});
}

Tensor symm_square_cuda(const Tensor& a, const std::optional<Tensor>& c, double beta, double alpha,
                        const OptionalDtype& out_dtype) {
  return on_cuda({"symm_square", true, a, c, beta, alpha, out_dtype});
}

}  // namespace torch_cubin
