// The public op grouped_matmul; ops/common/dispatch.h says what such ops may do. It reads ranks and
// no sizes.
#include "cubin/error.h"
#include "ops/common/argument_checks.h"
#include "ops/common/dispatch.h"
#include "ops/common/stable_ops.h"
#include "ops/grouped/grouped.h"

namespace torch_cubin {
namespace {

Tensor call_grouped(const Tensor& mat_a, const Tensor& mat_b, const Tensor& offs,
                    const GroupedOptions& x) {
  const char* op = differentiable() ? "cubin::_grouped_matmul_autograd" : "cubin::_grouped_matmul";
  return call_tensor_op(op, "", mat_a, mat_b, offs, false, x.bias, x.scale, x.rows, x.out_rows,
                        x.activation);
}

[[noreturn]] void fail_offs(const std::string& problem, const std::string& expected,
                            const std::string& got) {
  fail({"input", argument_text(kGroupedOp, "offs"), problem, expected, got, ""});
}

Tensor grouped_matmul(const Tensor& mat_a, const Tensor& mat_b, const std::optional<Tensor>& offs,
                      const std::optional<Tensor>& bias, std::optional<ScalarType> out_dtype,
                      const std::optional<Tensor>& scale, const std::optional<Tensor>& rows,
                      const std::optional<Tensor>& out_rows, const std::string& activation) {
  const GroupedOptions options{bias, scale, rows, out_rows, activation};
  if (mat_a.dim() == 3 && options.any()) {
    fail({"input", kGroupedOp, "has options of rows for a mat_a of 3 dimensions",
          "a mat_a of 2 dimensions, or no bias, scale, rows, out_rows and activation",
          "3 dimensions", "Apply them to the result."});
  }
  if (out_dtype && *out_dtype != mat_a.scalar_type()) {
    fail({"input", argument_text(kGroupedOp, "out_dtype"), "differs from the operands' dtype",
          dtype_name(mat_a.scalar_type()), dtype_name(*out_dtype),
          "Convert the result with .to(dtype)."});
  }
  if (mat_a.dim() == 3 && mat_b.dim() == 3) {
    if (offs) fail_offs("is given for two batches", "None", "a tensor");
    const char* op = differentiable() ? "cubin::_matmul_autograd" : "cubin::_matmul";
    return call_tensor_op(op, "", mat_a, mat_b);
  }
  if (!offs) {
    fail_offs("is missing", "the end of each group, for operands of which one has 2 dimensions",
              "None");
  }
  if (mat_a.dim() == 3 && mat_b.dim() == 2) {  // the groups are columns
    const Tensor columns =
        call_grouped(matrices_transposed(mat_b), matrices_transposed(mat_a), *offs, {});
    return torch::stable::contiguous(matrices_transposed(columns));
  }
  return call_grouped(mat_a, mat_b, *offs, options);
}

}  // namespace

Tensor matrices_transposed(const Tensor& tensor) {
  return torch::stable::transpose(tensor, -2, -1);
}

void grouped_matmul_composite(StableIValue* stack, uint64_t arguments, uint64_t results) {
  call_with_tensors(kGroupedOp, {"mat_a", "mat_b"}, stack,
                    [=] { TORCH_BOX (&grouped_matmul)(stack, arguments, results); });
}

}  // namespace torch_cubin
