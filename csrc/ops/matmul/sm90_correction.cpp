#include "ops/matmul/sm90_correction.h"

#include <iterator>

namespace torch_cubin {

// Natural logarithms of factors.
struct Sm90CorrectionTable {
  const char* gpu;
  double clusters[std::size(kSm90Clusters)];
  double whole, streamed, streamed_evenly;
  struct Tile {
    int m, n;
    double k_major, weight_gradient;  // of the last: neither operand is contiguous along K (TN)
  } tiles[16];
};

namespace {

constexpr Sm90CorrectionTable kSm90Corrections[] = {
#include "ops/matmul/sm90_correction_table.h"
};

}  // namespace

Sm90Correction::Sm90Correction(const std::string& gpu) : table_(nullptr) {
  for (const Sm90CorrectionTable& table : kSm90Corrections) {
    if (gpu == table.gpu) table_ = &table;
  }
}

double Sm90Correction::factor(const Sm90Plan& plan) const {
  if (table_ == nullptr) return 1;
  const Sm90Row& row = *plan.row;
  double sum = plan.stream_tiles == 0  ? table_->whole
               : plan.streams_evenly() ? table_->streamed_evenly
                                       : table_->streamed;
  for (size_t i = 0; i < std::size(kSm90Clusters); ++i) {
    if (plan.cluster.name == kSm90Clusters[i].name) sum += table_->clusters[i];
  }
  for (const Sm90CorrectionTable::Tile& tile : table_->tiles) {
    if (tile.m != row.tile_m || tile.n != row.tile_n) continue;
    sum += row.a_mn_major && row.b_mn_major ? tile.weight_gradient : tile.k_major;
  }
  // exp(sum) of a small number; std::exp would need a newer glibc than 2.28.
  return 1 + sum + sum * sum / 2;
}

}  // namespace torch_cubin
