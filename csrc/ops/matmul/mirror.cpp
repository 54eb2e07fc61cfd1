#include "ops/matmul/mirror.h"

#include <algorithm>

#include "cubin/error.h"
#include "kernels/matmul/mirror_params.h"
#include "ops/common/device_tables.h"
#include "ops/common/launch.h"
#include "ops/matmul/backend.h"

namespace torch_cubin {
namespace {

constexpr int64_t kMirrorTile = 64;

class MirrorBackend : public KernelBackend {
 public:
  MirrorBackend() : KernelBackend("mirror", {"mirror"}) {}

  void check(PackageKernel& kernel) const override {
    check_params(kernel.entry(), "matmul/mirror", sizeof(MirrorParams));
    const KernelFields fields(kernel);
    int64_t tile[3];
    fields.triple("tile", 1, tile);
    if (tile[0] != kMirrorTile || tile[1] != kMirrorTile) {
      fields.refuse("tile", "64 rows and columns");
    }
    fields.integer("alignment", 1);
    CopyCost{fields};  // throws for a figure that is wrong
  }
};

const MirrorBackend g_mirror;

// The kernels of a device, by the bytes of an element.
struct MirrorTable {
  explicit MirrorTable(const Device& device) : family("mirror", device) {
    family.for_each_backend<KernelBackend>([&](const KernelBackend&, const auto& kernels) {
      for (PackageKernel* kernel : kernels) {
        by_bytes.emplace_back(KernelFields(*kernel).integer("alignment", 1), kernel);
      }
    });
  }

  PackageKernel& of(int64_t bytes) const {
    for (const auto& [own, kernel] : by_bytes) {
      if (own == bytes) return *kernel;
    }
    family.fail_no_kernel("the mirror image of a triangle");
  }

  FamilyKernels family;
  std::vector<std::pair<int64_t, PackageKernel*>> by_bytes;
};

const MirrorTable& mirror_table(const Device& device) {
  static DeviceTables<MirrorTable> tables;
  return tables.get(device);
}

}  // namespace

Work mirror_work(int64_t n, int64_t batch, int64_t element_bytes, const Device& device) {
  const KernelFields fields(mirror_table(device).of(element_bytes));
  // One triangle is read, one is written.
  return CopyCost(fields).work(static_cast<double>(batch * n * n * element_bytes));
}

void mirror_lower(char* data, int64_t n, int64_t batch, int64_t element_bytes,
                  const Device& device) {
  PackageKernel& kernel = mirror_table(device).of(element_bytes);
  const int64_t tiles = ceil_div(n, kMirrorTile);
  // The blocks of a launch are counted in 31 bits.
  const int64_t at_once = std::max<int64_t>(INT32_MAX / (tiles * tiles), 1);
  for (int64_t first = 0; first < batch; first += at_once) {
    const MirrorParams params = {data + first * n * n * element_bytes, static_cast<int>(n),
                                 static_cast<int>(tiles)};
    launch(kernel, {std::min(at_once, batch - first) * tiles * tiles}, device, params);
  }
}

}  // namespace torch_cubin
