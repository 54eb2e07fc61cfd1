// The backend of csrc/kernels/experts/order.cu.
#include <memory>

#include "cubin/error.h"
#include "kernels/experts/order_params.h"
#include "ops/common/backend.h"
#include "ops/common/device_tables.h"
#include "ops/common/launch.h"
#include "ops/experts/experts.h"

namespace torch_cubin {
namespace {

class ExpertOrderBackend : public KernelBackend {
 public:
  ExpertOrderBackend() : KernelBackend("experts", {"order"}) {}

  void check(PackageKernel& kernel) const override {
    check_params(kernel.entry(), "experts/order", sizeof(ExpertOrderParams));
    const KernelFields fields(kernel);
    int64_t tile[3];
    fields.triple("tile", 1, tile);
    if (tile[0] != kOrderChunk) fields.refuse("tile", std::to_string(kOrderChunk) + " ids");
  }
};

const ExpertOrderBackend g_expert_order;

struct ExpertOrderTable {
  explicit ExpertOrderTable(const Device& device) : family("experts", device) {
    family.for_each_backend<KernelBackend>([&](const KernelBackend& backend, const auto& kernels) {
      if (&backend == &g_expert_order) kernel = kernels.front();
    });
  }

  PackageKernel& order() const {
    if (kernel == nullptr) family.fail_no_kernel("the order of tokens by experts");
    return *kernel;
  }

  FamilyKernels family;
  PackageKernel* kernel = nullptr;
};

const ExpertOrderTable& order_table(const Device& device) {
  static DeviceTables<ExpertOrderTable> tables;
  return tables.get(device, [](const Device& device) {
    return std::make_unique<ExpertOrderTable>(device).release();
  });
}

Tensor integers(const Device& device, int64_t count) {
  return empty_cuda(&count, 1, ScalarType::Int, device.index);
}

}  // namespace

ExpertOrder::ExpertOrder(const Device& device, const TensorView& ids, int64_t experts)
    : memory(integers(device,
                      2 * ids.sizes[0] * ids.sizes[1] + experts +
                          ceil_div(ids.sizes[0] * ids.sizes[1], kOrderChunk) * (experts + 1))) {
  if (experts > kMostOrderedExperts) {
    fail({"no_kernel", kMoeOp, "has more experts than a kernel takes",
          "at most " + std::to_string(kMostOrderedExperts), std::to_string(experts),
          "Pass the activation as a function, which composes the layer of products."});
  }
  const int64_t size = ids.sizes[0] * ids.sizes[1], chunks = ceil_div(size, kOrderChunk);
  tokens = static_cast<int*>(memory.mutable_data_ptr());
  places = tokens + size;
  ends = places + size;
  ExpertOrderParams params{};
  params.ids = ids.data();
  params.tokens = tokens;
  params.places = places;
  params.ends = ends;
  params.counts = ends + experts;
  params.size = static_cast<int>(size);
  params.k = static_cast<int>(ids.sizes[1]);
  params.experts = static_cast<int>(experts);
  params.wide_ids = ids.dtype == ScalarType::Long;
  PackageKernel& kernel = order_table(device).order();
  for (const int counts_only : {1, 0}) {
    if (counts_only && chunks == 1) continue;  // a chunk knows its own counts
    params.counts_only = counts_only;
    launch(kernel, {chunks}, device, params);
  }
}

}  // namespace torch_cubin
