// moe on the CPU, expert by expert, by the references of products.
#include <vector>

#include "ops/common/aten.h"
#include "ops/common/stable_ops.h"
#include "ops/experts/experts.h"
#include "ops/matmul/checks.h"
#include "ops/matmul/elementwise.h"
#include "ops/matmul/fused.h"
#include "ops/matmul/matmul.h"

namespace torch_cubin {
namespace {

Tensor contiguous_as(const Tensor& tensor, ScalarType dtype) {
  return torch::stable::contiguous(narrow_to(detach(tensor), dtype));
}

Tensor index_of(const std::vector<int64_t>& numbers, const TensorView& like) {
  const int64_t size = static_cast<int64_t>(numbers.size());
  const Tensor out = empty_near(like, &size, 1, ScalarType::Long);
  std::copy(numbers.begin(), numbers.end(), static_cast<int64_t*>(out.mutable_data_ptr()));
  return out;
}

}  // namespace

Tensor moe_cpu(const Tensor& x, const Tensor& topk_ids, const Tensor& topk_weights,
               const Tensor& w13, const Tensor& w2, const std::string& activation) {
  const TensorView rows(x), second(w2);
  check_activation(activation);
  check_moe(rows, TensorView(topk_ids), TensorView(topk_weights), TensorView(w13), second);
  const int64_t tokens = rows.sizes[0], hidden = rows.sizes[1], inner = second.sizes[2];
  const int64_t k = TensorView(topk_ids).sizes[1];
  const Tensor ids = contiguous_as(topk_ids, ScalarType::Long);
  const auto* id = static_cast<const int64_t*>(TensorView(ids).find_data());
  const int64_t counts[] = {tokens, k};
  Tensor flat = empty_near(rows, counts, 2, ScalarType::Int);  // of each id
  auto* place = static_cast<int32_t*>(flat.mutable_data_ptr());

  std::vector<std::vector<int64_t>> places(static_cast<size_t>(second.sizes[0]));
  for (int64_t i = 0; i < tokens * k; ++i) {
    const bool exists = id[i] >= 0 && id[i] < second.sizes[0];
    place[i] = exists ? static_cast<int32_t>(i) : -1;
    if (exists) places[static_cast<size_t>(id[i])].push_back(i);
  }
  const int64_t sizes[] = {tokens * k, hidden};
  Tensor results = empty_near(rows, sizes, 2, rows.dtype);
  torch::stable::zero_(results);
  for (size_t expert = 0; expert < places.size(); ++expert) {
    if (places[expert].empty()) continue;
    const Tensor index = index_of(places[expert], rows);
    std::vector<int64_t> own = places[expert];
    for (int64_t& place : own) place /= k;
    const auto number = static_cast<int64_t>(expert);
    const Tensor first = torch::stable::select(detach(w13), 0, number);
    const Tensor inside = linear_glu_cpu(
        call_aten("aten::index_select", detach(x), int64_t{0}, index_of(own, rows)),
        torch::stable::narrow(const_cast<Tensor&>(first), 0, 0, inner),
        torch::stable::narrow(const_cast<Tensor&>(first), 0, inner, inner), activation);
    const Tensor result =
        linear_cpu(inside, torch::stable::select(detach(w2), 0, number), std::nullopt);
    results = call_aten("aten::index_copy", results, int64_t{0}, index, result);
  }
  return expert_sum_cpu(results, ids, ids, flat, topk_weights);
}

}  // namespace torch_cubin
