// The checks of moe's arguments, the same on every device.
#include "ops/matmul/checks.h"

#include <nlohmann/json.hpp>

#include "cubin/error.h"
#include "ops/common/argument_checks.h"
#include "ops/experts/experts.h"
#include "pytorch/described_tensor.h"

namespace torch_cubin {
namespace {

void check_sizes_of(const char* name, const TensorView& view, const std::vector<int64_t>& sizes) {
  const auto count = static_cast<int64_t>(sizes.size());
  if (view.dim == count && std::equal(sizes.begin(), sizes.end(), view.sizes)) return;
  fail({"input", argument_text(kMoeOp, name), "has a wrong shape", tuple_text(sizes.data(), count),
        view.shape_text(), ""});
}

void check_rank(const char* name, const TensorView& view, int64_t rank) {
  if (view.dim == rank) return;
  fail({"input", argument_text(kMoeOp, name), "has a wrong rank", counted(rank, "dimension"),
        view.shape_text(), ""});
}

// All arguments but x's own rank and the ids.
void check_weights(const TensorView& x, int64_t k, const TensorView& topk_weights,
                   const TensorView& w13, const TensorView& w2, ScalarType weights_dtype) {
  if (weights_dtype == x.dtype) {
    check_like(kMoeOp, "w13", w13, "x", x);
    check_like(kMoeOp, "w2", w2, "x", x);
  } else {
    check_side(kMoeOp, "w13", w13, "x", x, weights_dtype);
    check_side(kMoeOp, "w2", w2, "x", x, weights_dtype);
  }
  check_rank("w2", w2, 3);
  check_device(kMoeOp, "topk_weights", topk_weights, "x", x);
  check_float_dtype(kMoeOp, "topk_weights", topk_weights, "PyTorch's products");
  check_sizes_of("topk_weights", topk_weights, {x.sizes[0], k});
  const int64_t experts = w2.sizes[0];
  if (experts == 0) {
    fail({"input", argument_text(kMoeOp, "w2"), "has no expert", "at least one matrix",
          w2.shape_text(), ""});
  }
  check_sizes_of("w13", w13, {experts, 2 * w2.sizes[2], x.sizes[1]});
  check_sizes_of("w2", w2, {experts, x.sizes[1], w2.sizes[2]});
}

}  // namespace

void check_moe(const TensorView& x, const TensorView& topk_ids, const TensorView& topk_weights,
               const TensorView& w13, const TensorView& w2) {
  check_moe_of(x, topk_ids, topk_weights, w13, w2, x.dtype);
}

void check_moe_of(const TensorView& x, const TensorView& topk_ids, const TensorView& topk_weights,
                  const TensorView& w13, const TensorView& w2, ScalarType weights_dtype) {
  check_float_dtype(kMoeOp, "x", x, "PyTorch's products");
  check_rank("x", x, 2);
  check_rank("topk_ids", topk_ids, 2);
  check_device(kMoeOp, "topk_ids", topk_ids, "x", x);
  if (topk_ids.dtype != ScalarType::Int && topk_ids.dtype != ScalarType::Long) {
    fail_dtype(kMoeOp, "topk_ids", "int32 or int64", topk_ids);
  }
  check_sizes_of("topk_ids", topk_ids, {x.sizes[0], topk_ids.sizes[1]});
  check_weights(x, topk_ids.sizes[1], topk_weights, w13, w2, weights_dtype);
}

void check_moe_backward(const TensorView& grad, const TensorView& x, const TensorView& topk_weights,
                        const TensorView& w13, const TensorView& w2, const TensorView& before,
                        const TensorView& order) {
  check_rank("x", x, 2);
  check_rank("topk_weights", topk_weights, 2);
  check_weights(x, topk_weights.sizes[1], topk_weights, w13, w2, x.dtype);
  const int64_t rows = topk_weights.sizes[0] * topk_weights.sizes[1];
  check_like(kMoeOp, "grad", grad, "x", x);
  check_like(kMoeOp, "before", before, "x", x);
  check_side(kMoeOp, "order", order, "x", x, ScalarType::Int);
  check_sizes_of("grad", grad, {x.sizes[0], w2.sizes[1]});
  check_sizes_of("before", before, {rows, 2 * w2.sizes[2]});
  check_sizes_of("order", order, {expert_order_size(rows, w2.sizes[0])});
}

bool is_of_float8(const std::string& recipe, const Gating& gating, const TensorView& x,
                  bool copies) {
  if (recipe == "none" && copies) {
    fail({"input", argument_text(kMoeOp, "copies"), "is given without a recipe", "None", "tensors",
          ""});
  }
  if (recipe == "none") return false;
  if (recipe != "block") {
    fail({"input", argument_text(kMoeOp, "recipe"), "is not known", "'none' or 'block'",
          "'" + recipe.substr(0, 200) + "'", ""});
  }
  if (gating.activation != kActivationSilu || gating.interleaved) {
    fail({"input", argument_text(kMoeOp, gating.interleaved ? "interleaved" : "activation"),
          "is not supported with the recipe 'block'", "gates above ups, and 'silu'", "another",
          ""});
  }
  if (x.dtype == ScalarType::Double) {
    fail_dtype(kMoeOp, "x", "float16, bfloat16 or float32", x);
  }
  return true;
}

bool is_stored_transposed(const TensorView& weight) {
  return weight.strides[1] == 1 && weight.strides[2] != 1;
}

void check_described_moe(const nlohmann::json& call) {
  DescribedTensors described;
  const nlohmann::json& tensors = call.at("tensors");
  const auto get = [&](const char* name) { return described.view(tensors.at(name)); };
  check_moe(get("x"), get("topk_ids"), get("topk_weights"), get("w13"), get("w2"));
  const Activation activation = check_activation(call.at("activation").get<std::string>(), kMoeOp);
  is_of_float8(call.at("recipe").get<std::string>(),
               {activation, call.at("interleaved").get<bool>()}, get("x"));
}

}  // namespace torch_cubin
