// The backend of csrc/kernels/softmax/rows.cu: selects its kernels and launches them.
#include <algorithm>
#include <memory>

#include "cubin/error.h"
#include "ops/attention/compose/softmax.h"
#include "ops/common/backend.h"
#include "ops/common/device_tables.h"
#include "ops/common/launch.h"
#include "ops/common/shape.h"
#include "runtime/device.h"

namespace torch_cubin {
namespace {

constexpr int64_t kWarpColumns = 4096;  // up to here a warp suffices for a row

constexpr const char* kSoftmaxKindNames[] = {"forward", "backward", "dropout"};

struct SoftmaxRow {
  explicit SoftmaxRow(PackageKernel& entry) : kernel(&entry) {
    const KernelFields fields(entry);
    kind = fields.index("kind", kSoftmaxKindNames);
    is_double = fields.text("math") == "float64";
    int64_t tile[3];
    fields.triple("tile", 1, tile);
    rows = tile[0];
  }
  PackageKernel* kernel;
  int kind;
  bool is_double;
  int64_t rows;  // of a block
};

class SoftmaxRowsBackend : public KernelBackend {
 public:
  SoftmaxRowsBackend() : KernelBackend("softmax") {}
  void check(PackageKernel& kernel) const override {
    check_params(kernel.entry(), "softmax", sizeof(SoftmaxParams));
    SoftmaxRow{kernel};  // throws for an invalid field
  }
};

const SoftmaxRowsBackend g_softmax_rows;

// The kernels for one device: for rows of a warp, and of a block.
struct SoftmaxTable {
  explicit SoftmaxTable(const Device& device) : family("softmax", device) {
    family.for_each_backend<KernelBackend>([&](const KernelBackend&, const auto& kernels) {
      for (PackageKernel* kernel : kernels) {
        const SoftmaxRow row(*kernel);
        rows[row.kind][row.is_double][row.rows == 1] = std::make_unique<SoftmaxRow>(row);
      }
    });
  }
  const SoftmaxRow& find(SoftmaxKind kind, bool is_double, bool long_rows) const {
    const std::unique_ptr<SoftmaxRow>& row = rows[kind][is_double][long_rows];
    if (row == nullptr) family.fail_no_kernel("this softmax");
    return *row;
  }
  FamilyKernels family;
  std::unique_ptr<SoftmaxRow> rows[kSoftmaxKinds][2][2];  // [kind][float64][long rows]
};

DeviceTables<SoftmaxTable> g_softmax_tables;

}  // namespace

void run_softmax(SoftmaxKind kind, const TensorView& scores, const SoftmaxParams& params) {
  if (params.rows == 0) return;
  if (!scores.on_cuda()) return softmax_reference(kind, scores.dtype, params);
  const Device& gpu = device(scores.device_index);
  const bool wide = params.seqlen_k > kWarpColumns;
  const SoftmaxTable& table = g_softmax_tables.get(gpu);
  const SoftmaxRow& row = table.find(kind, scores.dtype == ScalarType::Double, wide);
  launch(*row.kernel, {std::min(ceil_div(params.rows, row.rows), kMaxGrid[0])}, gpu, params);
}

}  // namespace torch_cubin
