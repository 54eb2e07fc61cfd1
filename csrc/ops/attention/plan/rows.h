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
  unsigned takes;                   // AttentionFeatures
  int64_t rows, columns, head_dim;  // of a tile; head_dim: the largest supported
  int64_t slots;                    // blocks that run on the device at a time
  int64_t stages;                   // of the ring of keys and values
  int64_t dynamic_shared;           // bytes of a block
  int64_t saturating;               // decode: blocks of a multiprocessor that keep the memory busy
  double cost_tile, cost_fixed;     // cycles of a block: for a tile of columns, and for the rest
};

using AttentionRows = std::vector<AttentionRow>;

// The rows of kernels that compete, in the order of the manifest.
class AttentionTable {
 public:
  void add(const AttentionRow& row) { rows_.push_back(row); }
  bool empty() const { return rows_.empty(); }

  // visit(row) for those of the dtype that take all of `needs`, of the narrowest head_dim that
  // suffices.
  template <class Visit>
  void for_each(AttentionDtype dtype, unsigned needs, int64_t head_dim, Visit&& visit) const {
    const AttentionRow* narrowest = first(dtype, needs, head_dim);
    for (const AttentionRow& row : rows_) {
      if (narrowest != nullptr && row.head_dim == narrowest->head_dim && fits(row, dtype, needs)) {
        visit(row);
      }
    }
  }

  // The first of these; null: none.
  const AttentionRow* first(AttentionDtype dtype, unsigned needs, int64_t head_dim) const;

 private:
  static bool fits(const AttentionRow& row, AttentionDtype dtype, unsigned needs) {
    return row.dtype == dtype && (needs & ~row.takes) == 0;
  }

  AttentionRows rows_;
};

// The AttentionFeatures of an entry; none where it has no such field. Throws [file] for unknown
// ones.
unsigned takes_of(const PackageKernel& kernel);

// For check(): an entry that must take something.
void check_takes(const PackageKernel& kernel);

// False for no blocks: cu_seqlens of no sequence. Throws [input] for more than a launch can have;
// `unit` names the counted things.
bool check_blocks(int64_t blocks, int64_t most = kMaxGrid[0], const char* unit = "blocks");

}  // namespace torch_cubin
