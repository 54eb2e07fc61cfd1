// MatmulParams of a problem, for the kernels that share that parameter.
#pragma once

#include "kernels/matmul/matmul_params.h"
#include "ops/matmul/backend.h"

namespace torch_cubin {

// All fields except those that a plan decides: `partial`, the numbers of tiles, k tiles and splits.
// With `swapped` the kernel computes the transposed product, whose rows are B's columns.
MatmulParams matmul_params(const MatmulProblem& problem, const MatmulOperands& operands,
                           bool swapped = false);

}  // namespace torch_cubin
