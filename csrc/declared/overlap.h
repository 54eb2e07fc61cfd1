// Whether two tensors have memory in common.
#pragma once

#include "declared/expression.h"

namespace torch_cubin {

// Exact for slices of one tensor, in whatever dims, and for tensors without gaps. Where strides are
// so unlike each other that an answer would take long, it is true. Strides are not negative, and
// addresses of tensors without elements null.
bool share_memory(const void* first, const TensorFacts& first_facts, const void* second,
                  const TensorFacts& second_facts);

}  // namespace torch_cubin
