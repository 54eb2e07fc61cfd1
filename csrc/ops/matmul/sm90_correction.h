// What the model of sm90_cost.cpp does not explain, by GPU: how much longer than predicted a config
// of a tile, of a cluster and of a split of K takes on average.
#pragma once

#include <string>

#include "ops/matmul/sm90_cost.h"

namespace torch_cubin {

// The factor for a config's predicted time; 1 on a GPU that has no table, or for a tile that is not
// in it. A table holds for 16-bit products of more than 64 rows and columns.
class Sm90Correction {
 public:
  explicit Sm90Correction(const std::string& gpu);
  double factor(const Sm90Plan& plan) const;

 private:
  const struct Sm90CorrectionTable* table_;  // null: none
};

}  // namespace torch_cubin
