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
  p.rows = sizes.rows;
  p.x_stride = rows.stride;
  p.columns = static_cast<int>(sizes.columns);
  p.kind = static_cast<int>(kind);
  p.divisor = static_cast<float>(divisor);
  const Device& gpu = device(x.device_index);
  const RowsLayout layout(kRowsSum, gpu, sizes, x.dtype);
  p.threads = static_cast<int>(layout.threads);
  p.cluster = static_cast<int>(layout.cluster);
  launch(*layout.kernel, layout.grid(), gpu, p);
  return out;
}

}  // namespace torch_cubin
