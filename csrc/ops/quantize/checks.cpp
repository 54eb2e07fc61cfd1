// The checks of quantize's arguments, the same on every device.
#include <algorithm>
#include <nlohmann/json.hpp>

#include "cubin/error.h"
#include "ops/common/argument_checks.h"
#include "ops/quantize/quantize.h"
#include "pytorch/described_tensor.h"

namespace torch_cubin {
namespace {

void check_x(const TensorView& x, bool gated) {
  if (x.dtype != ScalarType::BFloat16 && x.dtype != ScalarType::Half &&
      x.dtype != ScalarType::Float) {
    fail_dtype(kQuantizeOp, "x", "bfloat16, float16 or float32", x);
  }
  if (x.dim == 2 && (!gated || x.sizes[1] % 2 == 0)) return;
  fail({"input", argument_text(kQuantizeOp, "x"), "has a wrong shape",
        gated ? "2 dimensions, with columns of gates and as many of ups" : "2 dimensions",
        x.shape_text(), "Flatten other dimensions with .flatten(0, -2)."});
}

[[noreturn]] void fail_option(const char* name, const std::string& problem,
                              const std::string& expected, const std::string& got) {
  fail({"input", argument_text(kQuantizeOp, name), problem, expected, got, ""});
}

void check_recipe(int64_t recipe, bool transpose, bool gated) {
  if (recipe != kScaleRow && recipe != kScaleBlock1x128 && recipe != kScaleBlock128x128) {
    fail_option("recipe", "is not supported",
                "RowWise (1), BlockWise1x128 (4) or BlockWise128x128 (5), of "
                "torch.nn.functional.ScalingType",
                std::to_string(recipe));
  }
  if (transpose && recipe == kScaleRow) {
    fail_option("transpose", "is not supported for RowWise", "False", "True");
  }
  if (gated && (transpose || recipe != kScaleBlock1x128)) {
    fail_option("gate", "is supported for BlockWise1x128 without transpose alone", "'none'",
                "'silu'");
  }
}

}  // namespace

QuantizeCall check_quantize(const TensorView& x, int64_t recipe, bool transpose, bool power_of_two,
                            const std::string& gate, std::optional<ScalarType> dtype) {
  if (gate != "none" && gate != "silu") {
    fail_option("gate", "is not known", "'none' or 'silu'", "'" + gate.substr(0, 200) + "'");
  }
  QuantizeCall call{};
  call.recipe = recipe;
  call.transpose = transpose;
  call.power_of_two = power_of_two;
  call.gated = gate == "silu";
  call.dtype = dtype.value_or(ScalarType::Float8_e4m3fn);
  check_x(x, call.gated);
  check_recipe(recipe, transpose, call.gated);
  if (call.dtype != ScalarType::Float8_e4m3fn && call.dtype != ScalarType::Float8_e5m2) {
    fail_option("dtype", "is not supported", "float8_e4m3fn or float8_e5m2",
                dtype_name(call.dtype));
  }
  const int64_t columns = call.gated ? x.sizes[1] / 2 : x.sizes[1];
  call.rows = transpose ? columns : x.sizes[0];
  call.k = transpose ? x.sizes[0] : columns;
  call.lay_out_scales();
  return call;
}

void QuantizeCall::lay_out_scales(std::optional<int64_t> own) {
  const int64_t blocks = own.value_or(ceil_div(k, kScaleBlock));
  scale_strides[0] = 1;
  if (recipe == kScaleRow) {
    scale = {2, {rows, 1}};
    scale_strides[1] = 1;
  } else if (recipe == kScaleBlock1x128) {
    scale = {2, {rows, blocks}};
    scale_strides[1] = std::max(rows, int64_t{1});
  } else {
    scale = {2, {blocks, ceil_div(rows, kScaleBlock)}};
    scale_strides[1] = std::max(blocks, int64_t{1});
  }
}

void check_described_quantize(const nlohmann::json& call) {
  DescribedTensors tensors;
  ScalarType dtype = ScalarType::Undefined;
  find_dtype(call.at("dtype").get<std::string>(), &dtype);
  check_quantize(tensors.view(call.at("x")), call.at("recipe").get<int64_t>(),
                 call.at("transpose").get<bool>(), call.at("power_of_two").get<bool>(),
                 call.at("gate").get<std::string>(), dtype);
}

}  // namespace torch_cubin
