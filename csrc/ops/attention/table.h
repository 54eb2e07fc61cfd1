// The catalog's attention kernels for one device, sorted for choosing.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "package/catalog.h"
#include "pytorch/tensor.h"
#include "runtime/device.h"

namespace torch_cubin {

enum AttentionDtype { kAttendFloat16, kAttendBFloat16, kAttendFloat32, kAttendDtypes };

// kFull knows lengths and the band alone; kGeneral everything in AttentionParams.
enum AttentionVariant { kFull, kGeneral, kAttentionVariants };

struct AttentionTable {
  struct Row {
    CatalogKernel* kernel;
    int64_t rows, columns, head_dim;  // of a tile; head_dim: the largest that it takes
    int64_t slots;                    // blocks that the device runs at a time
    double cost_tile, cost_fixed;     // cycles of a block: a tile of columns, the rest
  };
  std::string arch;
  std::vector<Row> forward[kAttendDtypes][kAttentionVariants];            // kind "mma"
  std::vector<Row> decode[kAttendDtypes][kAttentionVariants];             // kind "decode"
  std::vector<Row> backward[kAttendDtypes][kAttentionVariants];           // kind "backward"
  std::vector<Row> gradient_k[kAttendDtypes], gradient_q[kAttendDtypes];  // kinds of these names
  std::vector<Row> combine[kAttendDtypes], delta[kAttendDtypes], convert[kAttendDtypes];
  int64_t multiprocessors = 0;
};

// kAttendDtypes where no fused kernel takes the dtype.
AttentionDtype attention_dtype(ScalarType dtype);

// As matmul_table().
const AttentionTable& attention_table(const Device& device);

}  // namespace torch_cubin
