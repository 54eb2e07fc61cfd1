// The configs that the portable kernels have for a product (row, split of K), and what each asks of
// the device, by the manifest's figures.
#pragma once

#include <cstdint>
#include <functional>

#include "ops/matmul/portable_table.h"

namespace torch_cubin {

constexpr int kMostInCluster = 2;  // splits; larger clusters do not fill the device (H200)

struct PortablePlan {
  PackageKernel* kernel = nullptr;  // null: none takes the problem
  bool reduces = false;             // a second kernel adds the splits' partial sums
  bool clusters = false;            // a cluster of a block a split does
  bool in_order = false;            // these are added one after the other, however many
  bool swapped = false;             // a dot-product kernel computes C^T = B^T A^T
  int32_t splits = 1;
  int64_t tiles_m = 0, tiles_n = 0;
  int64_t blocks = 0;  // grid x; fewer than tiles where blocks of the kernel compute several
  int64_t k_tiles_per_split = 0;
  int64_t dynamic_shared = -1;  // bytes a block; -1: the kernel's own
};

// Calls offer(plan, work) for each row that takes the problem, with the split of K whose price is
// least.
void portable_configs(const PortableTable& table, const MatmulCase& problem,
                      const std::function<double(const Work&)>& price,
                      const std::function<void(const PortablePlan&, const Work&)>& offer);

}  // namespace torch_cubin
