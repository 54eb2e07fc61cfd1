// Tensors as the kernels of csrc/kernels/rows read them.
#include "ops/common/aten.h"
#include "ops/common/stable_ops.h"
#include "ops/rows/kernels.h"

namespace torch_cubin {
namespace {

constexpr int64_t kAlignment = 16;  // bytes

// The stride of rows of the last `dims` dims; false if they have none, or are not contiguous.
bool find_stride(const TensorView& x, int64_t dims, int64_t* stride) {
  int64_t next = 1;
  for (int64_t i = x.dim - 1; i >= x.dim - dims; --i) {
    if (x.sizes[i] == 1) continue;
    if (x.strides[i] != next) return false;
    next *= x.sizes[i];
  }
  *stride = next;
  bool found = false;
  for (int64_t i = x.dim - dims - 1; i >= 0; --i) {
    if (x.sizes[i] == 1) continue;
    if (found && x.strides[i] != next) return false;
    if (!found) *stride = x.strides[i];
    found = true;
    next = x.strides[i] * x.sizes[i];
  }
  return true;
}

// Whether kernels read the tensor as it is; then also its rows' stride.
bool find_rows(const TensorView& x, int64_t dims, const RowSizes& sizes, int64_t* stride) {
  if (!find_stride(x, dims, stride)) return false;
  const bool aligned = reinterpret_cast<uintptr_t>(x.data()) % kAlignment == 0 &&
                       (sizes.rows == 1 || *stride * element_size(x.dtype) % kAlignment == 0);
  return aligned || !has_vectors(sizes);
}

}  // namespace

bool RowsOperand::is_readable(const TensorView& x, int64_t dims, const RowSizes& sizes) {
  int64_t stride = 0;
  return find_rows(x, dims, sizes, &stride);
}

RowsOperand::RowsOperand(const Tensor& tensor, int64_t dims, const RowSizes& sizes) {
  TensorView x(tensor);
  if (!find_rows(x, dims, sizes, &stride)) {
    copy_ = empty_cuda(x.sizes, x.dim, x.dtype, x.device_index);
    torch::stable::copy_(*copy_, detach(tensor));
    x = TensorView(*copy_);
    find_rows(x, dims, sizes, &stride);
  }
  data = x.data();
}

}  // namespace torch_cubin
