// A tensor's elements for references that compute in float64.
#pragma once

#include "ops/common/aten.h"
#include "ops/common/stable_ops.h"
#include "pytorch/tensor.h"

namespace torch_cubin {

// The elements of a tensor in float64, in order; those of a float64 tensor may be its own.
class Values {
 public:
  explicit Values(const Tensor& tensor)
      : tensor_(torch::stable::contiguous(torch::stable::to(detach(tensor), ScalarType::Double))) {}
  Values(const TensorView& like, const int64_t* sizes, int64_t dim)
      : tensor_(torch::stable::fill_(empty_near(like, sizes, dim, ScalarType::Double), 0)) {}

  double* row(int64_t number, int64_t columns) { return data() + number * columns; }
  double* data() { return static_cast<double*>(tensor_.mutable_data_ptr()); }
  Tensor rounded(ScalarType dtype) const { return torch::stable::to(tensor_, dtype); }

 private:
  Tensor tensor_;
};

}  // namespace torch_cubin
