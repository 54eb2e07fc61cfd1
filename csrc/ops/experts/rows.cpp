// The rows of experts and their sum, as ops of their own.
#include "cubin/error.h"
#include "ops/common/argument_checks.h"
#include "ops/common/aten.h"
#include "ops/common/stable_ops.h"
#include "ops/experts/experts.h"
#include "ops/matmul/elementwise.h"
#include "ops/matmul/matmul.h"

namespace torch_cubin {
namespace {

constexpr const char* kSumOp = "expert_sum";

void check_expert_sum(const TensorView& rows, const TensorView& places,
                      const std::optional<TensorView>& weights) {
  check_float_dtype(kSumOp, "rows", rows, "PyTorch's ops");
  check_side(kSumOp, "places", places, "rows", rows, ScalarType::Int);
  const bool fits = rows.dim == 2 && places.dim == 2 &&
                    (!weights || (weights->dim == 2 &&
                                  std::equal(places.sizes, places.sizes + 2, weights->sizes)));
  if (weights) {
    check_device(kSumOp, "weights", *weights, "rows", rows);
    check_float_dtype(kSumOp, "weights", *weights, "PyTorch's ops");
  }
  if (fits) return;
  fail({"input", kSumOp, "takes rows, and places and weights of each token",
        "2 dimensions each, and places and weights of one shape",
        rows.shape_text() + ", " + places.shape_text() +
            (weights ? " and " + weights->shape_text() : ""),
        ""});
}

}  // namespace

Tensor selected(const Tensor& x, const Tensor& tokens) {
  return call_aten("aten::index_select", detach(x), int64_t{0}, detach(tokens));
}

Tensor summable(const Tensor& weights) {
  const bool is_wide = element_size(TensorView(weights).dtype) > 4;
  return as_contiguous(is_wide ? narrow_to(detach(weights), ScalarType::Float) : weights);
}

Tensor expert_rows_cpu(const Tensor& x, const Tensor& tokens, const Tensor&, const Tensor&) {
  return selected(x, tokens);
}

Tensor expert_rows_cuda(const Tensor& x, const Tensor& tokens, const Tensor&, const Tensor&) {
  return selected(x, tokens);
}

Tensor expert_sum_cpu(const Tensor& rows, const Tensor&, const Tensor&, const Tensor& places,
                      const std::optional<Tensor>& weights) {
  const TensorView from(rows), at(places);
  check_expert_sum(from, at, view_of(weights));
  const int64_t tokens = at.sizes[0], k = at.sizes[1], columns = from.sizes[1];
  const auto doubles = [](const Tensor& tensor) {
    return torch::stable::clone(
        torch::stable::contiguous(narrow_to(detach(tensor), ScalarType::Double)));
  };
  // A last row of zeros for places that add nothing.
  const int64_t sizes[] = {from.sizes[0] + 1, columns};
  Tensor padded = empty_near(from, sizes, 2, ScalarType::Double);
  torch::stable::zero_(padded);
  Tensor own = torch::stable::narrow(padded, 0, 0, from.sizes[0]);
  torch::stable::copy_(own, detach(rows));
  const int64_t counts[] = {tokens, k};
  Tensor factors = weights ? doubles(*weights) : empty_near(at, counts, 2, ScalarType::Double);
  if (!weights) torch::stable::fill_(factors, 1);
  Tensor index = empty_near(at, counts, 2, ScalarType::Long);
  const Tensor whole = as_contiguous(places);
  const auto* place = static_cast<const int32_t*>(TensorView(whole).find_data());
  auto* factor = static_cast<double*>(factors.mutable_data_ptr());
  auto* to = static_cast<int64_t*>(index.mutable_data_ptr());
  for (int64_t i = 0; i < tokens * k; ++i) {
    const bool exists = place[i] >= 0 && place[i] < from.sizes[0];
    to[i] = exists ? place[i] : from.sizes[0];
    if (!exists) factor[i] = 0;  // NaN times zeros would be NaN
  }
  const Tensor all = selected(padded, torch::stable::view(index, {tokens * k}));
  const Tensor sums = matmul_cpu(torch::stable::view(factors, {tokens, 1, k}),
                                 torch::stable::view(all, {tokens, k, columns}));
  const Tensor out = torch::stable::view(sums, {tokens, columns});
  // Autograd refuses writes to a view that an op returns.
  if (from.dtype == ScalarType::Double) return torch::stable::clone(out);
  return narrow_to(out, from.dtype);
}

Tensor expert_sum_cuda(const Tensor& rows, const Tensor&, const Tensor&, const Tensor& places,
                       const std::optional<Tensor>& weights) {
  const TensorView from(rows), at(places);
  check_expert_sum(from, at, view_of(weights));
  const int64_t sizes[] = {at.sizes[0], from.sizes[1]};
  Tensor out = empty_cuda(sizes, 2, from.dtype, from.device_index);
  if (sizes[0] * sizes[1] == 0) return out;
  if (at.sizes[1] == 0 || from.sizes[0] == 0) {
    torch::stable::zero_(out);
    return out;
  }
  const Tensor whole = as_contiguous(places);
  std::optional<Tensor> by;
  if (weights) by = summable(*weights);
  sum_experts(device(from.device_index), as_contiguous(rows),
              static_cast<const int*>(TensorView(whole).data()), at.sizes[1], by, out);
  return out;
}

}  // namespace torch_cubin
