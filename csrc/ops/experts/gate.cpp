// Launches csrc/kernels/experts/gate.cu.
#include "kernels/experts/gate_params.h"
#include "ops/common/shape.h"
#include "ops/experts/experts.h"
#include "ops/experts/kernels.h"

namespace torch_cubin {
namespace {

constexpr int64_t kSlots = 8;  // of a block

// The numbers of both are the same.
static_assert(int{kGateNone} == kActivationNone && int{kGateRelu} == kActivationRelu &&
              int{kGateGelu} == kActivationGelu && int{kGateGeluTanh} == kActivationGeluTanh &&
              int{kGateSilu} == kActivationSilu);

}  // namespace

void gate_experts(const Device& device, const ExpertGate& gate) {
  const TensorView before(gate.before), inside(gate.inside);
  ExpertGateParams params{};
  params.before = before.data();
  params.places = gate.places;
  params.inside = gate.inside.mutable_data_ptr();
  params.slots = static_cast<int>(gate.slots);
  params.row_count = static_cast<int>(inside.sizes[0]);
  params.inner = static_cast<int>(inside.sizes[1]);
  const int64_t vector = expert_vector(before.dtype);
  params.elements = static_cast<int>(inside.sizes[1] % vector == 0 ? vector : 1);
  params.activation = gate.gating.activation;
  params.interleaved = gate.gating.interleaved ? 1 : 0;
  if (gate.backward) {
    const ExpertGateBackward& backward = *gate.backward;
    const TensorView weights(backward.weights);
    params.grad = TensorView(backward.grad).data();
    params.weights = weights.data();
    params.weights_type = type_of_weights(weights.dtype);
    params.before_grad = backward.before_grad.mutable_data_ptr();
    params.weights_grad = static_cast<float*>(backward.weights_grad.mutable_data_ptr());
  }
  const ExpertKernel kind = gate.backward ? kGateExpertsBackward : kGateExperts;
  launch(expert_kernel(kind, before.dtype, device), {ceil_div(gate.slots, kSlots)}, device, params);
}

}  // namespace torch_cubin
