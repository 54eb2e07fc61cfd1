// The products of groups: each group of rows has its own matrix, or each group of K its own result.
//
// Where groups divide a dim, `offs` on the tensors' device says where each ends, and the host never
// reads it. Group g begins where g - 1 ends, the first at 0; what follows the last end belongs to
// no group.
//   2D x 3D, rows: out[m] = mat_a[m] @ mat_b[g] for the rows m of group g
//   2D x 2D, contraction: out[g] = mat_a[:, k] @ mat_b[k] for the k of group g
//   3D x 2D: columns, by the transposes of the first; 3D x 3D: a batched product
// An end that is less than the one before it, or past the dim, makes NaN of all that follows it.
//
// Products of rows have options, for each row m of group g:
//   y = mat_a[rows[m]] @ mat_b[g] + bias[g]
//   y = activation(the first half of y) * the second half
//   out[out_rows[m]] = scale[m] * y
// Numbers of rows that mat_a does not have read zeros, those that out does not have store nothing.
#pragma once

#include <nlohmann/json_fwd.hpp>
#include <optional>
#include <string>
#include <vector>

#include "ops/common/shape.h"
#include "pytorch/tensor.h"

namespace torch_cubin {

constexpr const char* kGroupedOp = "grouped_matmul";

// cubin::grouped_matmul, the arguments of torch.nn.functional.grouped_mm.
void grouped_matmul_composite(StableIValue* stack, uint64_t, uint64_t);

// With the last two dims exchanged.
Tensor matrices_transposed(const Tensor& tensor);

template <class T>
struct GroupedOptionsOf {
  std::optional<T> bias, scale, rows, out_rows;
  std::string activation = "none";

  bool any() const { return bias || scale || rows || out_rows || activation != "none"; }
};
using GroupedOptions = GroupedOptionsOf<Tensor>;
using GroupedOptionViews = GroupedOptionsOf<TensorView>;

inline GroupedOptionViews views_of(const GroupedOptions& x) {
  return {view_of(x.bias), view_of(x.scale), view_of(x.rows), view_of(x.out_rows), x.activation};
}

// Appends the sizes of a product of rows, (G, K, N) matrices, to its shape; throws [input] for
// options that do not fit it, whatever dtype a bias has.
void append_rows_and_columns(const char* op, const TensorView& mat_a, const TensorView& mat_b,
                             const GroupedOptionViews& options, Shape& out);

// Shape of rows and contraction; throws [input] for other arguments.
Shape check_grouped(const TensorView& mat_a, const TensorView& mat_b, const TensorView& offs,
                    const GroupedOptionViews& options = {});

// The same checks for a call that Python describes: {"tensors": {"mat_a": tensor, ...},
// "activation": name}; tensors of options may be missing.
void check_described_grouped(const nlohmann::json& call);

// Throws [input] unless `offs` has the ends of that many groups, or any number if it is -1, on the
// device of mat_a.
void check_offs(const char* op, const TensorView& offs, const TensorView& mat_a, int64_t groups);

// With TORCH_CUBIN_CHECK=1: copies the ends to the host, for which it waits, and throws [input] for
// a wrong one of groups that divide `limit` rows or columns. Not during a CUDA graph's capture.
void check_ends(const char* op, const Tensor& offs, int64_t limit);

// The ends as numbers; waits for the device that has them.
std::vector<int64_t> ends_on_host(const Tensor& offs);

// cubin::_grouped_matmul.
Tensor grouped_matmul_cpu(const Tensor& mat_a, const Tensor& mat_b, const Tensor& offs,
                          bool zero_rest, const std::optional<Tensor>& bias,
                          const std::optional<Tensor>& scale, const std::optional<Tensor>& rows,
                          const std::optional<Tensor>& out_rows, const std::string& activation);
decltype(grouped_matmul_cpu) grouped_matmul_cuda;

// Rows or contraction, by the rank of mat_b. Rows past the last end are not written, or with
// `zero_rest` zero.
Tensor grouped_product_cpu(const Tensor& mat_a, const Tensor& mat_b, const Tensor& offs,
                           bool zero_rest, const GroupedOptions& options = {});
Tensor grouped_product_cuda(const Tensor& mat_a, const Tensor& mat_b, const Tensor& offs,
                            bool zero_rest, const GroupedOptions& options = {});

// The options as steps of ATen's around a product without them, whose rows past the last end are
// zero. Rows of the result that nothing is stored to are zero.
Tensor grouped_by_steps(decltype(&grouped_product_cpu) product, const Tensor& mat_a,
                        const Tensor& mat_b, const Tensor& offs, const GroupedOptions& options);

// Those before the product: x[numbers], zeros for numbers that x does not have. And those after it,
// of a float32 product, or of a float64 one; rounded to a dtype, where float8_e4m3fn saturates.
Tensor rows_by_number(const Tensor& x, const Tensor& numbers);
Tensor options_by_steps(const Tensor& product, const Tensor& offs, const GroupedOptions& options,
                        ScalarType dtype);

}  // namespace torch_cubin
