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

// Elements of 16 bytes, which a thread reads at a time.
inline int64_t expert_vector(ScalarType dtype) { return 16 / element_size(dtype); }

// ExpertWeights of the weights' dtype.
int type_of_weights(ScalarType dtype);

}  // namespace torch_cubin
