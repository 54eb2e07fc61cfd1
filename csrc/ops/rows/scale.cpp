// Scales a tensor in place by a number on its device, by csrc/kernels/rows/scale.cu.
#include <algorithm>

#include "cubin/error.h"
#include "kernels/rows/scale_params.h"
#include "ops/common/argument_checks.h"
#include "ops/common/aten.h"
#include "ops/rows/kernels.h"
#include "pytorch/autograd_state.h"
#include "pytorch/contiguous.h"
#include "runtime/device.h"

namespace torch_cubin {
namespace {

constexpr const char* kScaleOp = "_scale_into";
// Blocks of a launch, enough to fill any device.
constexpr int64_t kMostBlocks = 2048;

void check_scale(const TensorView& out, const TensorView& factor) {
  check_device(kScaleOp, "factor", factor, "out", out);
  if (!is_contiguous(out.sizes, out.strides, out.dim) || factor.dim != 0) {
    fail({"input", argument_text(kScaleOp, "out"), "cannot be scaled",
          "a contiguous tensor, and a factor without dimensions",
          out.shape_text() + " and " + factor.shape_text(), ""});
  }
}

}  // namespace

void scale_into_cpu(const Tensor& out, const Tensor& factor) {
  check_scale(TensorView(out), TensorView(factor));
  call_aten_overload("aten::mul_", "Tensor", detach(out), detach(factor));
  bump_version(out.get());
}

void scale_into_cuda(const Tensor& out, const Tensor& factor) {
  const TensorView x(out), by(factor);
  check_scale(x, by);
  ScaleParams p{};
  p.x = const_cast<void*>(x.data());
  p.factor = by.data();
  p.count = out.numel();
  p.x_dtype = row_dtype(kScaleOp, x.dtype);
  p.factor_dtype = row_dtype(kScaleOp, by.dtype);
  if (p.count == 0) return;
  p.vectors = p.count % kRowVector == 0 && reinterpret_cast<uintptr_t>(p.x) % 16 == 0;
  const Device& gpu = device(x.device_index);
  PackageKernel& kernel = rows_kernel(kScale, x.dtype, gpu);
  const int64_t of_block = kernel.entry().block[0] * (p.vectors ? kRowVector : 1);
  launch(kernel, {std::min(ceil_div(p.count, of_block), kMostBlocks)}, gpu, p);
  bump_version(out.get());
}

}  // namespace torch_cubin
