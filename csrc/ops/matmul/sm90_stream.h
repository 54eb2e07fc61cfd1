// How a launch on Hopper divides its tiles. The tiles that fill no whole wave may be streamed:
// several clusters have parts of a tile's K, and the one with the last part adds up the others
// (csrc/kernels/matmul/sm90_split.cuh).
#pragma once

#include <cstdint>
#include <functional>

#include "kernels/matmul/sm90_params.h"
#include "ops/matmul/cost.h"
#include "package/package_kernel.h"
#include "runtime/device.h"

namespace torch_cubin {

// Counted in tiles of a cluster.
struct Sm90Stream {
  int32_t clusters = 0;     // of the grid
  int32_t whole_tiles = 0;  // one cluster each
  int32_t tiles = 0;        // streamed, by the first so many clusters
  int32_t by_clusters = 0;

  bool has_equal_parts() const { return tiles > 0 && by_clusters % tiles == 0; }
  // Of the busiest cluster: its tiles and parts of tiles; and what these are in whole tiles.
  double turns() const;
  double whole_turns() const;
  // What streaming asks for beside the products. `rows`: of A and columns of B that a cluster
  // loads for a tile.
  void add_work(int64_t block_values, int64_t rows, int64_t k_blocks, bool equal_parts,
                Work& work) const;
  // The fields of a kernel's parameter.
  void fill(Sm90MatmulParams& params) const;
};

// No tile is streamed. `slots`: clusters that run at a time.
Sm90Stream sm90_whole(int64_t tiles, int64_t slots);

// Offers the division that streams the tiles that fill no wave of `slots`, unless its k blocks
// overflow the 31 bits that kernels count them with.
void sm90_stream_over(int64_t tiles, int64_t slots, int64_t by_clusters, int64_t k_blocks,
                      const std::function<void(const Sm90Stream&)>& offer);

// What a block of a kernel has.
struct Sm90Block {
  int64_t tile_m, tile_n, warpgroups;  // that multiply
};

// Launches the kernel with the scratch memory that its streamed tiles take.
void launch_sm90(PackageKernel& kernel, const Grid& grid, const Sm90Block& block,
                 const Device& device, Sm90MatmulParams& params);

}  // namespace torch_cubin
