// Products of 8-bit floats with scales:
//
//   out[m, n] = round(sum_k mat_a[m, k] * scale_a(m, k) * mat_b[k, n] * scale_b(n, k) + bias[n])
//
// A recipe says what a scale belongs to, and so the shape of the scales, which have any strides:
//   kScaleTensor: the whole operand; one element
//   kScaleRow: a row of mat_a, a column of mat_b; M or N elements
//   kScaleBlock1x128: 128 of K of one row (column); (M, ceil(K / 128)), for mat_b (N, ...)
//   kScaleBlock128x128: 128 of K of 128 rows (columns); (ceil(K / 128), ceil(M / 128)), for mat_b
//     (..., ceil(N / 128)). The first size may be padded to a multiple of 4, as cuBLAS requires.
//
// An output of float8_e4m3fn has no scale: magnitudes above 448, its largest number, become 448.
#pragma once

#include <nlohmann/json_fwd.hpp>
#include <optional>
#include <string>
#include <tuple>

#include "ops/common/shape.h"
#include "ops/grouped/grouped.h"
#include "pytorch/tensor.h"

namespace torch_cubin {

constexpr const char* kScaledOp = "scaled_matmul";
constexpr int64_t kScaleBlock = 128;

// The numbers of torch.nn.functional.ScalingType.
enum ScaleRecipe : int64_t {
  kScaleTensor = 0,
  kScaleRow = 1,
  kScaleBlock1x128 = 4,
  kScaleBlock128x128 = 5,
};

inline bool is_block(int64_t recipe) { return recipe >= kScaleBlock1x128; }

struct ScaledArguments {
  const char* op;  // for errors
  TensorView mat_a, mat_b, scale_a, scale_b;
  int64_t recipe_a, recipe_b;
  std::optional<TensorView> bias;
  ScalarType out_dtype;
  bool fast;  // use_fast_accum
};

// Whether a scale has the shape of a known recipe; `size`: M or N.
bool scale_fits(const TensorView& scale, int64_t recipe, int64_t size, int64_t k);

// The output's shape; throws [input] for arguments that are wrong on every device.
Shape check_scaled(const ScaledArguments& arguments);

// The same for tensors that Python describes: {"tensors": {"mat_a": tensor, ...}, "recipe_a": 0,
// "recipe_b": 0, "output_dtype": "bfloat16", "use_fast_accum": false}.
void check_described_scaled(const nlohmann::json& call);

// cubin::_scaled_matmul; the output is bfloat16 if no dtype is given.
Tensor scaled_matmul_cpu(const Tensor& mat_a, const Tensor& mat_b, const Tensor& scale_a,
                         int64_t recipe_a, const Tensor& scale_b, int64_t recipe_b,
                         const std::optional<Tensor>& bias, std::optional<ScalarType> out_dtype,
                         bool use_fast_accum);
decltype(scaled_matmul_cpu) scaled_matmul_cuda;

// cubin::_scaled_grouped_matmul: the rows of each group by the group's own matrix,
//
//   out[m] = scaled_matmul(mat_a[m], mat_b[g]) for the rows m of group g
//
// for mat_a (M, K), mat_b (G, K, N), scale_b (G, ...) with a matrix's scales each, and `offs`,
// which is grouped_matmul's (ops/grouped/grouped.h), with the same results for wrong ends and for
// rows past the last one. Recipes: two of rows, or 1x128 with 128x128. Or, for mat_b (K, N),
//
//   out[g] = scaled_matmul(mat_a[:, k], mat_b[k]) for the k of group g
//
// with scale_a (G, M) and scale_b (G, N), of rows; or two of 1x128 for all K, (M, ceil(K / 128))
// and (N, ceil(K / 128)), whose blocks may belong to several groups.
//
// Products of rows have grouped_matmul's options, as steps around a float32 product.
constexpr const char* kScaledGroupedOp = "scaled_grouped_matmul";

struct ScaledGroupedArguments {
  const char* op;  // for errors
  TensorView mat_a, mat_b, scale_a, scale_b, offs;
  int64_t recipe_a, recipe_b;
  ScalarType out_dtype;
  GroupedOptionViews options = {};
};

// The metadata of one group of a tensor of groups, without its memory.
TensorView group_of(const TensorView& all);

Shape check_scaled_grouped(const ScaledGroupedArguments& arguments);

// As check_described_scaled(), with the tensor "offs", and options as check_described_grouped() has
// them.
void check_described_scaled_grouped(const nlohmann::json& call);

Tensor scaled_grouped_matmul_cpu(const Tensor& mat_a, const Tensor& mat_b, const Tensor& scale_a,
                                 int64_t recipe_a, const Tensor& scale_b, int64_t recipe_b,
                                 const Tensor& offs, std::optional<ScalarType> out_dtype,
                                 bool use_fast_accum, const std::optional<Tensor>& bias,
                                 const std::optional<Tensor>& scale,
                                 const std::optional<Tensor>& rows,
                                 const std::optional<Tensor>& out_rows,
                                 const std::string& activation);
decltype(scaled_grouped_matmul_cpu) scaled_grouped_matmul_cuda;

// Without options.
Tensor scaled_grouped_product_cpu(const Tensor& mat_a, const Tensor& mat_b, const Tensor& scale_a,
                                  int64_t recipe_a, const Tensor& scale_b, int64_t recipe_b,
                                  const Tensor& offs, std::optional<ScalarType> out_dtype,
                                  bool use_fast_accum);
decltype(scaled_grouped_product_cpu) scaled_grouped_product_cuda;

// cubin::_scaled_gated_matmul: silu(gate) * up, quantised with scales of 1x128, for the gates,
// which are the first half of mat_b's columns, and the ups:
//
//   quantize(scaled_matmul(mat_a, mat_b), 1x128, gate=gate)
//
// or scaled_grouped_matmul() with `offs`. Or, without `offs`, mat_b has the gates alone, and mat_up
// with scale_up as many ups. Scales are of 1x128 and 128x128; `dtype`, bfloat16 if
// none is given, is the product's. On CUDA both are one kernel where there is one that is quicker,
// with the same bits; rows past the last end are not written then.
constexpr const char* kScaledGatedOp = "scaled_gated_matmul";
using Quantized = std::tuple<Tensor, Tensor>;  // data, scales

struct ScaledGatedArguments {
  TensorView mat_a, mat_b, scale_a, scale_b;
  std::string gate;
  std::optional<TensorView> offs;
  ScalarType dtype;
  std::optional<TensorView> mat_up, scale_up;
};

void check_scaled_gated(const ScaledGatedArguments& arguments);

// {"tensors": {"mat_a": tensor, ...}, "gate": "silu", "dtype": "bfloat16"}.
void check_described_scaled_gated(const nlohmann::json& call);

Quantized scaled_gated_matmul_cpu(const Tensor& mat_a, const Tensor& mat_b, const Tensor& scale_a,
                                  const Tensor& scale_b, const std::string& gate,
                                  const std::optional<Tensor>& offs,
                                  std::optional<ScalarType> dtype,
                                  const std::optional<Tensor>& mat_up,
                                  const std::optional<Tensor>& scale_up, bool power_of_two);
decltype(scaled_gated_matmul_cpu) scaled_gated_matmul_cuda;

}  // namespace torch_cubin
