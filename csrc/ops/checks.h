// What matmul and linear require of their arguments, checked alike on every device.
//
// Each function throws [input] with what was expected and what came; they return the output's
// shape, which is the only thing both devices compute alike.
#pragma once

#include <cstdint>

#include "runtime/tensor.h"

namespace torch_cubin {

constexpr int64_t kMaxDims = 64;  // PyTorch's own limit

struct Shape {
  int64_t dim = 0;
  int64_t sizes[kMaxDims];
  int64_t numel() const {
    int64_t product = 1;
    for (int64_t i = 0; i < dim; ++i) product *= sizes[i];
    return product;
  }
};

// Shape of torch.matmul(self, other).
Shape check_matmul(const TensorView& self, const TensorView& other);

// Shape of F.linear(input, weight, bias); `bias` may be null.
Shape check_linear(const TensorView& input, const TensorView& weight, const TensorView* bias);

}  // namespace torch_cubin
