// Launches csrc/kernels/experts/order.cu.
#include "cubin/error.h"
#include "kernels/experts/order_params.h"
#include "ops/common/shape.h"
#include "ops/common/stable_ops.h"
#include "ops/experts/experts.h"
#include "ops/experts/kernels.h"

namespace torch_cubin {

ExpertOrder::ExpertOrder(const Tensor& memory, int64_t rows)
    : memory(memory),
      tokens(static_cast<int*>(memory.mutable_data_ptr())),
      places(tokens + rows),
      ends(places + rows) {}

Tensor ExpertOrder::tokens_tensor() const {
  Tensor all = memory;
  return torch::stable::narrow(all, 0, 0, places - tokens);
}

Tensor ExpertOrder::ends_tensor(int64_t experts) const {
  Tensor all = memory;
  return torch::stable::narrow(all, 0, ends - tokens, experts);
}

void check_moe_rows(int64_t rows) {
  constexpr int64_t kMostRows = INT32_MAX / 2;
  if (rows <= kMostRows) return;
  fail({"no_kernel", kMoeOp, "has more ids than a kernel takes",
        "at most " + std::to_string(kMostRows), std::to_string(rows), "Pass fewer tokens."});
}

ExpertOrder order_experts(const Device& device, const TensorView& ids, int64_t experts) {
  if (experts > kMostOrderedExperts) {
    fail({"no_kernel", kMoeOp, "has more experts than a kernel takes",
          "at most " + std::to_string(kMostOrderedExperts), std::to_string(experts),
          "Pass the activation as a function, which composes the layer of products."});
  }
  const int64_t rows = ids.sizes[0] * ids.sizes[1], chunks = ceil_div(rows, kOrderChunk);
  check_moe_rows(rows);
  const int64_t size = expert_order_size(rows, experts);
  const ExpertOrder order(empty_cuda(&size, 1, ScalarType::Int, device.index), rows);
  const Workspace counts(device, chunks * (experts + 1) * static_cast<int64_t>(sizeof(int)));
  ExpertOrderParams params{};
  params.ids = ids.data();
  params.tokens = order.tokens;
  params.places = order.places;
  params.ends = order.ends;
  params.counts = reinterpret_cast<int*>(counts.data());
  params.size = static_cast<int>(rows);
  params.k = static_cast<int>(ids.sizes[1]);
  params.experts = static_cast<int>(experts);
  params.wide_ids = ids.dtype == ScalarType::Long;
  PackageKernel& kernel = expert_kernel(kOrderExperts, ScalarType::Int, device);
  for (const int counts_only : {1, 0}) {
    if (counts_only && chunks == 1) continue;  // a chunk knows its own counts
    params.counts_only = counts_only;
    launch(kernel, {chunks}, device, params);
  }
  return order;
}

}  // namespace torch_cubin
