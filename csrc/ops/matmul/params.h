// MatmulParams of a problem: what the kernels that share that parameter are told of its operands.
#pragma once

#include "kernels/matmul/matmul_params.h"
#include "ops/matmul/backend.h"

namespace torch_cubin {

// All but what a plan decides: `partial`, the numbers of tiles, k tiles and splits. With `swapped`
// the kernel computes the transposed product, whose rows are B's columns.
MatmulParams matmul_params(const MatmulProblem& problem, const MatmulOperands& operands,
                           bool swapped = false);

}  // namespace torch_cubin
