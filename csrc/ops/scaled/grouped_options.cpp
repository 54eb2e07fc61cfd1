// The options of scaled_grouped_matmul, on either device: grouped_matmul's steps around a product.
#include <vector>

#include "ops/common/aten.h"
#include "ops/common/stable_ops.h"
#include "ops/grouped/grouped.h"
#include "ops/scaled/scaled.h"

namespace torch_cubin {
namespace {

struct RowsCall {
  const Tensor &mat_a, &mat_b, &scale_a;
  int64_t recipe_a;
  const Tensor& scale_b;
  int64_t recipe_b;
  const Tensor& offs;
  std::optional<ScalarType> out_dtype;
  bool fast;
};

// As bytes, which ATen's ops take.
Tensor selected_data(const Tensor& data, const Tensor& numbers) {
  const auto as = [](const Tensor& x, ScalarType dtype) {
    return call_aten_overload("aten::view", "dtype", x, dtype);
  };
  const ScalarType dtype = TensorView(data).dtype;
  return as(rows_by_number(as(detach(data), ScalarType::Byte), numbers), dtype);
}

Tensor selected_scales(const Tensor& scales, int64_t recipe, int64_t rows, const Tensor& numbers) {
  const int64_t columns = is_block(recipe) ? TensorView(scales).sizes[1] : 1;
  const Tensor own =
      call_aten("aten::reshape", detach(scales), std::vector<int64_t>{rows, columns});
  return rows_by_number(own, numbers);
}

Tensor run_rows(decltype(&scaled_grouped_product_cpu) product, const RowsCall& x,
                const GroupedOptions& options) {
  if (!options.any()) {
    return product(x.mat_a, x.mat_b, x.scale_a, x.recipe_a, x.scale_b, x.recipe_b, x.offs,
                   x.out_dtype, x.fast);
  }
  const TensorView a(x.mat_a);
  const ScalarType dtype = x.out_dtype.value_or(ScalarType::BFloat16);
  check_scaled_grouped({kScaledGroupedOp, a, TensorView(x.mat_b), TensorView(x.scale_a),
                        TensorView(x.scale_b), TensorView(x.offs), x.recipe_a, x.recipe_b, dtype,
                        views_of(options)});
  const bool reads = options.rows.has_value();
  const Tensor data = reads ? selected_data(x.mat_a, *options.rows) : x.mat_a;
  const Tensor scales =
      reads ? selected_scales(x.scale_a, x.recipe_a, a.sizes[0], *options.rows) : x.scale_a;
  const Tensor out = product(data, x.mat_b, scales, x.recipe_a, x.scale_b, x.recipe_b, x.offs,
                             ScalarType::Float, x.fast);
  return options_by_steps(out, x.offs, options, dtype);
}

}  // namespace

Tensor scaled_grouped_matmul_cpu(const Tensor& mat_a, const Tensor& mat_b, const Tensor& scale_a,
                                 int64_t recipe_a, const Tensor& scale_b, int64_t recipe_b,
                                 const Tensor& offs, std::optional<ScalarType> out_dtype,
                                 bool use_fast_accum, const std::optional<Tensor>& bias,
                                 const std::optional<Tensor>& scale,
                                 const std::optional<Tensor>& rows,
                                 const std::optional<Tensor>& out_rows,
                                 const std::string& activation) {
  return run_rows(
      scaled_grouped_product_cpu,
      {mat_a, mat_b, scale_a, recipe_a, scale_b, recipe_b, offs, out_dtype, use_fast_accum},
      {bias, scale, rows, out_rows, activation});
}

Tensor scaled_grouped_matmul_cuda(const Tensor& mat_a, const Tensor& mat_b, const Tensor& scale_a,
                                  int64_t recipe_a, const Tensor& scale_b, int64_t recipe_b,
                                  const Tensor& offs, std::optional<ScalarType> out_dtype,
                                  bool use_fast_accum, const std::optional<Tensor>& bias,
                                  const std::optional<Tensor>& scale,
                                  const std::optional<Tensor>& rows,
                                  const std::optional<Tensor>& out_rows,
                                  const std::string& activation) {
  return run_rows(
      scaled_grouped_product_cuda,
      {mat_a, mat_b, scale_a, recipe_a, scale_b, recipe_b, offs, out_dtype, use_fast_accum},
      {bias, scale, rows, out_rows, activation});
}

}  // namespace torch_cubin
