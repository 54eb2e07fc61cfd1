#include "ops/matmul/sm90_stream.h"

#include <algorithm>

#include "ops/common/launch.h"

namespace torch_cubin {
namespace {

// How often a finisher checks for the other parts, about 100 ns each (with all blocks running,
// parts complete within some microseconds).
constexpr int32_t kPolls = 10000;

}  // namespace

double Sm90Stream::turns() const {
  return static_cast<double>((whole_tiles + clusters - 1) / clusters + (tiles > 0 ? 1 : 0));
}

double Sm90Stream::whole_turns() const {
  if (tiles == 0) return turns();
  return turns() - 1 + static_cast<double>(tiles) / by_clusters;
}

void Sm90Stream::add_work(int64_t block_values, int64_t rows, int64_t k_blocks, bool equal_parts,
                          Work& work) const {
  const double parts = static_cast<double>(by_clusters) / tiles;
  work.sums_bytes = static_cast<double>(block_values) * sizeof(float) * parts;
  work.handshakes = 2;  // with the kernel that sets the counters to zero
  if (equal_parts) return;
  // What clusters load that stand at different places of K stays in no cache.
  work.bytes_again += static_cast<double>(tiles) * static_cast<double>(rows * k_blocks * 128);
}

void Sm90Stream::fill(Sm90MatmulParams& params) const {
  params.whole_tiles = whole_tiles;
  params.stream_tiles = tiles;
  params.stream_clusters = by_clusters;
  params.polls = kPolls;
}

Sm90Stream sm90_whole(int64_t tiles, int64_t slots) {
  return {static_cast<int32_t>(std::min(slots, tiles)), static_cast<int32_t>(tiles), 0, 0};
}

void sm90_stream_over(int64_t tiles, int64_t slots, int64_t by_clusters, int64_t k_blocks,
                      const std::function<void(const Sm90Stream&)>& offer) {
  const int64_t rest = tiles % slots;
  if (by_clusters * rest * k_blocks >= (int64_t{1} << 31)) return;
  const int64_t clusters = tiles < slots ? by_clusters : slots;
  offer({static_cast<int32_t>(clusters), static_cast<int32_t>(tiles - rest),
         static_cast<int32_t>(rest), static_cast<int32_t>(by_clusters)});
}

void launch_sm90(PackageKernel& kernel, const Grid& grid, const Sm90Block& block,
                 const Device& device, Sm90MatmulParams& params) {
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
  const Workspace counters(device, counted * int64_t{sizeof(int)}, true);
  params.partial = reinterpret_cast<float*>(partial.data());
  params.row_partial = reinterpret_cast<float*>(rows.data());
  params.counters = reinterpret_cast<int*>(counters.data());
  launch(kernel, grid, device, params);
}

}  // namespace torch_cubin
