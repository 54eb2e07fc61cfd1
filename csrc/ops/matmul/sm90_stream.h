// The last, partial wave of tiles on Hopper, streamed: several blocks have parts of a tile's K, and
// the one with the last part adds the others up (csrc/kernels/matmul/sm90_split.cuh).
#pragma once

#include <cstdint>
#include <functional>
#include <string>

#include "kernels/matmul/sm90_params.h"
#include "ops/common/backend.h"
#include "ops/matmul/cost.h"
#include "runtime/device.h"

namespace torch_cubin {

// How a grid of single blocks divides its tiles.
struct Sm90Stream {
  int64_t blocks;            // of the grid
  int64_t whole_tiles;       // that one block computes alone
  int64_t tiles = 0;         // streamed, by the first so many blocks
  int64_t stream_blocks = 0;

  // Of the busiest block: its tiles and parts of tiles; and its k blocks, in tiles.
  double turns() const;
  double tiles_of_one() const;
  // What streaming asks for beside the products.
  void add_work(int64_t tile_m, int64_t tile_n, double k_blocks, Work& work) const;
  // " streamed in 3", of a config's name; "" if no tile is.
  std::string name() const;
};

// Without a streamed tile.
Sm90Stream sm90_unstreamed(int64_t tiles, int64_t blocks);

// Calls offer(stream) for each division that streams the tiles that fill no wave of `blocks`.
void sm90_streams(int64_t tiles, int64_t blocks, int64_t k_blocks,
                  const std::function<void(const Sm90Stream&)>& offer);

struct Sm90TileSize {
  int64_t m, n;
};

// Launches the kernel, with the scratch memory that streamed tiles take. Fills the fields of
// `params` that say how tiles are divided.
void launch_sm90(PackageKernel& kernel, const Sm90Stream& stream, const Sm90TileSize& tile,
                 int64_t warpgroups, const Device& device, Sm90MatmulParams& params);

}  // namespace torch_cubin
