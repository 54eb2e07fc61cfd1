// Schemas and registrations of the scaled family, without logic; ops_matmul.cpp says how ops
// forward.
#include <torch/csrc/stable/library.h>

#include "op_registration.h"
#include "ops/scaled/aten_scaled.h"
#include "ops/scaled/aten_scaled_grouped.h"
#include "ops/scaled/scaled.h"

namespace {

using namespace torch_cubin;

STABLE_TORCH_LIBRARY_FRAGMENT(cubin, m) {
#define TC_SCALED_MATMUL                                                              \
  "(Tensor mat_a, Tensor mat_b, Tensor scale_a, int scale_recipe_a, Tensor scale_b, " \
  "int scale_recipe_b, *, Tensor? bias=None, ScalarType? output_dtype=None, "         \
  "bool use_fast_accum=False) -> Tensor"
  m.def("scaled_matmul" TC_SCALED_MATMUL);
  m.def("_scaled_matmul" TC_SCALED_MATMUL);
  m.def("_scaled_matmul_autograd" TC_SCALED_MATMUL);
#define TC_SCALED_GROUPED_MATMUL                                                      \
  "(Tensor mat_a, Tensor mat_b, Tensor scale_a, int scale_recipe_a, Tensor scale_b, " \
  "int scale_recipe_b, *, Tensor offs, ScalarType? output_dtype=None, "               \
  "bool use_fast_accum=False, Tensor? bias=None, Tensor? scale=None, "                \
  "Tensor? rows=None, Tensor? out_rows=None, str activation=\"none\") -> Tensor"
  m.def("scaled_grouped_matmul" TC_SCALED_GROUPED_MATMUL);
  m.def("_scaled_grouped_matmul" TC_SCALED_GROUPED_MATMUL);
  m.def("_scaled_grouped_matmul_autograd" TC_SCALED_GROUPED_MATMUL);
#define TC_SCALED_GATED_MATMUL                                                          \
  "(Tensor mat_a, Tensor mat_b, Tensor scale_a, Tensor scale_b, *, str gate=\"silu\", " \
  "Tensor? offs=None, ScalarType? dtype=None, Tensor? mat_up=None, "                    \
  "Tensor? scale_up=None, bool power_of_two=False) -> (Tensor data, Tensor scale)"
  m.def("scaled_gated_matmul" TC_SCALED_GATED_MATMUL);
  m.def("_scaled_gated_matmul" TC_SCALED_GATED_MATMUL);
  m.def("_scaled_gated_matmul_autograd" TC_SCALED_GATED_MATMUL);
#define TC_SCALES                                                         \
  "Tensor[] scale_a, int[] recipe_a, int[] swizzle_a, Tensor[] scale_b, " \
  "int[] recipe_b, int[] swizzle_b, "
  m.def("_aten_scaled_mm_v2(Tensor self, Tensor mat2, " TC_SCALES
        "Tensor? bias, ScalarType? out_dtype, int[] contraction_dim, bool use_fast_accum) "
        "-> Tensor[]");
  m.def(
      "_aten_scaled_grouped_mm(Tensor self, Tensor mat2, Tensor scale_a, Tensor scale_b, "
      "Tensor? offs, Tensor? bias, Tensor? scale_result, ScalarType? out_dtype, "
      "bool use_fast_accum) -> Tensor[]");
  m.def("_aten_scaled_grouped_mm_v2(Tensor self, Tensor mat2, " TC_SCALES
        "Tensor? offs, Tensor? bias, ScalarType? out_dtype, int[] contraction_dim, "
        "bool use_fast_accum) -> Tensor[]");
}

STABLE_TORCH_LIBRARY_IMPL(cubin, CompositeImplicitAutograd, m) {
  TC_BY_GRAD_MODE("scaled_matmul", "mat_a", "mat_b", "scale_a");
  TC_BY_GRAD_MODE("scaled_grouped_matmul", "mat_a", "mat_b", "scale_a");
  TC_BY_GRAD_MODE("scaled_gated_matmul", "mat_a", "mat_b", "scale_a");
}

// Without this registration torch.vmap would loop over the batch instead of decomposing the op.
STABLE_TORCH_LIBRARY_IMPL(cubin, FuncTorchBatchedDecomposition, m) {
  TC_BY_GRAD_MODE("scaled_matmul", "mat_a", "mat_b", "scale_a");
  TC_BY_GRAD_MODE("scaled_grouped_matmul", "mat_a", "mat_b", "scale_a");
  TC_BY_GRAD_MODE("scaled_gated_matmul", "mat_a", "mat_b", "scale_a");
}

STABLE_TORCH_LIBRARY_IMPL(cubin, CPU, m) {
  TC_RAW_AND_AUTOGRAD(scaled_matmul, cpu);
  TC_RAW_AND_AUTOGRAD(scaled_grouped_matmul, cpu);
  TC_RAW_AND_AUTOGRAD(scaled_gated_matmul, cpu);
  m.impl("_aten_scaled_mm_v2", TORCH_BOX(&aten_scaled_mm_v2));
  m.impl("_aten_scaled_grouped_mm", TORCH_BOX(&aten_scaled_grouped_mm));
  m.impl("_aten_scaled_grouped_mm_v2", TORCH_BOX(&aten_scaled_grouped_mm_v2));
}
STABLE_TORCH_LIBRARY_IMPL(cubin, CUDA, m) {
  TC_RAW_AND_AUTOGRAD(scaled_matmul, cuda);
  TC_RAW_AND_AUTOGRAD(scaled_grouped_matmul, cuda);
  TC_RAW_AND_AUTOGRAD(scaled_gated_matmul, cuda);
  m.impl("_aten_scaled_mm_v2", TORCH_BOX(&aten_scaled_mm_v2));
  m.impl("_aten_scaled_grouped_mm", TORCH_BOX(&aten_scaled_grouped_mm));
  m.impl("_aten_scaled_grouped_mm_v2", TORCH_BOX(&aten_scaled_grouped_mm_v2));
}

}  // namespace
