// Schemas and registrations of the matmul family, without logic.
//
// A public op forwards to the raw op `_name` with grad mode off, else to `_name_autograd`, whose
// derivative _ops/autograd.py registers; ops/matmul/composite.cpp has those that do more. Both run
// the same kernels; a process without Python has only the raw op. `_name` is private because it has
// no derivative, and PyTorch warns when backward reaches it.
#include <torch/csrc/stable/library.h>

#include "op_registration.h"
#include "ops/matmul/matmul.h"

namespace {

using namespace torch_cubin;

STABLE_TORCH_LIBRARY_FRAGMENT(cubin, m) {
  m.def("matmul(Tensor self, Tensor other) -> Tensor");
  m.def("_matmul(Tensor self, Tensor other) -> Tensor");
  m.def("_matmul_autograd(Tensor self, Tensor other) -> Tensor");

  m.def(
      "linear(Tensor input, Tensor weight, Tensor? bias=None, *, str activation=\"none\") -> "
      "Tensor");
  m.def("_linear(Tensor input, Tensor weight, Tensor? bias=None) -> Tensor");
  m.def("_linear_autograd(Tensor input, Tensor weight, Tensor? bias=None) -> Tensor");
#define TC_ACTIVATION "(Tensor input, Tensor weight, Tensor? bias, str activation) -> Tensor"
  m.def("_linear_activation" TC_ACTIVATION);
  m.def("_linear_activation_autograd" TC_ACTIVATION);

#define TC_ADDMM \
  "(Tensor input, Tensor mat1, Tensor mat2, *, float beta=1, float alpha=1) -> Tensor"
  m.def("addmm" TC_ADDMM);
  m.def("_addmm" TC_ADDMM);
  m.def("_addmm_autograd" TC_ADDMM);

  // The weight and bias gradients of a linear layer: grad.t() @ input and grad.sum(0).
  m.def(
      "_weight_and_bias_gradient(Tensor grad, Tensor input) -> (Tensor grad_weight, "
      "Tensor grad_bias)");
}

void implement_matmul_ops(torch::stable::detail::StableLibrary& m) {
  TC_BY_GRAD_MODE("matmul", "self", "other");
  TC_BY_GRAD_MODE("addmm", "input", "mat1", "mat2");
  m.impl("linear", &linear_composite);
}

STABLE_TORCH_LIBRARY_IMPL(cubin, CompositeImplicitAutograd, m) { implement_matmul_ops(m); }

// Without this registration torch.vmap would loop over the batch instead of decomposing the op.
STABLE_TORCH_LIBRARY_IMPL(cubin, FuncTorchBatchedDecomposition, m) { implement_matmul_ops(m); }

#define TC_RAW_MATMUL_OPS(device)                 \
  TC_RAW(weight_and_bias_gradient, device);       \
  TC_RAW_AND_AUTOGRAD(matmul, device);            \
  TC_RAW_AND_AUTOGRAD(linear, device);            \
  TC_RAW_AND_AUTOGRAD(linear_activation, device); \
  TC_RAW_AND_AUTOGRAD(addmm, device)

STABLE_TORCH_LIBRARY_IMPL(cubin, CPU, m) { TC_RAW_MATMUL_OPS(cpu); }
STABLE_TORCH_LIBRARY_IMPL(cubin, CUDA, m) { TC_RAW_MATMUL_OPS(cuda); }

}  // namespace
