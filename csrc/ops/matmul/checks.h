// What matmul and linear require of their arguments, checked alike on every device.
//
// Each function throws [input] with what was expected and what came; they return the output's
// shape, which is the only thing both devices compute alike.
#pragma once

#include <cstdint>

#include "pytorch/tensor.h"

namespace torch_cubin {

inline int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

struct Shape {
  int64_t dim = 0;
  int64_t sizes[kMaxDims];

  // Throws [input] past 2^63 - 1.
  int64_t numel() const;
};

// Shape of torch.matmul(self, other).
Shape check_matmul(const TensorView& self, const TensorView& other);

// Shape of F.linear(input, weight, bias); `bias` may be null.
Shape check_linear(const TensorView& input, const TensorView& weight, const TensorView* bias);

}  // namespace torch_cubin
