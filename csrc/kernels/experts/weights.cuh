// Reads the weights of tokens' experts, of any dtype of weights.h.
#pragma once

#include "common/dtype.cuh"
#include "weights.h"

namespace torch_cubin {

TC_DEVICE float read_weight(const void* weights, int type, tc_int64 at) {
  if (type == kWeightsOne) return 1.0f;
  if (type == kWeightsFloat32) return static_cast<const float*>(weights)[at];
  const u16 bits = static_cast<const u16*>(weights)[at];
  return type == kWeightsFloat16 ? f16_to_float(bits) : bf16_to_float(bits);
}

}  // namespace torch_cubin
