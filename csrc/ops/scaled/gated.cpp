// scaled_gated_matmul: its checks, and the reference on the CPU, the ops that it consists of.
#include <nlohmann/json.hpp>
#include <vector>

#include "cubin/error.h"
#include "ops/common/argument_checks.h"
#include "ops/common/aten.h"
#include "ops/quantize/quantize.h"
#include "ops/scaled/scaled.h"
#include "pytorch/described_tensor.h"

namespace torch_cubin {
namespace {

void check_pair(const ScaledGatedArguments& x) {
  if (x.mat_up.has_value() != x.scale_up.has_value()) {
    fail({"input", argument_text(kScaledGatedOp, x.mat_up ? "scale_up" : "mat_up"), "is missing",
          "mat_up and its scales, or neither", "None", ""});
  }
  if (!x.mat_up || !x.offs) return;
  fail({"input", argument_text(kScaledGatedOp, "mat_up"), "is not supported",
        "gates and ups in one mat_b for groups", "ups in a matrix of their own", ""});
}

// Of ups in a matrix of their own.
void check_ups(const ScaledGatedArguments& x) {
  const TensorView& up = *x.mat_up;
  constexpr int64_t kRecipeA = kScaleBlock1x128, kRecipeB = kScaleBlock128x128;
  check_scaled({kScaledGatedOp, x.mat_a, up, x.scale_a, *x.scale_up, kRecipeA, kRecipeB,
                std::nullopt, x.dtype, false});
  if (up.sizes[1] == x.mat_b.sizes[1]) return;
  fail({"input", argument_text(kScaledGatedOp, "mat_up"), "has a wrong shape",
        "as many columns as mat_b", up.shape_text(), ""});
}

void check_columns(const TensorView& mat_b, int64_t rank) {
  if (mat_b.dim == rank && mat_b.sizes[rank - 1] % 2 == 0) return;
  fail({"input", argument_text(kScaledGatedOp, "mat_b"), "has a wrong shape",
        counted(rank, "dimension") + ", with columns of gates and as many of ups",
        mat_b.shape_text(), rank == 2 ? "" : "Products without offs take a matrix."});
}

}  // namespace

void check_scaled_gated(const ScaledGatedArguments& x) {
  if (x.gate != "silu") {
    fail({"input", argument_text(kScaledGatedOp, "gate"), "is not known", "'silu'",
          "'" + x.gate.substr(0, 200) + "'", ""});
  }
  if (x.dtype != ScalarType::BFloat16 && x.dtype != ScalarType::Half &&
      x.dtype != ScalarType::Float) {
    fail({"input", argument_text(kScaledGatedOp, "dtype"), "is not supported",
          "bfloat16, float16 or float32", dtype_name(x.dtype),
          "The outputs' dtype is float8_e4m3fn whatever it is."});
  }
  check_pair(x);
  if (!x.mat_up) check_columns(x.mat_b, x.offs ? 3 : 2);
  constexpr int64_t kRecipeA = kScaleBlock1x128, kRecipeB = kScaleBlock128x128;
  if (x.offs) {
    check_scaled_grouped({kScaledGatedOp, x.mat_a, x.mat_b, x.scale_a, x.scale_b, *x.offs, kRecipeA,
                          kRecipeB, x.dtype});
  } else {
    check_scaled({kScaledGatedOp, x.mat_a, x.mat_b, x.scale_a, x.scale_b, kRecipeA, kRecipeB,
                  std::nullopt, x.dtype, false});
  }
  if (x.mat_up) check_ups(x);
}

void check_described_scaled_gated(const nlohmann::json& call) {
  const nlohmann::json& named = call.at("tensors");
  DescribedTensors tensors;
  const auto get = [&](const char* name) { return tensors.view(named.at(name)); };
  ScalarType dtype = ScalarType::BFloat16;
  find_dtype(call.at("dtype").get<std::string>(), &dtype);
  check_scaled_gated({get("mat_a"), get("mat_b"), get("scale_a"), get("scale_b"),
                      call.at("gate").get<std::string>(), tensors.find(named, "offs"), dtype,
                      tensors.find(named, "mat_up"), tensors.find(named, "scale_up")});
}

Quantized scaled_gated_matmul_cpu(const Tensor& mat_a, const Tensor& mat_b, const Tensor& scale_a,
                                  const Tensor& scale_b, const std::string& gate,
                                  const std::optional<Tensor>& offs,
                                  std::optional<ScalarType> dtype,
                                  const std::optional<Tensor>& mat_up,
                                  const std::optional<Tensor>& scale_up, bool power_of_two) {
  const ScalarType own = dtype.value_or(ScalarType::BFloat16);
  check_scaled_gated({TensorView(mat_a), TensorView(mat_b), TensorView(scale_a),
                      TensorView(scale_b), gate, view_of(offs), own, view_of(mat_up),
                      view_of(scale_up)});
  constexpr int64_t kRecipeA = kScaleBlock1x128, kRecipeB = kScaleBlock128x128;
  const Tensor product = offs ? scaled_grouped_product_cpu(mat_a, mat_b, scale_a, kRecipeA, scale_b,
                                                           kRecipeB, *offs, own, false)
                              : scaled_matmul_cpu(mat_a, mat_b, scale_a, kRecipeA, scale_b,
                                                  kRecipeB, std::nullopt, own, false);
  if (mat_up) {
    const Tensor ups = scaled_matmul_cpu(mat_a, *mat_up, scale_a, kRecipeA, *scale_up, kRecipeB,
                                         std::nullopt, own, false);
    const Tensor both = call_aten("aten::cat", std::vector<Tensor>{product, ups}, int64_t{1});
    return quantize_cpu(both, kRecipeA, false, power_of_two, gate, std::nullopt);
  }
  return quantize_cpu(product, kRecipeA, false, power_of_two, gate, std::nullopt);
}

}  // namespace torch_cubin
