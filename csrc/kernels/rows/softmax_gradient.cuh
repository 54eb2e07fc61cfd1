// The derivative of softmax and log-softmax: the terms of a row's sum, and with that sum the
// gradient of an element. `y`: the result's element.
#pragma once

#include "exponential.cuh"

namespace torch_cubin {

template <bool kLog>
TC_DEVICE float softmax_gradient_term(float y, float grad) {
  return kLog ? grad : grad * y;
}

template <bool kLog, bool kExact>
TC_DEVICE float softmax_gradient(float y, float grad, float total) {
  return kLog ? grad - exponential<kExact>(y) * total : y * (grad - total);
}

}  // namespace torch_cubin
