// Launches csrc/kernels/experts/sum.cu.
#include "kernels/experts/sum_params.h"
#include "ops/common/aten.h"
#include "ops/common/shape.h"
#include "ops/experts/experts.h"
#include "ops/experts/kernels.h"

namespace torch_cubin {
namespace {

constexpr int64_t kSumThreads = 256;

}  // namespace

void sum_experts(const Device& device, const Tensor& rows, const int* places, int64_t k,
                 const std::optional<Tensor>& weights, const Tensor& out) {
  const TensorView from(rows), to(out);
  ExpertSumParams params{};
  params.rows = from.data();
  params.row_count = static_cast<int>(from.sizes[0]);
  params.places = places;
  params.out = out.mutable_data_ptr();
  params.tokens = static_cast<int>(to.sizes[0]);
  params.columns = static_cast<int>(to.sizes[1]);
  params.k = static_cast<int>(k);
  const int64_t vector = expert_vector(to.dtype);
  const bool vectors =
      to.sizes[1] % vector == 0 && reinterpret_cast<uintptr_t>(from.data()) % 16 == 0;
  const int64_t elements = vectors ? vector : 1;
  params.elements = static_cast<int>(elements);
  if (weights) {
    const TensorView by(*weights);
    params.weights = by.data();
    params.weights_type = type_of_weights(by.dtype);
  } else {
    params.weights_type = kWeightsOne;
  }
  const int64_t units = to.sizes[0] * (to.sizes[1] / elements);
  launch(expert_kernel(kSumExperts, to.dtype, device), {ceil_div(units, kSumThreads)}, device,
         params);
}

Tensor gathered_rows(const Device& device, const Tensor& x, const int* numbers, int64_t rows) {
  const Tensor whole = as_contiguous(x);
  const TensorView from(whole);
  const int64_t sizes[] = {rows, from.sizes[1]};
  Tensor out = empty_cuda(sizes, 2, from.dtype, from.device_index);
  sum_experts(device, whole, numbers, 1, std::nullopt, out);
  return out;
}

}  // namespace torch_cubin
