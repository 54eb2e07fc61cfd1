// Schemas and registrations of quantize, without logic; ops_matmul.cpp says how ops forward.
#include <torch/csrc/stable/library.h>

#include "op_registration.h"
#include "ops/quantize/quantize.h"

namespace {

using namespace torch_cubin;

STABLE_TORCH_LIBRARY_FRAGMENT(cubin, m) {
  define_public(m, "quantize",
                "(Tensor x, int recipe, *, bool transpose=False, bool power_of_two=False, "
                "str gate=\"none\", ScalarType? dtype=None) -> (Tensor data, Tensor scale)");
}

STABLE_TORCH_LIBRARY_IMPL(cubin, CompositeImplicitAutograd, m) { TC_BY_GRAD_MODE("quantize", "x"); }

// Without this registration torch.vmap would loop over the batch instead of decomposing the op.
STABLE_TORCH_LIBRARY_IMPL(cubin, FuncTorchBatchedDecomposition, m) {
  TC_BY_GRAD_MODE("quantize", "x");
}

STABLE_TORCH_LIBRARY_IMPL(cubin, CPU, m) { TC_RAW_AND_AUTOGRAD(quantize, cpu); }
STABLE_TORCH_LIBRARY_IMPL(cubin, CUDA, m) { TC_RAW_AND_AUTOGRAD(quantize, cuda); }

}  // namespace
