// Grids of small kernels that copy operands, spread over all multiprocessors.
#pragma once

#include <algorithm>
#include <cstdint>

#include "ops/common/backend.h"
#include "package/package_kernel.h"
#include "runtime/device.h"

namespace torch_cubin {

// Blocks that may start while the kernel before is finishing are placed where that one has no
// block, as many as fit: beside a product with 128 blocks, all of a copy's on the four
// multiprocessors that are left, where they stay (H200, 1024 x 1024 x 104 of TF32 x.t() @ x: 7.9
// us, spread 5.0). So each is given as much shared memory as lets a multiprocessor have no more of
// them than its share, and the others wait for those that become free.
class SpreadBlocks {
 public:
  SpreadBlocks() = default;
  explicit SpreadBlocks(const KernelFields& fields)
      : own_(fields.integer("static_shared", 0, kMostShared)),
        most_(fields.integer("blocks_per_multiprocessor", 1, 64)) {}

  Grid grid(int64_t blocks, const Device& device) const {
    Grid out{blocks};
    const int64_t share = (blocks + device.multiprocessors - 1) / device.multiprocessors;
    if (device.sm < 90 || share >= most_) return out;  // older ones start no block early
    // More than 1 / (share + 1) of a multiprocessor's memory, in units of 128 bytes.
    const int64_t all = device.shared_optin + kReserved;
    const int64_t bytes = all / (share + 1) / kUnit * kUnit + kUnit;
    out.dynamic_shared = std::max<int64_t>(bytes - kReserved - own_, 0);
    return out;
  }

 private:
  static constexpr int64_t kMostShared = 48 << 10, kReserved = 1 << 10, kUnit = 128;

  int64_t own_ = 0, most_ = 1;
};

}  // namespace torch_cubin
