// Choosing a kernel for a product: all seams are asked alike, and the quickest answer is kept.
#pragma once

#include "ops/matmul/seam.h"

namespace torch_cubin {

// Deterministic: depends on its arguments only. Remembers recent answers by thread; the reference
// is good until this thread's next call. Throws [no_kernel], or the error of an entry that was
// refused, where nobody takes the problem, unless that is for its size (too_large).
const MatmulPlan& plan_matmul(const Device& device, const MatmulCase& problem);

}  // namespace torch_cubin
