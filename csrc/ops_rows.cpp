// Schemas and registrations of the family of rows, without logic; ops_matmul.cpp says how ops
// forward.
#include <torch/csrc/stable/library.h>

#include "op_registration.h"
#include "ops/rows/rows.h"

namespace {

using namespace torch_cubin;

STABLE_TORCH_LIBRARY_FRAGMENT(cubin, m) {
  m.def(
      "rms_norm(Tensor input, int[] normalized_shape, Tensor? weight=None, float? eps=None) -> "
      "Tensor");
  m.def(
      "add_rms_norm(Tensor input, Tensor residual, int[] normalized_shape, Tensor? weight=None, "
      "float? eps=None) -> (Tensor, Tensor)");
  m.def(
      "layer_norm(Tensor input, int[] normalized_shape, Tensor? weight=None, Tensor? bias=None, "
      "float eps=1e-05) -> Tensor");
  m.def("softmax(Tensor input, int dim, ScalarType? dtype=None) -> Tensor");
  m.def("log_softmax(Tensor input, int dim, ScalarType? dtype=None) -> Tensor");

  m.def(
      "cross_entropy(Tensor input, Tensor target, Tensor? weight=None, int ignore_index=-100, "
      "str reduction='mean', float label_smoothing=0.0) -> Tensor");

  m.def(
      "linear_cross_entropy(Tensor input, Tensor linear_weight, Tensor target, *, "
      "Tensor? linear_bias=None, Tensor? weight=None, str reduction='mean', "
      "int ignore_index=-100, float label_smoothing=0.0, ScalarType? dtype=None, "
      "bool recompute=False) -> Tensor");
  define_raw(
      m, "linear_cross_entropy",
      "(Tensor input, Tensor linear_weight, Tensor target, Tensor? linear_bias, Tensor? weight, "
      "str reduction, int ignore_index, float label_smoothing, ScalarType dtype, "
      "bool needs_input, bool needs_weight, bool needs_bias) -> (Tensor loss, Tensor total, "
      "Tensor max, Tensor log_sum, Tensor grad_input, Tensor grad_weight, Tensor grad_bias)");
  define_raw(
      m, "linear_cross_entropy_backward",
      "(Tensor grad, Tensor input, Tensor linear_weight, Tensor target, Tensor? linear_bias, "
      "Tensor? weight, Tensor total, Tensor max, Tensor log_sum, str reduction, int ignore_index, "
      "float label_smoothing, bool needs_input, bool needs_weight, bool needs_bias) -> (Tensor "
      "grad_input, Tensor grad_weight, Tensor grad_bias)");
  define_raw(m, "cross_entropy",
             "(Tensor input, Tensor target, Tensor? weight, str reduction, int ignore_index, "
             "float label_smoothing, ScalarType dtype) -> (Tensor loss, Tensor total, Tensor max, "
             "Tensor log_sum)");
  define_raw(m, "cross_entropy_backward",
             "(Tensor grad, Tensor input, Tensor target, Tensor? weight, Tensor total, Tensor max, "
             "Tensor log_sum, str reduction, int ignore_index, float label_smoothing) -> Tensor");
  define_raw(
      m, "norm",
      "(Tensor input, Tensor? residual, int[] normalized_shape, Tensor? weight, Tensor? bias, "
      "float? eps, bool centered) -> (Tensor out, Tensor sum, Tensor mean, Tensor rstd)");
  define_raw(
      m, "norm_backward",
      "(Tensor grad_out, Tensor? grad_sum, Tensor x, Tensor mean, Tensor rstd, Tensor? weight, "
      "int dims, float? eps, bool centered, bool needs_weight, ScalarType? bias_dtype) -> (Tensor "
      "grad_x, Tensor grad_weight, Tensor grad_bias)");
  m.def("_row_sums(Tensor input, int kind, float divisor, ScalarType dtype) -> Tensor");
  m.def("_scale_into(Tensor(a!) out, Tensor factor) -> ()");
  define_raw(m, "softmax", "(Tensor input, bool log, ScalarType dtype) -> Tensor");
  define_raw(m, "softmax_backward",
             "(Tensor grad_out, Tensor output, bool log, ScalarType dtype) -> Tensor");
}

void implement_rows_ops(OpLibrary& m) {
  m.impl("rms_norm", &rms_norm_composite);
  m.impl("add_rms_norm", &add_rms_norm_composite);
  m.impl("layer_norm", &layer_norm_composite);
  m.impl("softmax", &softmax_composite);
  m.impl("log_softmax", &log_softmax_composite);
  m.impl("cross_entropy", &cross_entropy_composite);
  m.impl("linear_cross_entropy", &linear_cross_entropy_composite);
}

STABLE_TORCH_LIBRARY_IMPL(cubin, CompositeImplicitAutograd, m) { implement_rows_ops(m); }

// Without this registration torch.vmap would loop over the batch instead of decomposing the op.
STABLE_TORCH_LIBRARY_IMPL(cubin, FuncTorchBatchedDecomposition, m) { implement_rows_ops(m); }

#define TC_ROWS(device)                                                              \
  TC_RAW(scale_into, device);                                                        \
  TC_RAW(row_sums, device);                                                          \
  TC_RAW_AND_AUTOGRAD(norm, device);                                                 \
  TC_RAW_AND_AUTOGRAD(cross_entropy, device);                                        \
  TC_RAW_AND_AUTOGRAD(cross_entropy_backward, device);                               \
  TC_RAW_AND_AUTOGRAD(norm_backward, device);                                        \
  TC_RAW_AND_AUTOGRAD(softmax, device);                                              \
  TC_RAW_AND_AUTOGRAD(softmax_backward, device);                                     \
  TC_BOXED_AND_AUTOGRAD(linear_cross_entropy, device,                                \
                        TORCH_BOX((&WithMemory<kOp, &linear_cross_entropy>::call))); \
  TC_BOXED_AND_AUTOGRAD(linear_cross_entropy_backward, device,                       \
                        TORCH_BOX((&WithMemory<kOp, &linear_cross_entropy_backward>::call)))

STABLE_TORCH_LIBRARY_IMPL(cubin, CPU, m) { TC_ROWS(cpu); }
STABLE_TORCH_LIBRARY_IMPL(cubin, CUDA, m) { TC_ROWS(cuda); }

}  // namespace
