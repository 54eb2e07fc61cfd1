// Schemas and registrations of the grouped family, without logic; ops_matmul.cpp says how ops
// forward.
#include <torch/csrc/stable/library.h>

#include "op_registration.h"
#include "ops/grouped/aten_grouped.h"
#include "ops/grouped/grouped.h"

namespace {

using namespace torch_cubin;

STABLE_TORCH_LIBRARY_FRAGMENT(cubin, m) {
  m.def(
      "grouped_matmul(Tensor mat_a, Tensor mat_b, *, Tensor? offs=None, Tensor? bias=None, "
      "ScalarType? out_dtype=None, Tensor? scale=None, Tensor? rows=None, Tensor? out_rows=None, "
      "str activation='none') -> Tensor");
  define_raw(m, "grouped_matmul",
             "(Tensor mat_a, Tensor mat_b, Tensor offs, bool zero_rest, Tensor? bias=None, "
             "Tensor? scale=None, Tensor? rows=None, Tensor? out_rows=None, str activation='none')"
             " -> Tensor");
  m.def(
      "_aten_grouped_mm(Tensor self, Tensor mat2, Tensor? offs, Tensor? bias, ScalarType? "
      "out_dtype) -> Tensor[]");
}

STABLE_TORCH_LIBRARY_IMPL(cubin, CompositeImplicitAutograd, m) {
  m.impl("grouped_matmul", &grouped_matmul_composite);
}

// Without this registration torch.vmap would loop over the batch instead of decomposing the op.
STABLE_TORCH_LIBRARY_IMPL(cubin, FuncTorchBatchedDecomposition, m) {
  m.impl("grouped_matmul", &grouped_matmul_composite);
}

#define TC_GROUPED_OPS(device)                 \
  TC_RAW_AND_AUTOGRAD(grouped_matmul, device); \
  m.impl("_aten_grouped_mm", TORCH_BOX(&aten_grouped_mm))

STABLE_TORCH_LIBRARY_IMPL(cubin, CPU, m) { TC_GROUPED_OPS(cpu); }
STABLE_TORCH_LIBRARY_IMPL(cubin, CUDA, m) { TC_GROUPED_OPS(cuda); }

}  // namespace
