// What a product will cost with the portable kernels: a cost model over the manifest's figures.
#pragma once

#include <cstdint>
#include <limits>

#include "ops/matmul/portable_table.h"

namespace torch_cubin {

struct PortablePlan {
  PackageKernel* kernel = nullptr;  // null: none takes the problem
  bool reduces = false;             // a second kernel adds the splits' partial sums
  bool swapped = false;             // a dot-product kernel computes C^T = B^T A^T
  int32_t splits = 1;
  int64_t tiles_m = 0, tiles_n = 0;
  int64_t blocks = 0;  // grid x; fewer than tiles where blocks of the kernel compute several
  int64_t k_tiles_per_split = 0;
};

struct PortableConfig {
  PortablePlan plan;
  double cycles = std::numeric_limits<double>::infinity();
};

// The quickest config of each kernel that takes the problem.
std::vector<PortableConfig> portable_configs(const PortableTable& table, const MatmulCase& problem);

// The quickest of portable_configs().
PortableConfig plan_portable(const PortableTable& table, const MatmulCase& problem);

}  // namespace torch_cubin
