// Mixtures of experts: each token's rows through the two products of its experts, and their sum.
//
//   gate, up = the halves of x[t] @ w13[e].t(), or its even and odd columns where w13 is
//     interleaved, for each expert e = topk_ids[t, j]
//   out[t] = sum over j of topk_weights[t, j] * ((activation(gate) * up) @ w2[e].t())
//
// Ids that are no expert's are skipped, whatever their weights. Sums are in float32 at least, in
// the order of j.
#pragma once

#include <nlohmann/json_fwd.hpp>
#include <optional>
#include <string>
#include <tuple>
#include <vector>

#include "ops/common/shape.h"
#include "ops/grouped/call.h"
#include "pytorch/tensor.h"
#include "runtime/device.h"

namespace torch_cubin {

constexpr const char* kMoeOp = "moe";

// Throws [input] for arguments that do not fit together.
void check_moe(const TensorView& x, const TensorView& topk_ids, const TensorView& topk_weights,
               const TensorView& w13, const TensorView& w2);

// The same, of weights of another dtype than x's.
void check_moe_of(const TensorView& x, const TensorView& topk_ids, const TensorView& topk_weights,
                  const TensorView& w13, const TensorView& w2, ScalarType weights_dtype);

// The same, and is_of_float8(), for a call that Python describes: {"tensors": {"x": tensor, ...},
// "activation": "silu", "interleaved": false, "recipe": "none"}.
void check_described_moe(const nlohmann::json& call);

Tensor moe_cpu(const Tensor& x, const Tensor& topk_ids, const Tensor& topk_weights,
               const Tensor& w13, const Tensor& w2, const std::string& activation, bool interleaved,
               const std::string& recipe);
decltype(moe_cpu) moe_cuda;

// Whether a recipe is "block": the products, forward and backward, are of 8-bit floats, with scales
// of 1x128 of rows and of 128x128 of each expert's weights, which are quantised in the call
// (float8.h). Throws [input] for other recipes than that and "none", and for calls that it does
// not take.
// `copies`: given, which other recipes do not take.
bool is_of_float8(const std::string& recipe, const Gating& gating, const TensorView& x,
                  bool copies = false);

// silu as the gate of weights of float8_e4m3fn, w13 (experts, 2 * inner, hidden) and w2, with
// float32 scales of 128x128 blocks: (experts, ceil(outputs / 128), ceil(inputs / 128)). Rows are
// quantised with scales of 1x128.
void check_described_moe_float8(const nlohmann::json& tensors);
Tensor moe_float8_cpu(const Tensor& x, const Tensor& topk_ids, const Tensor& topk_weights,
                      const Tensor& w13, const Tensor& w13_scale, const Tensor& w2,
                      const Tensor& w2_scale);
decltype(moe_float8_cpu) moe_float8_cuda;

// ---- with derivatives ---------------------------------------------------------------------------

// What the derivative needs: the gates' and ups' sums, rounded, (rows, 2 * inner), in w13's order
// of columns and the experts' order of rows, and the latter (ExpertOrder).
struct MoeKept {
  Tensor before, order;
};

// Copies of 8 bits that a call of the recipe "block" need not make, as float8_copies() gives them:
// data and scale of w13's, then of w2's. Of the weights for the forward, of their matrices'
// transposes for the backward.
using MoeCopies = std::optional<std::vector<Tensor>>;

// Data and scale of matrices, by 128x128 of each, and of their transposes.
std::tuple<Tensor, Tensor, Tensor, Tensor> float8_copies_cpu(const Tensor& weight);
std::tuple<Tensor, Tensor, Tensor, Tensor> float8_copies_cuda(const Tensor& weight);

// The layer, and what it keeps.
std::tuple<Tensor, Tensor, Tensor> moe_forward_cpu(const Tensor& x, const Tensor& topk_ids,
                                                   const Tensor& topk_weights, const Tensor& w13,
                                                   const Tensor& w2, const std::string& activation,
                                                   bool interleaved, const std::string& recipe,
                                                   const MoeCopies& copies);
std::tuple<Tensor, Tensor, Tensor> moe_forward_cuda(const Tensor& x, const Tensor& topk_ids,
                                                    const Tensor& topk_weights, const Tensor& w13,
                                                    const Tensor& w2, const std::string& activation,
                                                    bool interleaved, const std::string& recipe,
                                                    const MoeCopies& copies);

// Of x, topk_weights, w13 and w2. Those that are not asked for are empty; those of weights have the
// weights' layout (is_stored_transposed()), contiguous.
using MoeGradients = std::tuple<Tensor, Tensor, Tensor, Tensor>;

void check_moe_backward(const TensorView& grad, const TensorView& x, const TensorView& topk_weights,
                        const TensorView& w13, const TensorView& w2, const TensorView& before,
                        const TensorView& order);

MoeGradients moe_backward_cpu(const Tensor& grad, const Tensor& x, const Tensor& topk_weights,
                              const Tensor& w13, const Tensor& w2, const Tensor& before,
                              const Tensor& order, const std::string& activation, bool interleaved,
                              bool of_x, bool of_w13, bool of_w2, const std::string& recipe,
                              const MoeCopies& copies);
decltype(moe_backward_cpu) moe_backward_cuda;

// Whether matrices are contiguous along dim 1, and not along dim 2.
bool is_stored_transposed(const TensorView& weight);

// ---- for layers that are composed of ops, which have derivatives -------------------------------

// out[i] = x[tokens[i]]. `order` and `places` (as below) are for the derivative.
Tensor expert_rows_cpu(const Tensor& x, const Tensor& tokens, const Tensor& order,
                       const Tensor& places);
decltype(expert_rows_cpu) expert_rows_cuda;

// out[t] = sum over j of weights[t, j] * rows[places[t, j]], without weights of the rows. A place
// of -1 adds nothing, whatever its weight. `places` is int32.
Tensor expert_sum_cpu(const Tensor& rows, const Tensor& tokens, const Tensor& order,
                      const Tensor& places, const std::optional<Tensor>& weights);
decltype(expert_sum_cpu) expert_sum_cuda;

// ---- the parts of moe_cuda ----------------------------------------------------------------------

// The order of tokens by their experts (kernels/experts/order_params.h): tokens and places of all
// rows, and the experts' ends, int32, one after the other in one tensor.
struct ExpertOrder {
  ExpertOrder(const Tensor& memory, int64_t rows);

  // What `tokens` and `ends` point to.
  Tensor tokens_tensor() const;
  Tensor ends_tensor(int64_t experts) const;

  Tensor memory;
  int *tokens, *places, *ends;
};

constexpr int64_t expert_order_size(int64_t rows, int64_t experts) { return 2 * rows + experts; }

// The same on the CPU, and its parts; ids are (tokens, k), of any layout.
Tensor order_on_host(const Tensor& topk_ids, int64_t experts);
struct HostOrder {
  HostOrder(const Tensor& memory, int64_t rows, int64_t experts);

  Tensor tokens, places, ends;
};

// Throws [no_kernel] for more ids than kernels, which count in 32 bits, take.
void check_moe_rows(int64_t rows);

// `ids`: contiguous, (tokens, k), not empty.
ExpertOrder order_experts(const Device& device, const TensorView& ids, int64_t experts);

// Rows of gates and ups to gated rows; with `backward` to gradients
// (kernels/experts/gate_params.h). All tensors are contiguous.
struct ExpertGateBackward {
  Tensor grad, weights, before_grad, weights_grad;
};
struct ExpertGate {
  Tensor before;
  const int* places;
  int64_t slots;
  Gating gating;
  Tensor inside;
  std::optional<ExpertGateBackward> backward;
};
void gate_experts(const Device& device, const ExpertGate& gate);

// out = the sum of rows by the weights, if any (kernels/experts/sum_params.h); places are (tokens,
// k). All are contiguous.
void sum_experts(const Device& device, const Tensor& rows, const int* places, int64_t k,
                 const std::optional<Tensor>& weights, const Tensor& out);

// x[numbers[i]] for each row i, zeros for numbers that x does not have.
Tensor gathered_rows(const Device& device, const Tensor& x, const int* numbers, int64_t rows);

// x[index], by ATen.
Tensor selected(const Tensor& x, const Tensor& index);

// The weights as the kernel takes them: contiguous, float32 or 16-bit.
Tensor summable(const Tensor& weights);

}  // namespace torch_cubin
