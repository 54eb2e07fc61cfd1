// Sums over rows on CUDA, by csrc/kernels/rows/sum.cu.
#include "kernels/rows/sum_params.h"
#include "ops/rows/kernels.h"
#include "runtime/device.h"

namespace torch_cubin {

Tensor row_sums_cuda(const Tensor& input, int64_t kind, double divisor, ScalarType dtype) {
  constexpr const char* kOp = "_row_sums";
  const TensorView x(input);
  const RowSizes sizes = check_row_sums(x, kind);
  RowSumParams p{};
  p.x_dtype = row_dtype(kOp, x.dtype);
  p.out_dtype = row_dtype(kOp, dtype);
  check_length(kOp, sizes);
  const Tensor out = empty_cuda(x.sizes, x.dim - 1, dtype, x.device_index);
  if (sizes.rows == 0) return out;
  const RowsOperand rows(input, 1, sizes);
  p.x = rows.data;
  p.out = out.mutable_data_ptr();
  p.x_stride = rows.stride;
  p.kind = static_cast<int>(kind);
  p.divisor = static_cast<float>(divisor);
  launch_rows(kRowsSum, p, device(x.device_index), sizes, x.dtype);
  return out;
}

}  // namespace torch_cubin
