// Every schema of the library, on one screen: the only STABLE_TORCH_LIBRARY blocks. No logic here.
//
// The public op of a family forwards (ops/composite.cpp): with gradients off to the raw op `_name`,
// else to `_name_autograd`, whose derivative formulas torch_cubin/_autograd.py fills in. Both have
// the same kernels; a process without Python has the first path alone. `_name` is private: it has
// no derivative, and PyTorch warns when backward meets it.
#include <torch/csrc/stable/library.h>

#include "ops/composite.h"
#include "ops/matmul.h"

namespace {

using namespace torch_cubin;

STABLE_TORCH_LIBRARY(cubin, m) {
  m.def("matmul(Tensor self, Tensor other) -> Tensor");
  m.def("_matmul(Tensor self, Tensor other) -> Tensor");
  m.def("_matmul_autograd(Tensor self, Tensor other) -> Tensor");

  m.def("linear(Tensor input, Tensor weight, Tensor? bias=None) -> Tensor");
  m.def("_linear(Tensor input, Tensor weight, Tensor? bias=None) -> Tensor");
  m.def("_linear_autograd(Tensor input, Tensor weight, Tensor? bias=None) -> Tensor");
}

STABLE_TORCH_LIBRARY_IMPL(cubin, CompositeImplicitAutograd, m) {
  m.impl("matmul", &matmul_composite);
  m.impl("linear", &linear_composite);
}

// torch.vmap does not decompose a composite op by itself: it would loop over the batch.
STABLE_TORCH_LIBRARY_IMPL(cubin, FuncTorchBatchedDecomposition, m) {
  m.impl("matmul", &matmul_composite);
  m.impl("linear", &linear_composite);
}

STABLE_TORCH_LIBRARY_IMPL(cubin, CPU, m) {
  m.impl("_matmul", TORCH_BOX(&matmul_cpu));
  m.impl("_matmul_autograd", TORCH_BOX(&matmul_cpu));
  m.impl("_linear", TORCH_BOX(&linear_cpu));
  m.impl("_linear_autograd", TORCH_BOX(&linear_cpu));
}

STABLE_TORCH_LIBRARY_IMPL(cubin, CUDA, m) {
  m.impl("_matmul", TORCH_BOX(&matmul_cuda));
  m.impl("_matmul_autograd", TORCH_BOX(&matmul_cuda));
  m.impl("_linear", TORCH_BOX(&linear_cuda));
  m.impl("_linear_autograd", TORCH_BOX(&linear_cuda));
}

}  // namespace
