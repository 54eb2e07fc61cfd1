// The parameter of combine.cu: the family's, and the assignment of warps to rows.
#pragma once

#include "../attention_params.h"

namespace torch_cubin {

constexpr int kMostCombinedParts = 128;  // of a row
constexpr int kPartsTogether = 8;        // that a warp loads at a time
constexpr int kCombinedColumns = 128;    // of a block

struct CombineParams : AttentionParams {
  int warps_per_row;  // 1, 2, 4 or 8; warp w adds the parts w, w + warps_per_row, ...
};

}  // namespace torch_cubin
