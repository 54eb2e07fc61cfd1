// The products for graphs on CUDA: one kernel if sm90_fused.cpp supports them, else composed.
#include "ops/matmul/fused.h"

#include "ops/common/batch_invariant.h"
#include "ops/common/stable_ops.h"
#include "ops/matmul/checks.h"
#include "ops/matmul/elementwise.h"
#include "ops/matmul/matmul.h"
#include "ops/matmul/sm90_fused.h"
#include "runtime/device.h"

namespace torch_cubin {
namespace {

char* data_of(const Tensor& tensor) { return static_cast<char*>(tensor.mutable_data_ptr()); }

// A layer, and whether the fused kernels support it. Its output is not allocated here: only some
// layers have one.
struct LayerCall {
  LayerCall(const TensorView& x, const TensorView& weight, const std::optional<TensorView>& bias,
            const Shape& shape) {
    if (shape.numel() == 0 || x.sizes[x.dim - 1] == 0) return;
    layer.problem = linear_problem(x, weight);
    layer.operands.a = static_cast<const char*>(x.data());
    layer.operands.b = static_cast<const char*>(weight.data());
    if (bias) {
      layer.operands.bias = static_cast<const char*>(bias->data());
      layer.operands.bias_stride =
          bias->dim == 1 && bias->sizes[0] == layer.problem.n ? bias->strides[0] : 0;
    }
    fused = takes_fused(device(x.device_index), layer);
  }

  void write_to(const Tensor& out) { layer.operands.c = data_of(out); }

  FusedLayer layer;
  bool fused = false;
};

// The gated product, to `to` if it is given; also writes its two products if `gate_out` is given.
// False if it must be composed.
bool try_gated(const Tensor& input, const Tensor& gate, const Tensor& up, Activation activation,
               const Tensor* to, Tensor& out, Tensor* gate_out, Tensor* up_out) {
  const TensorView x(input), g(gate), u(up);
  const Shape shape = check_linear_glu(x, g, u);
  // Composed results are rounded more often, and the number of rows would decide which of the two
  // runs.
  if (batch_invariant()) return false;
  LayerCall of_gate(x, g, {}, shape), of_up(x, u, {}, shape);
  if (!of_gate.fused || !of_up.fused) return false;
  of_gate.layer.problem.activation = activation;
  const auto same = [&] { return empty_cuda(shape.sizes, shape.dim, x.dtype, x.device_index); };
  const bool aux = gate_out != nullptr;
  if (aux) {
    *gate_out = same();
    *up_out = same();
  }
  out = to != nullptr ? *to : same();
  of_gate.write_to(out);
  return run_gated(device(x.device_index), of_gate.layer, of_up.layer,
                   aux ? data_of(*gate_out) : nullptr, aux ? data_of(*up_out) : nullptr);
}

}  // namespace

std::vector<Tensor> linears_one_by_one(const Tensor& input, const std::vector<Tensor>& weights,
                                       const OptionalTensors& biases, LinearFunction* linear) {
  std::vector<Tensor> out;
  out.reserve(weights.size());
  check_all_linears(input, weights, biases);
  for (size_t i = 0; i < weights.size(); ++i) {
    out.push_back(linear(input, weights[i], biases.empty() ? std::nullopt : biases[i]));
  }
  return out;
}

void check_all_linears(const Tensor& input, const std::vector<Tensor>& weights,
                       const OptionalTensors& biases) {
  const TensorView x(input);
  check_linears_counts(static_cast<int64_t>(weights.size()), static_cast<int64_t>(biases.size()));
  for (size_t i = 0; i < weights.size(); ++i) {
    const auto bias = biases.empty() ? std::nullopt : view_of(biases[i]);
    check_linears(x, TensorView(weights[i]), bias, static_cast<int64_t>(i));
  }
}

Tensor linear_glu_cuda(const Tensor& input, const Tensor& gate, const Tensor& up,
                       const std::string& activation) {
  const Activation known = check_activation(activation);
  Tensor out = input;
  if (try_gated(input, gate, up, known, nullptr, out, nullptr, nullptr)) return out;
  const Tensor activated = linear_activation_cuda(input, gate, {}, activation);
  return multiplied(activated, linear_cuda(input, up, {}));
}

void linear_glu_out_cuda(const Tensor& input, const Tensor& gate, const Tensor& up,
                         const std::string& activation, const Tensor& out) {
  const Activation known = check_activation(activation);
  Tensor to = out;
  if (try_gated(input, gate, up, known, &out, to, nullptr, nullptr)) return;
  linear_activation_out_cuda(input, gate, {}, activation, out);
  torch::stable::copy_(to, multiplied(out, linear_cuda(input, up, {})));
}

std::tuple<Tensor, Tensor, Tensor> linear_glu_aux_cuda(const Tensor& input, const Tensor& gate,
                                                       const Tensor& up,
                                                       const std::string& activation) {
  const Activation known = check_activation(activation);
  Tensor out = input, gate_out = input, up_out = input;
  if (try_gated(input, gate, up, known, nullptr, out, &gate_out, &up_out)) {
    return {out, gate_out, up_out};
  }
  const auto [activated, of_gate] = linear_activation_aux_cuda(input, gate, {}, activation);
  const Tensor of_up = linear_cuda(input, up, {});
  return {multiplied(activated, of_up), of_gate, of_up};
}

std::vector<Tensor> linears_cuda(const Tensor& input, const std::vector<Tensor>& weights,
                                 const OptionalTensors& biases) {
  check_all_linears(input, weights, biases);
  const TensorView x(input);
  const Device& gpu = device(x.device_index);
  std::vector<Tensor> out;
  out.reserve(weights.size());
  std::vector<FusedLayer> group;  // the layers of one launch
  std::vector<size_t> composed, grouped;
  const auto run_group = [&] {
    const auto count = static_cast<int>(group.size());
    if (count < 2 || !run_layers(gpu, group.data(), count)) {
      composed.insert(composed.end(), grouped.begin(), grouped.end());
    }
    group.clear();
    grouped.clear();
  };
  for (size_t i = 0; i < weights.size(); ++i) {
    const auto bias = biases.empty() ? std::nullopt : view_of(biases[i]);
    const TensorView weight(weights[i]);
    const Shape shape = check_linears(x, weight, bias, static_cast<int64_t>(i));
    LayerCall call(x, weight, bias, shape);
    out.push_back(empty_cuda(shape.sizes, shape.dim, x.dtype, x.device_index));
    if (!call.fused) {
      composed.push_back(i);
      continue;
    }
    call.write_to(out.back());
    group.push_back(call.layer);
    grouped.push_back(i);
    if (group.size() == kFusedWeights) run_group();
  }
  run_group();
  for (const size_t i : composed) {
    const auto bias = biases.empty() ? std::nullopt : biases[i];
    linear_activation_out_cuda(input, weights[i], bias, "none", out[i]);
  }
  return out;
}

std::tuple<Tensor, Tensor> linear_activation_aux_cuda(const Tensor& input, const Tensor& weight,
                                                      const std::optional<Tensor>& bias,
                                                      const std::string& activation) {
  const Activation known = check_activation(activation);
  const TensorView x(input), w(weight);
  const std::optional<TensorView> b = view_of(bias);
  const Shape shape = check_linear(x, w, b);
  if (w.dim == 2) {
    LayerCall call(x, w, b, shape);
    if (call.fused) {
      call.layer.problem.activation = known;
      const auto same = [&] { return empty_cuda(shape.sizes, shape.dim, x.dtype, x.device_index); };
      const Tensor out = same(), aux = same();
      call.write_to(out);
      if (run_activation_aux(device(x.device_index), call.layer, data_of(aux))) return {out, aux};
    }
  }
  // As the kernel above does, and linear_activation(): neither the number of rows nor whether a
  // derivative is needed may then change a result.
  if (batch_invariant() && known != kActivationNone) {
    return linear_both_cuda(input, weight, bias, activation);
  }
  const Tensor aux = linear_cuda(input, weight, bias);
  return {activated_copy(aux, known), aux};
}

Tensor linear_activation_backward_cuda(const Tensor& grad, const Tensor& weight, const Tensor& aux,
                                       const std::string& activation) {
  check_linear_activation_backward(TensorView(grad), TensorView(weight), TensorView(aux));
  const Activation known = check_activation(activation);
  return apply_activation_backward(matmul_cuda(grad, weight), aux, known);
}

}  // namespace torch_cubin
