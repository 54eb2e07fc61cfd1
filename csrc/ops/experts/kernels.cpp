#include "ops/experts/kernels.h"

#include <algorithm>
#include <iterator>

#include "kernels/experts/gate_params.h"
#include "kernels/experts/order_params.h"
#include "kernels/experts/sum_params.h"
#include "ops/common/backend.h"
#include "ops/common/device_tables.h"

namespace torch_cubin {
namespace {

struct ExpertKind {
  const char* name;
  const char* header;
  size_t bytes;           // of the parameter
  int64_t rows, vectors;  // of the tile that the host counts on; no vectors: one column
};

constexpr ExpertKind kKinds[kExpertKernels] = {
    {"order", "experts/order", sizeof(ExpertOrderParams), kOrderChunk, 0},
    {"sum", "experts/sum", sizeof(ExpertSumParams), 1, 256},
    {"gate", "experts/gate", sizeof(ExpertGateParams), 8, 32},
    {"gate_backward", "experts/gate", sizeof(ExpertGateParams), 8, 32},
};

constexpr const char* kDtypes[] = {"float16", "bfloat16", "float32", "any"};
constexpr ScalarType kTypes[] = {ScalarType::Half, ScalarType::BFloat16, ScalarType::Float};
constexpr int kAnyDtype = 3;

// The index of a dtype's kernel in kDtypes; that of none is the end of kDtypes.
size_t dtype_index(ExpertKernel kind, ScalarType dtype) {
  if (kind == kOrderExperts) return kAnyDtype;
  const size_t index = std::find(std::begin(kTypes), std::end(kTypes), dtype) - std::begin(kTypes);
  return index < std::size(kTypes) ? index : std::size(kDtypes);
}

class ExpertsBackend : public KernelBackend {
 public:
  ExpertsBackend() : KernelBackend("experts") {}

  void check(PackageKernel& kernel) const override {
    const KernelFields fields(kernel);
    const ExpertKind& kind = kKinds[fields.index("kind", kKinds)];
    check_params(kernel.entry(), kind.header, kind.bytes);
    const int dtype = fields.index("dtype", kDtypes);  // throws for one that is not known
    const int64_t columns = dtype == kAnyDtype ? 1 : kind.vectors * expert_vector(kTypes[dtype]);
    int64_t tile[3];
    fields.triple("tile", 1, tile);
    if (tile[0] != kind.rows || tile[1] != columns) {
      fields.refuse("tile", std::to_string(kind.rows) + " rows of " + std::to_string(columns));
    }
  }
};

const ExpertsBackend g_experts;

struct ExpertsTable {
  explicit ExpertsTable(const Device& device) : family("experts", device) {
    family.for_each_backend<KernelBackend>([&](const KernelBackend&, const auto& own) {
      for (PackageKernel* kernel : own) {
        const KernelFields fields(*kernel);
        kernels[fields.index("kind", kKinds)][fields.index("dtype", kDtypes)] = kernel;
      }
    });
  }
  FamilyKernels family;
  PackageKernel* kernels[kExpertKernels][std::size(kDtypes) + 1] = {};
};

DeviceTables<ExpertsTable> g_tables;

}  // namespace

PackageKernel& expert_kernel(ExpertKernel kind, ScalarType dtype, const Device& device) {
  const ExpertsTable& table = g_tables.get(device);
  PackageKernel* const kernel = table.kernels[kind][dtype_index(kind, dtype)];
  if (kernel == nullptr) {
    table.family.fail_no_kernel(std::string("experts, ") + kKinds[kind].name + " of " +
                                dtype_name(dtype));
  }
  return *kernel;
}

int type_of_weights(ScalarType dtype) {
  return dtype == ScalarType::Half       ? kWeightsFloat16
         : dtype == ScalarType::BFloat16 ? kWeightsBFloat16
                                         : kWeightsFloat32;
}

}  // namespace torch_cubin
