// The backend of csrc/kernels/experts/sum.cu.
#include <memory>

#include "cubin/error.h"
#include "kernels/experts/sum_params.h"
#include "ops/common/backend.h"
#include "ops/common/device_tables.h"
#include "ops/common/launch.h"
#include "ops/experts/experts.h"

namespace torch_cubin {
namespace {

constexpr int64_t kSumElements = 8;  // of 16 bytes
constexpr int64_t kSumThreads = 256;

ScalarType sum_dtype(const PackageKernel& kernel) {
  constexpr const char* kDtypes[] = {"float16", "bfloat16"};
  const bool half = KernelFields(kernel).index("dtype", kDtypes) == 0;
  return half ? ScalarType::Half : ScalarType::BFloat16;
}

class ExpertSumBackend : public KernelBackend {
 public:
  ExpertSumBackend() : KernelBackend("experts", {"sum"}) {}

  void check(PackageKernel& kernel) const override {
    check_params(kernel.entry(), "experts/sum", sizeof(ExpertSumParams));
    sum_dtype(kernel);  // throws for a field that is wrong
    const KernelFields fields(kernel);
    int64_t tile[3];
    fields.triple("tile", 1, tile);
    if (tile[1] != kSumThreads * kSumElements) fields.refuse("tile", "8 columns of a thread");
  }
};

const ExpertSumBackend g_expert_sum;

struct ExpertSumTable {
  explicit ExpertSumTable(const Device& device) : family("experts", device) {
    family.for_each_backend<KernelBackend>([&](const KernelBackend& backend, const auto& kernels) {
      if (&backend != &g_expert_sum) return;
      for (PackageKernel* kernel : kernels) by_dtype.emplace_back(sum_dtype(*kernel), kernel);
    });
  }

  PackageKernel& of(ScalarType dtype) const {
    for (const auto& [own, kernel] : by_dtype) {
      if (own == dtype) return *kernel;
    }
    family.fail_no_kernel("the sum of experts' rows of " + dtype_name(dtype));
  }

  FamilyKernels family;
  std::vector<std::pair<ScalarType, PackageKernel*>> by_dtype;
};

const ExpertSumTable& sum_table(const Device& device) {
  static DeviceTables<ExpertSumTable> tables;
  return tables.get(device, [](const Device& device) {
    return std::make_unique<ExpertSumTable>(device).release();
  });
}

int type_of(ScalarType weights) {
  return weights == ScalarType::Half       ? kWeightsFloat16
         : weights == ScalarType::BFloat16 ? kWeightsBFloat16
                                           : kWeightsFloat32;
}

}  // namespace

void sum_experts(const Device& device, const Tensor& rows, const int* places, int64_t k,
                 const std::optional<Tensor>& weights, const Tensor& out) {
  const TensorView from(rows), to(out);
  ExpertSumParams params{};
  params.rows = from.data();
  params.row_count = static_cast<int>(from.sizes[0]);
  params.places = places;
  params.out = out.mutable_data_ptr();
  params.tokens = static_cast<int>(to.sizes[0]);
  params.columns = static_cast<int>(to.sizes[1]);
  params.k = static_cast<int>(k);
  const bool vectors = to.sizes[1] % kSumElements == 0 &&
                       reinterpret_cast<uintptr_t>(from.data()) % (2 * kSumElements) == 0;
  const int64_t elements = vectors ? kSumElements : 1;
  params.elements = static_cast<int>(elements);
  if (weights) {
    const TensorView by(*weights);
    params.weights = by.data();
    params.weights_type = type_of(by.dtype);
  } else {
    params.weights_type = kWeightsOne;
  }
  const int64_t units = to.sizes[0] * (to.sizes[1] / elements);
  launch(sum_table(device).of(to.dtype), {ceil_div(units, kSumThreads)}, device, params);
}

}  // namespace torch_cubin
