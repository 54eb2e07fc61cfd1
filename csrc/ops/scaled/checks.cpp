// The checks of scaled_matmul's arguments, the same on every device.
#include <functional>
#include <nlohmann/json.hpp>
#include <numeric>

#include "cubin/error.h"
#include "ops/common/argument_checks.h"
#include "ops/scaled/scaled.h"
#include "pytorch/described_tensor.h"

namespace torch_cubin {
namespace {

void check_operand(const char* op, const char* name, const TensorView& x) {
  if (x.dtype != ScalarType::Float8_e4m3fn && x.dtype != ScalarType::Float8_e5m2) {
    fail_dtype(op, name, "float8_e4m3fn or float8_e5m2", x);
  }
  if (x.dim == 2) return;
  fail({"input", argument_text(op, name), "has a wrong shape", "2 dimensions", x.shape_text(), ""});
}

// Whether K has `blocks` blocks, or these padded to a multiple of 4.
bool counts_blocks(int64_t blocks, int64_t k) {
  const int64_t own = ceil_div(k, kScaleBlock);
  return blocks == own || blocks == ceil_div(own, 4) * 4;
}

// The shape of a scale, for errors. `size`: M or N.
std::string expected_scale(int64_t recipe, int64_t size, int64_t k) {
  const int64_t blocks = ceil_div(k, kScaleBlock);
  if (recipe == kScaleTensor) return "one element";
  if (recipe == kScaleRow) return std::to_string(size) + " elements in one row or column";
  const int64_t of_rows[] = {size, blocks}, of_blocks[] = {blocks, ceil_div(size, kScaleBlock)};
  return tuple_text(recipe == kScaleBlock1x128 ? of_rows : of_blocks, 2);
}

void check_scale(const char* op, const char* name, const char* recipe_name, const TensorView& scale,
                 int64_t recipe, int64_t size, int64_t k, const TensorView& mat_a) {
  check_side(op, name, scale, "mat_a", mat_a, ScalarType::Float);
  if (recipe != kScaleTensor && recipe != kScaleRow && recipe != kScaleBlock1x128 &&
      recipe != kScaleBlock128x128) {
    fail({"input", argument_text(op, recipe_name), "is not supported",
          "TensorWise (0), RowWise (1), BlockWise1x128 (4) or BlockWise128x128 (5), of "
          "torch.nn.functional.ScalingType",
          std::to_string(recipe), ""});
  }
  if (scale_fits(scale, recipe, size, k)) return;
  fail({"input", argument_text(op, name), "has a shape that its recipe does not have",
        expected_scale(recipe, size, k), scale.shape_text(), ""});
}

void check_bias(const char* op, const TensorView& bias, const TensorView& mat_a, int64_t n) {
  check_device(op, "bias", bias, "mat_a", mat_a);
  if (bias.dtype != ScalarType::BFloat16 && bias.dtype != ScalarType::Half &&
      bias.dtype != ScalarType::Float) {
    fail_dtype(op, "bias", "bfloat16, float16 or float32", bias);
  }
  if (bias.dim == 1 && bias.sizes[0] == n) return;
  fail({"input", argument_text(op, "bias"), "has a wrong shape",
        tuple_text(&n, 1) + ", one element for each column", bias.shape_text(), ""});
}

}  // namespace

bool scale_fits(const TensorView& scale, int64_t recipe, int64_t size, int64_t k) {
  const int64_t elements =
      std::accumulate(scale.sizes, scale.sizes + scale.dim, int64_t{1}, std::multiplies<>());
  const int64_t blocks = ceil_div(k, kScaleBlock);
  switch (recipe) {
    case kScaleTensor:
      return elements == 1;
    case kScaleRow: {
      const bool is_line = scale.dim < 2 || scale.sizes[0] == 1 || scale.sizes[1] == 1;
      return scale.dim <= 2 && elements == size && is_line;
    }
    case kScaleBlock1x128:
      return scale.dim == 2 && scale.sizes[0] == size && scale.sizes[1] == blocks;
    case kScaleBlock128x128:
      return scale.dim == 2 && counts_blocks(scale.sizes[0], k) &&
             scale.sizes[1] == ceil_div(size, kScaleBlock);
    default:
      return false;
  }
}

Shape check_scaled(const ScaledArguments& x) {
  check_operand(x.op, "mat_a", x.mat_a);
  check_operand(x.op, "mat_b", x.mat_b);
  check_device(x.op, "mat_b", x.mat_b, "mat_a", x.mat_a);
  const int64_t m = x.mat_a.sizes[0], k = x.mat_a.sizes[1], n = x.mat_b.sizes[1];
  if (x.mat_b.sizes[0] != k) {
    fail({"input", x.op,
          "shapes " + x.mat_a.shape_text() + " and " + x.mat_b.shape_text() +
              " cannot be multiplied",
          "mat_b.size(0) == " + std::to_string(k) + ", the last size of mat_a",
          std::to_string(x.mat_b.sizes[0]), ""});
  }
  const bool both_e5m2 =
      x.mat_a.dtype == ScalarType::Float8_e5m2 && x.mat_b.dtype == ScalarType::Float8_e5m2;
  if (both_e5m2) {
    fail({"input", x.op, "does not multiply float8_e5m2 by float8_e5m2",
          "at least one operand of float8_e4m3fn", "two of float8_e5m2",
          "Convert one of them: tensor cores have no such product."});
  }
  check_scale(x.op, "scale_a", "scale_recipe_a", x.scale_a, x.recipe_a, m, k, x.mat_a);
  check_scale(x.op, "scale_b", "scale_recipe_b", x.scale_b, x.recipe_b, n, k, x.mat_a);
  if (is_block(x.recipe_a) != is_block(x.recipe_b)) {
    fail({"input", x.op, "mixes scales of blocks with scales of whole rows",
          "two recipes of blocks, or none",
          "recipes " + std::to_string(x.recipe_a) + " and " + std::to_string(x.recipe_b), ""});
  }
  if (is_block(x.recipe_a) &&
      (x.mat_a.dtype == ScalarType::Float8_e5m2 || x.mat_b.dtype == ScalarType::Float8_e5m2)) {
    fail({"input", x.op, "takes scales of blocks for float8_e4m3fn alone",
          "two operands of float8_e4m3fn",
          dtype_name(x.mat_a.dtype) + " and " + dtype_name(x.mat_b.dtype), ""});
  }
  if (x.bias) check_bias(x.op, *x.bias, x.mat_a, n);
  if (x.out_dtype != ScalarType::BFloat16 && x.out_dtype != ScalarType::Half &&
      x.out_dtype != ScalarType::Float && x.out_dtype != ScalarType::Float8_e4m3fn) {
    fail({"input", argument_text(x.op, "output_dtype"), "is not supported",
          "bfloat16, float16, float32 or float8_e4m3fn", dtype_name(x.out_dtype),
          "Convert the result with .to(dtype)."});
  }
  Shape out;
  out.append(m);
  out.append(n);
  return out;
}

void check_described_scaled(const nlohmann::json& call) {
  const nlohmann::json& named = call.at("tensors");
  DescribedTensors tensors;
  const auto get = [&](const char* name) { return tensors.view(named.at(name)); };
  ScalarType out_dtype = ScalarType::BFloat16;
  find_dtype(call.at("output_dtype").get<std::string>(), &out_dtype);
  check_scaled({kScaledOp, get("mat_a"), get("mat_b"), get("scale_a"), get("scale_b"),
                call.at("recipe_a").get<int64_t>(), call.at("recipe_b").get<int64_t>(),
                tensors.find(named, "bias"), out_dtype, call.at("use_fast_accum").get<bool>()});
}

}  // namespace torch_cubin
