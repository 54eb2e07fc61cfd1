// The products of groups: each group of rows has its own matrix, or each group of K its own result.
//
// Where groups divide a dim, `offs` on the tensors' device says where each ends, and the host never
// reads it. Group g begins where g - 1 ends, the first at 0; what follows the last end belongs to
// no group.
//   2D x 3D, rows: out[m] = mat_a[m] @ mat_b[g] for the rows m of group g
//   2D x 2D, contraction: out[g] = mat_a[:, k] @ mat_b[k] for the k of group g
//   3D x 2D: columns, by the transposes of the first; 3D x 3D: a batched product
// An end that is less than the one before it, or past the dim, makes NaN of all that follows it.
#pragma once

#include <nlohmann/json_fwd.hpp>
#include <vector>

#include "ops/common/shape.h"
#include "pytorch/tensor.h"

namespace torch_cubin {

constexpr const char* kGroupedOp = "grouped_matmul";

// cubin::grouped_matmul, the arguments of torch.nn.functional.grouped_mm.
void grouped_matmul_composite(StableIValue* stack, uint64_t, uint64_t);

// With the last two dims exchanged.
Tensor matrices_transposed(const Tensor& tensor);

// Shape of rows and contraction; throws [input] for other arguments.
Shape check_grouped(const TensorView& mat_a, const TensorView& mat_b, const TensorView& offs);

// The same checks for tensors that Python describes: {"mat_a": tensor, "mat_b": tensor, "offs":
// tensor}.
void check_described_grouped(const nlohmann::json& tensors);

// Throws [input] unless `offs` has the ends of that many groups, or any number if it is -1, on the
// device of mat_a.
void check_offs(const char* op, const TensorView& offs, const TensorView& mat_a, int64_t groups);

// With TORCH_CUBIN_CHECK=1: copies the ends to the host, for which it waits, and throws [input] for
// a wrong one of groups that divide `limit` rows or columns. Not during a CUDA graph's capture.
void check_ends(const char* op, const Tensor& offs, int64_t limit);

// The ends as numbers; waits for the device that has them.
std::vector<int64_t> ends_on_host(const Tensor& offs);

// Rows or contraction, by the rank of mat_b. Rows past the last end are not written, or with
// `zero_rest` zero.
Tensor grouped_matmul_cpu(const Tensor& mat_a, const Tensor& mat_b, const Tensor& offs,
                          bool zero_rest);
Tensor grouped_matmul_cuda(const Tensor& mat_a, const Tensor& mat_b, const Tensor& offs,
                           bool zero_rest);

}  // namespace torch_cubin
