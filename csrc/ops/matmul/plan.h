// Choosing a kernel for a product: a cost model over the catalog's entries.
#pragma once

#include <cstdint>

#include "ops/matmul/problem.h"
#include "ops/matmul/table.h"

namespace torch_cubin {

struct MatmulPlan {
  CatalogKernel* kernel = nullptr;
  CatalogKernel* reduce = nullptr;  // null: the kernel writes C itself
  int64_t tiles_m = 0, tiles_n = 0;
  int64_t blocks = 0;  // grid x; fewer than tiles where blocks of the kernel compute several
  int64_t k_tiles_per_split = 0;
  int splits = 1;
  bool swapped = false;  // a dot-product kernel computes C^T = B^T A^T
};

// How the kernels can read each operand of a product.
struct MatmulAccess {
  Access a, b;
};
MatmulAccess matmul_access(const MatmulProblem& problem, int64_t element_bytes, const void* a,
                           const void* b);

// Deterministic: depends on its arguments only. Remembers recent answers by thread.
MatmulPlan choose_matmul(const MatmulTable& table, Math math, MatmulAccess access,
                         const MatmulProblem& problem);

}  // namespace torch_cubin
