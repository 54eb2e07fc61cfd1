// Chooses the kernels of an attention: all backends are asked, and the quickest answer is kept.
#pragma once

#include "ops/attention/plan/backend.h"

namespace torch_cubin {

// Made on first use of the device. Throws [arch] if the catalog has nothing for it.
const AttentionKernels& attention_kernels(const Device& device);

// What the plan of one launch may depend on: under batch_invariant() not on the number of
// sequences, and, where a kernel for Hopper serves the call, not on their lengths.
AttentionCase planned_case(AttentionCase problem);

// Plans without kernels if no fused kernel supports the problem: then it is composed.
ForwardPlan plan_forward(const AttentionKernels& kernels, const AttentionCase& problem);
BackwardPlan plan_backward(const AttentionKernels& kernels, const AttentionCase& problem);

}  // namespace torch_cubin
