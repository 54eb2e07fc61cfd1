#include "ops/matmul/sm90_stream.h"

#include <algorithm>

#include "ops/common/launch.h"

namespace torch_cubin {
namespace {

constexpr int64_t kLeastPartBlocks = 4;  // k blocks of a part
constexpr int64_t kMostEqualParts = 8;    // of a tile, where they are equal
constexpr int32_t kPollsOfJoin = 10000;  // about a millisecond

}  // namespace

double Sm90Stream::turns() const {
  const int64_t whole = (whole_tiles + blocks - 1) / blocks;
  return static_cast<double>(whole + (tiles > 0 ? 1 : 0));
}

double Sm90Stream::tiles_of_one() const {
  if (tiles == 0) return turns();
  return turns() - 1 + static_cast<double>(tiles) / static_cast<double>(stream_blocks);
}

void Sm90Stream::add_work(int64_t tile_m, int64_t tile_n, double k_blocks, Work& work) const {
  if (tiles == 0) return;
  work.sums_bytes = static_cast<double>(tile_m * tile_n) * sizeof(float) *
                    static_cast<double>(stream_blocks) / static_cast<double>(tiles);
  work.handshakes = 2;  // with the kernel that sets the counters to zero
  if (stream_blocks % tiles == 0) return;
  // What blocks load that stand at different places of K stays in no cache.
  work.bytes_again +=
      static_cast<double>(tiles) * static_cast<double>(tile_m + tile_n) * k_blocks * 128;
}

std::string Sm90Stream::name() const {
  if (tiles == 0) return "";
  if (stream_blocks % tiles != 0) return " streamed";
  return " streamed in " + std::to_string(stream_blocks / tiles);
}

Sm90Stream sm90_unstreamed(int64_t tiles, int64_t blocks) {
  return {std::min(tiles, blocks), tiles};
}

void sm90_streams(int64_t tiles, int64_t blocks, int64_t k_blocks,
                  const std::function<void(const Sm90Stream&)>& offer) {
  const int64_t rest = tiles % blocks;
  if (rest == 0) return;
  const auto over = [&](int64_t stream_blocks) {
    // Counted in 31 bits on the device.
    if (stream_blocks * rest * k_blocks >= (int64_t{1} << 31)) return;
    offer({tiles > blocks ? blocks : stream_blocks, tiles - rest, rest, stream_blocks});
  };
  for (int64_t parts = 2; parts <= kMostEqualParts; ++parts) {
    if (rest * parts > blocks || k_blocks < parts * kLeastPartBlocks) break;
    over(rest * parts);
  }
  if (blocks % rest != 0 && rest * k_blocks >= blocks * kLeastPartBlocks) over(blocks);
}

void launch_sm90(PackageKernel& kernel, const Sm90Stream& stream, const Sm90TileSize& tile,
                 int64_t warpgroups, const Device& device, Sm90MatmulParams& params) {
  params.whole_tiles = static_cast<int>(stream.whole_tiles);
  params.stream_tiles = static_cast<int>(stream.tiles);
  params.stream_clusters = static_cast<int>(stream.stream_blocks);
  params.polls = kPollsOfJoin;
  if (stream.tiles == 0) {
    launch(kernel, {stream.blocks}, device, params);
    return;
  }
  const int64_t tile_bytes = tile.m * tile.n * int64_t{sizeof(float)};
  const Workspace partial(device, 2 * stream.stream_blocks * tile_bytes);
  const Workspace counters(device, warpgroups * stream.tiles * int64_t{sizeof(int)}, true);
  params.partial = reinterpret_cast<float*>(partial.data());
  params.counters = reinterpret_cast<int*>(counters.data());
  launch(kernel, {stream.blocks}, device, params);
}

}  // namespace torch_cubin
