// moe with weights of 8-bit floats: rows are quantised before each product, the second time with
// their gate, which scaled_gated_matmul does.
#include "ops/experts/float8.h"

#include <algorithm>
#include <nlohmann/json.hpp>

#include "cubin/error.h"
#include "ops/common/argument_checks.h"
#include "ops/common/aten.h"
#include "ops/common/stable_ops.h"
#include "ops/experts/experts.h"
#include "pytorch/described_tensor.h"

namespace torch_cubin {
namespace {

// The second product's rows.
Tensor products(const Float8Steps& steps, const Tensor& x, const Tensor& tokens,
                const Float8Weight& first, const Float8Weight& second, const Tensor& ends) {
  const ScalarType dtype = TensorView(x).dtype;
  const Quantized inside = float8_gated_rows(steps, steps.rows(x, tokens), first, ends, dtype);
  return float8_product(steps, inside, second, ends, dtype);
}

void check_scales(const char* name, const TensorView& scale, const TensorView& weight) {
  const int64_t sizes[] = {weight.sizes[0], ceil_div(weight.sizes[1], kScaleBlock),
                           ceil_div(weight.sizes[2], kScaleBlock)};
  check_device(kMoeOp, name, scale, "x", weight);
  if (scale.dtype != ScalarType::Float) fail_dtype(kMoeOp, name, "float32", scale);
  if (scale.dim == 3 && std::equal(sizes, sizes + 3, scale.sizes)) return;
  fail({"input", argument_text(kMoeOp, name), "has a wrong shape", tuple_text(sizes, 3),
        scale.shape_text(), ""});
}

struct Float8Sizes {
  Float8Sizes(const TensorView& x, const TensorView& ids, const TensorView& weights,
              const TensorView& first, const TensorView& first_scale, const TensorView& second,
              const TensorView& second_scale)
      : view(x) {
    check_moe_of(x, ids, weights, first, second, ScalarType::Float8_e4m3fn);
    check_scales("w13_scale", first_scale, first);
    check_scales("w2_scale", second_scale, second);
    tokens = ids.sizes[0];
    k = ids.sizes[1];
    rows = tokens * k;
    experts = second.sizes[0];
    is_empty = rows == 0 || second.sizes[1] == 0 || second.sizes[2] == 0;
  }

  TensorView view;
  int64_t tokens, k, rows, experts;
  bool is_empty;  // without products; results are zero
};

Tensor zeros_like(const TensorView& view) {
  Tensor out = empty_near(view, view.sizes, view.dim, view.dtype);
  torch::stable::zero_(out);
  return out;
}

// The copy of a weight, or of its transposes, that begins at `at`.
Float8Weight copy_at(const std::vector<Tensor>& copies, size_t at, const char* name,
                     const TensorView& weight, bool transposed) {
  const TensorView data(copies[at]), scale(copies[at + 1]);
  const int64_t sizes[] = {weight.sizes[0], weight.sizes[transposed ? 2 : 1],
                           weight.sizes[transposed ? 1 : 2]};
  check_side(kMoeOp, "copies", data, name, weight, ScalarType::Float8_e4m3fn);
  if (data.dim != 3 || !std::equal(sizes, sizes + 3, data.sizes)) {
    fail({"input", argument_text(kMoeOp, "copies"), "has a wrong shape", tuple_text(sizes, 3),
          data.shape_text(), ""});
  }
  check_scales("copies", scale, data);
  return {copies[at], copies[at + 1]};
}

std::tuple<Tensor, Tensor, Tensor, Tensor> copies_of(const Float8Steps& steps,
                                                     const Tensor& weight) {
  const TensorView view(weight);
  if (view.dim != 3) {
    fail({"input", argument_text("float8_copies", "weight"), "has a wrong rank", "3 dimensions",
          view.shape_text(), ""});
  }
  const auto [own, transposed] = float8_copies(steps, weight);
  return {own.data, own.scale, transposed.data, transposed.scale};
}

}  // namespace

Float8Given::Float8Given(const std::optional<std::vector<Tensor>>& copies, bool transposed,
                         const TensorView& first, const TensorView& second) {
  if (!copies) return;
  if (copies->size() != 4) {
    fail({"input", argument_text(kMoeOp, "copies"), "has a wrong number of tensors",
          "data and scale of two weights", std::to_string(copies->size()), ""});
  }
  w13 = copy_at(*copies, 0, "w13", first, transposed);
  w2 = copy_at(*copies, 2, "w2", second, transposed);
}

void check_described_moe_float8(const nlohmann::json& tensors) {
  DescribedTensors described;
  const auto get = [&](const char* name) { return described.view(tensors.at(name)); };
  Float8Sizes(get("x"), get("topk_ids"), get("topk_weights"), get("w13"), get("w13_scale"),
              get("w2"), get("w2_scale"));
}

Tensor moe_float8_cpu(const Tensor& x, const Tensor& topk_ids, const Tensor& topk_weights,
                      const Tensor& w13, const Tensor& w13_scale, const Tensor& w2,
                      const Tensor& w2_scale) {
  const Float8Sizes sizes{TensorView(x),       TensorView(topk_ids),  TensorView(topk_weights),
                          TensorView(w13),     TensorView(w13_scale), TensorView(w2),
                          TensorView(w2_scale)};
  if (sizes.is_empty) return zeros_like(sizes.view);
  const HostOrder order(order_on_host(topk_ids, sizes.experts), sizes.rows, sizes.experts);
  const Tensor results =
      products(kFloat8OnHost, x, order.tokens, {w13, w13_scale}, {w2, w2_scale}, order.ends);
  const Tensor places = torch::stable::view(order.places, {sizes.tokens, sizes.k});
  return expert_sum_cpu(results, order.tokens, order.tokens, places, topk_weights);
}

Tensor moe_float8_cuda(const Tensor& x, const Tensor& topk_ids, const Tensor& topk_weights,
                       const Tensor& w13, const Tensor& w13_scale, const Tensor& w2,
                       const Tensor& w2_scale) {
  const Float8Sizes sizes{TensorView(x),       TensorView(topk_ids),  TensorView(topk_weights),
                          TensorView(w13),     TensorView(w13_scale), TensorView(w2),
                          TensorView(w2_scale)};
  if (sizes.is_empty) return zeros_like(sizes.view);
  const TensorView& view = sizes.view;
  const Device& gpu = device(view.device_index);
  const Tensor ids = as_contiguous(topk_ids);
  const ExpertOrder order = order_experts(gpu, TensorView(ids), sizes.experts);
  const Tensor results = products(kFloat8OnCuda, x, order.tokens_tensor(), {w13, w13_scale},
                                  {w2, w2_scale}, order.ends_tensor(sizes.experts));
  Tensor out = empty_cuda(view.sizes, view.dim, view.dtype, view.device_index);
  sum_experts(gpu, results, order.places, sizes.k, summable(topk_weights), out);
  return out;
}

std::tuple<Tensor, Tensor, Tensor, Tensor> float8_copies_cpu(const Tensor& weight) {
  return copies_of(kFloat8OnHost, weight);
}

std::tuple<Tensor, Tensor, Tensor, Tensor> float8_copies_cuda(const Tensor& weight) {
  return copies_of(kFloat8OnCuda, weight);
}

}  // namespace torch_cubin
