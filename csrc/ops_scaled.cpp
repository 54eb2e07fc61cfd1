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
  define_public(m, "scaled_matmul",
                "(Tensor mat_a, Tensor mat_b, Tensor scale_a, int scale_recipe_a, Tensor scale_b, "
                "int scale_recipe_b, *, Tensor? bias=None, ScalarType? output_dtype=None, "
                "bool use_fast_accum=False) -> Tensor");
  define_public(m, "scaled_grouped_matmul",
                "(Tensor mat_a, Tensor mat_b, Tensor scale_a, int scale_recipe_a, Tensor scale_b, "
                "int scale_recipe_b, *, Tensor offs, ScalarType? output_dtype=None, "
                "bool use_fast_accum=False, Tensor? bias=None, Tensor? scale=None, "
                "Tensor? rows=None, Tensor? out_rows=None, str activation=\"none\") -> Tensor");
  define_public(
      m, "scaled_gated_matmul",
      "(Tensor mat_a, Tensor mat_b, Tensor scale_a, Tensor scale_b, *, str gate=\"silu\", "
      "Tensor? offs=None, ScalarType? dtype=None, Tensor? mat_up=None, "
      "Tensor? scale_up=None, bool power_of_two=False) -> (Tensor data, Tensor scale)");
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

void implement_scaled_ops(OpLibrary& m) {
  TC_BY_GRAD_MODE("scaled_matmul", "mat_a", "mat_b", "scale_a");
  TC_BY_GRAD_MODE("scaled_grouped_matmul", "mat_a", "mat_b", "scale_a");
  TC_BY_GRAD_MODE("scaled_gated_matmul", "mat_a", "mat_b", "scale_a");
}

STABLE_TORCH_LIBRARY_IMPL(cubin, CompositeImplicitAutograd, m) { implement_scaled_ops(m); }

// Without this registration torch.vmap would loop over the batch instead of decomposing the op.
STABLE_TORCH_LIBRARY_IMPL(cubin, FuncTorchBatchedDecomposition, m) { implement_scaled_ops(m); }

#define TC_SCALED_OPS(device)                                            \
  TC_RAW_AND_AUTOGRAD(scaled_matmul, device);                            \
  TC_RAW_AND_AUTOGRAD(scaled_grouped_matmul, device);                    \
  TC_RAW_AND_AUTOGRAD(scaled_gated_matmul, device);                      \
  m.impl("_aten_scaled_mm_v2", TORCH_BOX(&aten_scaled_mm_v2));           \
  m.impl("_aten_scaled_grouped_mm", TORCH_BOX(&aten_scaled_grouped_mm)); \
  m.impl("_aten_scaled_grouped_mm_v2", TORCH_BOX(&aten_scaled_grouped_mm_v2))

STABLE_TORCH_LIBRARY_IMPL(cubin, CPU, m) { TC_SCALED_OPS(cpu); }
STABLE_TORCH_LIBRARY_IMPL(cubin, CUDA, m) { TC_SCALED_OPS(cuda); }

}  // namespace
