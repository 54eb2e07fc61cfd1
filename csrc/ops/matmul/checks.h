// What matmul and linear require of their arguments, checked alike on every device.
//
// Each function throws [input] with what was expected and what came; they return the output's
// shape, which is the only thing both devices compute alike.
#pragma once

#include <nlohmann/json_fwd.hpp>

#include "ops/common/shape.h"
#include "pytorch/tensor.h"

namespace torch_cubin {

// Shape of torch.matmul(self, other).
Shape check_matmul(const TensorView& self, const TensorView& other);

// Shape of F.linear(input, weight, bias); `bias` may be null.
Shape check_linear(const TensorView& input, const TensorView& weight, const TensorView* bias);

// The same for a call whose tensors are described: {"op": ..., "tensors": {name: ...}}.
void check_described_product(const nlohmann::json& call);

}  // namespace torch_cubin
