#include "ops/matmul/out.h"

#include <algorithm>
#include <initializer_list>

#include "cubin/error.h"
#include "ops/common/stable_ops.h"
#include "ops/matmul/checks.h"
#include "ops/matmul/fused.h"
#include "ops/matmul/matmul.h"
#include "pytorch/autograd_state.h"
#include "pytorch/contiguous.h"
#include "pytorch/overlap.h"

namespace torch_cubin {
namespace {

[[noreturn]] void fail_out(const char* problem, const std::string& expected,
                           const std::string& got) {
  fail({"input", "argument 'out'", problem, expected, got, ""});
}

void check_out(const Tensor& out, const Shape& shape, const TensorView& like,
               std::initializer_list<const Tensor*> operands) {
  const TensorView to(out);
  if (to.dtype != like.dtype) {
    fail_out("has the wrong dtype", dtype_name(like.dtype), dtype_name(to.dtype));
  }
  if (to.device_type != like.device_type || to.device_index != like.device_index) {
    fail_out("is on the wrong device", like.device_text(), to.device_text());
  }
  if (to.dim != shape.dim || !std::equal(to.sizes, to.sizes + to.dim, shape.sizes)) {
    fail_out("has the wrong shape", tuple_text(shape.sizes, shape.dim), to.shape_text());
  }
  if (!is_contiguous(to.sizes, to.strides, to.dim)) {
    fail_out("is not contiguous", "a contiguous tensor",
             "strides " + tuple_text(to.strides, to.dim));
  }
  const MemoryFacts own = memory_of(to);
  for (const Tensor* operand : operands) {
    if (operand != nullptr && share_memory(own, memory_of(TensorView(*operand)))) {
      fail_out("shares memory with an operand", "memory of its own", "an operand's");
    }
  }
}

const Tensor* address_of(const std::optional<Tensor>& tensor) {
  return tensor ? &*tensor : nullptr;
}

}  // namespace

Tensor matmul_to(const Tensor& self, const Tensor& other, Tensor out) {
  const TensorView a(self), b(other);
  check_out(out, check_matmul(a, b), a, {&self, &other});
  a.on_cuda() ? matmul_out_cuda(self, other, out) : matmul_out_cpu(self, other, out);
  bump_version(out.get());
  return out;
}

Tensor linear_to(const Tensor& input, const Tensor& weight, const std::optional<Tensor>& bias,
                 Tensor out) {
  return linear_activation_to(input, weight, bias, "none", out);
}

Tensor linear_activation_to(const Tensor& input, const Tensor& weight,
                            const std::optional<Tensor>& bias, const std::string& activation,
                            Tensor out) {
  const TensorView a(input);
  check_out(out, check_linear(a, TensorView(weight), view_of(bias)), a,
            {&input, &weight, address_of(bias)});
  if (a.on_cuda()) {
    linear_activation_out_cuda(input, weight, bias, activation, out);
  } else {
    torch::stable::copy_(out, check_activation(activation) == kActivationNone
                                  ? linear_cpu(input, weight, bias)
                                  : linear_activation_cpu(input, weight, bias, activation));
  }
  bump_version(out.get());
  return out;
}

Tensor addmm_to(const Tensor& input, const Tensor& mat1, const Tensor& mat2, double beta,
                double alpha, Tensor out) {
  const TensorView a(mat1);
  check_out(out, check_addmm(TensorView(input), a, TensorView(mat2), a.dtype), a,
            {&input, &mat1, &mat2});
  if (a.on_cuda()) {
    addmm_out_cuda(input, mat1, mat2, beta, alpha, out);
  } else {
    torch::stable::copy_(out, addmm_cpu(input, mat1, mat2, beta, alpha));
  }
  bump_version(out.get());
  return out;
}

Tensor linear_glu_to(const Tensor& input, const Tensor& gate, const Tensor& up,
                     const std::string& activation, Tensor out) {
  const TensorView a(input);
  check_out(out, check_linear_glu(a, TensorView(gate), TensorView(up)), a, {&input, &gate, &up});
  if (a.on_cuda()) {
    linear_glu_out_cuda(input, gate, up, activation, out);
  } else {
    torch::stable::copy_(out, linear_glu_cpu(input, gate, up, activation));
  }
  bump_version(out.get());
  return out;
}

}  // namespace torch_cubin
