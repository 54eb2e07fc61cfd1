// Which kernels serve an attention problem, and with what grid.
#pragma once

#include <cstdint>

#include "kernels/attention/attention_params.h"
#include "ops/attention/checks.h"
#include "ops/attention/table.h"

namespace torch_cubin {

struct AttentionPlan {
  CatalogKernel* kernel = nullptr;   // null: no fused kernel takes the problem
  CatalogKernel* combine = nullptr;  // with splits > 1
  int64_t blocks = 0;                // for one batch
  int splits = 1;
  int64_t columns_per_split = 0;
};

AttentionVariant attention_variant(const AttentionSettings& settings,
                                   const AttentionOptions& options);

// `head_dim` is that of the widest operand, padded to whole vectors; `batch` of one launch.
AttentionPlan plan_forward(const AttentionTable& table, AttentionDtype dtype,
                           AttentionVariant variant, const AttentionShape& shape, int64_t head_dim,
                           int64_t batch);

// The kernel with the narrowest head_dim that suffices, the first of those; null: none.
const AttentionTable::Row* narrowest(const std::vector<AttentionTable::Row>& rows,
                                     int64_t head_dim);

// Runs a kernel of the family, unless there are no blocks. Throws [input] where the grid is larger
// than a launch can be.
void launch_attention(CatalogKernel& kernel, const AttentionParams& params, int64_t blocks,
                      int splits, const Device& device);

}  // namespace torch_cubin
