// The manifest's entries as rows of a table, from which a backend chooses.
#pragma once

#include <cstdint>
#include <vector>

#include "ops/attention/plan/backend.h"
#include "ops/common/launch.h"

namespace torch_cubin {

enum AttentionDtype { kAttendFloat16, kAttendBFloat16, kAttendFloat32, kAttendDtypes };

// kAttendDtypes if no fused kernel supports the dtype.
AttentionDtype attention_dtype(ScalarType dtype);

struct AttentionRow {
  // Throws [file] for an entry with a field that these kernels do not have.
  AttentionRow(PackageKernel& kernel, const Device& device);

  PackageKernel* kernel;
  AttentionDtype dtype;
  int variant;                      // kAttentionVariants for a kind without variants
  int64_t rows, columns, head_dim;  // of a tile; head_dim: the largest supported
  int64_t slots;                    // blocks that run on the device at a time
  int64_t dynamic_shared;           // bytes of a block
  int64_t saturating;               // decode: blocks of a multiprocessor that keep the memory busy
  double cost_tile, cost_fixed;     // cycles of a block: for a tile of columns, and for the rest
};

using AttentionRows = std::vector<AttentionRow>;

// The first kernel with the narrowest sufficient head_dim; null if there is none.
const AttentionRow* narrowest(const AttentionRows& rows, int64_t head_dim);

// False for no blocks: cu_seqlens of no sequence. Throws [input] for more than a launch can have;
// `unit` names the counted things.
bool check_blocks(int64_t blocks, int64_t most = kMaxGrid[0], const char* unit = "blocks");

}  // namespace torch_cubin
