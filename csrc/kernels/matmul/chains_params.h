// Sums of float64 in chains, for host and device code.
#pragma once

namespace torch_cubin {

// MatmulParams::flags of a float64 product: K is added up in chains of k_tiles_per_split tiles of
// K, each from zero, and the chains in their order: by one block, too.
constexpr int kFlagInChains = 2;

}  // namespace torch_cubin
