// The checks of grouped_matmul's arguments, the same on every device.
#include <nlohmann/json.hpp>

#include "cubin/error.h"
#include "ops/common/argument_checks.h"
#include "ops/grouped/grouped.h"
#include "pytorch/described_tensor.h"

namespace torch_cubin {
void check_offs(const char* op, const TensorView& offs, const TensorView& mat_a, int64_t groups) {
  check_device(op, "offs", offs, "mat_a", mat_a);
  if (offs.dtype != ScalarType::Int && offs.dtype != ScalarType::Long) {
    fail_dtype(op, "offs", "int32 or int64", offs);
  }
  if (offs.dim == 1 && (groups < 0 || offs.sizes[0] == groups)) return;
  fail({"input", argument_text(op, "offs"), "has a wrong shape",
        groups < 0 ? "one end for each group"
                   : "(" + std::to_string(groups) + ",), one end for each of mat_b's matrices",
        offs.shape_text(), ""});
}

Shape check_grouped(const TensorView& mat_a, const TensorView& mat_b, const TensorView& offs) {
  const std::string instead = "torch.nn.functional.grouped_mm";
  check_float_dtype(kGroupedOp, "mat_a", mat_a, instead);
  check_float_dtype(kGroupedOp, "mat_b", mat_b, instead);
  check_like(kGroupedOp, "mat_b", mat_b, "mat_a", mat_a);
  if (mat_a.dim != 2 || mat_b.dim < 2 || mat_b.dim > 3) {
    fail({"input", kGroupedOp, "takes matrices, and batches of matrices", "2 or 3 dimensions each",
          "shapes " + mat_a.shape_text() + " and " + mat_b.shape_text(), ""});
  }
  const int64_t k = mat_a.sizes[1];
  if (mat_b.sizes[mat_b.dim - 2] != k) {
    fail({"input", kGroupedOp,
          "shapes " + mat_a.shape_text() + " and " + mat_b.shape_text() + " cannot be multiplied",
          "mat_b.size(-2) == " + std::to_string(k) + ", the last size of mat_a",
          std::to_string(mat_b.sizes[mat_b.dim - 2]), ""});
  }
  check_offs(kGroupedOp, offs, mat_a, mat_b.dim == 2 ? -1 : mat_b.sizes[0]);
  Shape out;
  if (mat_b.dim == 2) out.append(offs.sizes[0]);
  out.append(mat_a.sizes[0]);
  out.append(mat_b.sizes[mat_b.dim - 1]);
  return out;
}

void check_described_grouped(const nlohmann::json& tensors) {
  DescribedTensors described;
  const auto get = [&](const char* name) { return described.view(tensors.at(name)); };
  check_grouped(get("mat_a"), get("mat_b"), get("offs"));
}

}  // namespace torch_cubin
