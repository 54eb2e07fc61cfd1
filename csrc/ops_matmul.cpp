// Schemas and registrations of the matmul family, without logic.
//
// A public op forwards to the raw op `_name` with grad mode off, else to `_name_autograd`, whose
// derivative _ops/autograd.py registers; ops/matmul/composite.cpp has those that do more. Both run
// the same kernels; a process without Python has only the raw op. `_name` is private because it has
// no derivative, and PyTorch warns when backward reaches it.
#include <torch/csrc/stable/library.h>

#include "op_registration.h"
#include "ops/matmul/fused.h"
#include "ops/matmul/matmul.h"
#include "ops/matmul/out.h"
#include "ops/matmul/symmetric.h"

namespace {

using namespace torch_cubin;

STABLE_TORCH_LIBRARY_FRAGMENT(cubin, m) {
  define_public(m, "matmul", "(Tensor self, Tensor other) -> Tensor");
  m.def(
      "linear(Tensor input, Tensor weight, Tensor? bias=None, *, str activation=\"none\") -> "
      "Tensor");
  define_raw(m, "linear", "(Tensor input, Tensor weight, Tensor? bias=None) -> Tensor");
  define_raw(m, "linear_activation",
             "(Tensor input, Tensor weight, Tensor? bias, str activation) -> Tensor");
  define_public(
      m, "addmm",
      "(Tensor input, Tensor mat1, Tensor mat2, *, float beta=1, float alpha=1) -> Tensor");
  const std::string with_dtype =
      "(Tensor input, Tensor mat1, Tensor mat2, ScalarType out_dtype, *, float beta=1, "
      "float alpha=1) -> Tensor";
  m.def(("addmm.dtype" + with_dtype).c_str());
  define_raw(m, "addmm_dtype", with_dtype);
  define_public(m, "addmm_into",
                "(Tensor(a!) out, Tensor mat1, Tensor mat2, *, float beta=1, float alpha=1) -> ()");
  const std::string symmetric =
      ", Tensor? c=None, *, float beta=0, float alpha=1, ScalarType? out_dtype=None) -> Tensor";
  define_public(m, "syrk", "(Tensor x" + symmetric);
  define_public(m, "symm_square", "(Tensor a" + symmetric);

  // The weight and bias gradients of a linear layer: grad.t() @ input and grad.sum(0).
  m.def(
      "_weight_and_bias_gradient(Tensor grad, Tensor input) -> (Tensor grad_weight, "
      "Tensor grad_bias)");

  // Products for graphs (ops/matmul/fused.h). Their derivatives are on their own Autograd keys.
  // Those that graphs call with parameters and without out= are also defined without them, because
  // an Autograd kernel in Python takes 5 to 10 us of the host.
  m.def("_linear_glu(Tensor input, Tensor gate, Tensor up, str activation) -> Tensor");
#define TC_LINEAR_GLU_AUX                                                                    \
  "(Tensor input, Tensor gate, Tensor up, str activation) -> (Tensor out, Tensor gate_out, " \
  "Tensor up_out)"
  m.def("_linear_glu_aux" TC_LINEAR_GLU_AUX);
  m.def("_linear_glu_aux.below_autograd" TC_LINEAR_GLU_AUX);
#define TC_LINEARS "(Tensor input, Tensor[] weights, Tensor?[] biases) -> Tensor[]"
  m.def("_linears" TC_LINEARS);
  m.def("_linears.below_autograd" TC_LINEARS);
#define TC_LINEAR_ACTIVATION_AUX \
  "(Tensor input, Tensor weight, Tensor? bias, str activation) -> (Tensor out, Tensor aux)"
  m.def("_linear_activation_aux" TC_LINEAR_ACTIVATION_AUX);
  m.def("_linear_activation_aux.below_autograd" TC_LINEAR_ACTIVATION_AUX);
  m.def(
      "_linear_activation_backward(Tensor grad, Tensor weight, Tensor aux, str activation) -> "
      "Tensor");

  // The out= variants, which graphs call (ops/matmul/out.h). NOTE: not tagged as out= variants:
  // torch 2.13 would lower such an op by itself, incorrectly.
#define TC_INTO "Tensor(a!) out) -> Tensor(a!)"
  m.def("_matmul.out(Tensor self, Tensor other, *, " TC_INTO);
  m.def("_linear.out(Tensor input, Tensor weight, Tensor? bias=None, *, " TC_INTO);
  m.def(
      "_linear_activation.out(Tensor input, Tensor weight, Tensor? bias, str activation, "
      "*, " TC_INTO);
  m.def(
      "_addmm.out(Tensor input, Tensor mat1, Tensor mat2, *, float beta=1, float "
      "alpha=1, " TC_INTO);
  m.def("_linear_glu.out(Tensor input, Tensor gate, Tensor up, str activation, *, " TC_INTO);
}

void implement_matmul_ops(OpLibrary& m) {
  TC_BY_REQUIRES_GRAD("matmul", "self", "other");
  TC_BY_REQUIRES_GRAD("addmm", "input", "mat1", "mat2");
  TC_BY_GRAD_MODE("addmm_into", "out", "mat1", "mat2");
  TC_BY_GRAD_MODE("syrk", "x");
  TC_BY_GRAD_MODE("symm_square", "a");
  m.impl("addmm.dtype", &addmm_dtype_composite);
  m.impl("linear", &linear_composite);
}

STABLE_TORCH_LIBRARY_IMPL(cubin, CompositeImplicitAutograd, m) { implement_matmul_ops(m); }

// Without this registration torch.vmap would loop over the batch instead of decomposing the op.
STABLE_TORCH_LIBRARY_IMPL(cubin, FuncTorchBatchedDecomposition, m) { implement_matmul_ops(m); }

#define TC_RAW_MATMUL_OPS(device)                   \
  TC_RAW(weight_and_bias_gradient, device);         \
  TC_RAW_AND_AUTOGRAD(matmul, device);              \
  TC_RAW_AND_AUTOGRAD(linear, device);              \
  TC_RAW_AND_AUTOGRAD(linear_activation, device);   \
  TC_RAW_AND_AUTOGRAD(addmm, device);               \
  TC_RAW_AND_AUTOGRAD(addmm_dtype, device);         \
  TC_RAW_AND_AUTOGRAD(addmm_into, device);          \
  TC_RAW_AND_AUTOGRAD(syrk, device);                \
  TC_RAW_AND_AUTOGRAD(symm_square, device);         \
  TC_RAW(linear_glu, device);                       \
  TC_RAW(linear_glu_aux, device);                   \
  TC_RAW(linears, device);                          \
  TC_RAW(linear_activation_aux, device);            \
  TC_RAW(linear_activation_backward, device);       \
  TC_BELOW_AUTOGRAD(linear_glu_aux, device);        \
  TC_BELOW_AUTOGRAD(linears, device);               \
  TC_BELOW_AUTOGRAD(linear_activation_aux, device); \
  TC_OUT(matmul, device);                           \
  TC_OUT(linear, device);                           \
  TC_OUT(linear_activation, device);                \
  TC_OUT(addmm, device);                            \
  TC_OUT(linear_glu, device)

STABLE_TORCH_LIBRARY_IMPL(cubin, CPU, m) { TC_RAW_MATMUL_OPS(cpu); }
STABLE_TORCH_LIBRARY_IMPL(cubin, CUDA, m) { TC_RAW_MATMUL_OPS(cuda); }

}  // namespace
