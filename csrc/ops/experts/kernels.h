// The kernels of csrc/kernels/experts.
#pragma once

#include "ops/common/launch.h"
#include "pytorch/tensor_type.h"

namespace torch_cubin {

enum ExpertKernel {
  kOrderExperts,  // of any dtype
  kSumExperts,
  kGateExperts,
  kGateExpertsBackward,
  kExpertKernels
};

// Throws [no_kernel] or [arch] where the device has no such kernel.
PackageKernel& expert_kernel(ExpertKernel kind, ScalarType dtype, const Device& device);

constexpr int64_t kExpertVector = 8;  // elements of 16 bytes

// ExpertWeights of the weights' dtype.
int type_of_weights(ScalarType dtype);

}  // namespace torch_cubin
