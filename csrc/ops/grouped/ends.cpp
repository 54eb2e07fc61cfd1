// The ends of groups on the host, for the CPU and for TORCH_CUBIN_CHECK.
#include "cubin/error.h"
#include "ops/common/argument_checks.h"
#include "ops/common/aten.h"
#include "ops/common/stable_ops.h"
#include "ops/common/value_checks.h"
#include "ops/grouped/grouped.h"

namespace torch_cubin {

std::vector<int64_t> ends_on_host(const Tensor& offs) {
  const torch::stable::Device cpu(torch::headeronly::DeviceType::CPU);
  const Tensor ends = torch::stable::contiguous(torch::stable::to(detach(offs), cpu));
  const TensorView view(ends);
  std::vector<int64_t> out(static_cast<size_t>(view.sizes[0]));
  for (size_t i = 0; i < out.size(); ++i) {
    out[i] = view.dtype == ScalarType::Int ? static_cast<const int32_t*>(view.data())[i]
                                           : static_cast<const int64_t*>(view.data())[i];
  }
  return out;
}

void check_ends(const char* op, const Tensor& offs, int64_t limit) {
  if (!checks_values()) return;
  const std::vector<int64_t> ends = ends_on_host(offs);
  int64_t start = 0;
  for (size_t group = 0; group < ends.size(); ++group) {
    const int64_t end = ends[group];
    if (end < start || end > limit) {
      fail({"input", argument_text(op, "offs"), "has a wrong end of group " + std::to_string(group),
            "a number from " + std::to_string(start) + " to " + std::to_string(limit),
            std::to_string(end), "Ends never fall, and stay within the dim that they divide."});
    }
    start = end;
  }
}

}  // namespace torch_cubin
