#include "ops/matmul/sm90_stream.h"

#include <algorithm>

#include "ops/common/launch.h"

namespace torch_cubin {

void launch_sm90(PackageKernel& kernel, const Grid& grid, const Sm90Block& block,
                 const Device& device, Sm90MatmulParams& params) {
  params.polls = kStreamPolls;
  if (params.stream_tiles == 0) {
    launch(kernel, grid, device, params);
    return;
  }
  const int64_t blocks = grid.x;
  const int64_t tile_bytes = block.tile_m * block.tile_n * int64_t{sizeof(float)};
  const int64_t row_bytes = params.row_sums == nullptr ? 0 : block.tile_m * int64_t{sizeof(float)};
  const int64_t counted =
      block.warpgroups * params.stream_tiles * std::max<int64_t>(grid.cluster_x, 1);
  const Workspace partial(device, 2 * blocks * tile_bytes);
  const Workspace rows(device, 2 * blocks * row_bytes);
  const ZeroCounters counters(device, counted);
  params.partial = reinterpret_cast<float*>(partial.data());
  params.row_partial = reinterpret_cast<float*>(rows.data());
  params.counters = counters.data();
  launch(kernel, grid, device, params);
}

}  // namespace torch_cubin
