// aten::mm and its kin, which install() and drop_in() serve below autograd.
//
// Each function is a kernel for the CUDA key (for the CPU's, in tests): it checks whether our kernels
// take this call, and else calls PyTorch's own. Autograd, autocast, vmap, DTensor and FakeTensor are
// above it, and come from PyTorch.
#pragma once

#include <string>

#include "pytorch/tensor.h"

namespace torch_cubin {

Tensor aten_mm(const Tensor& self, const Tensor& mat2);
Tensor aten_mm_out(const Tensor& self, const Tensor& mat2, Tensor out);
Tensor aten_bmm(const Tensor& self, const Tensor& mat2);
Tensor aten_bmm_out(const Tensor& self, const Tensor& mat2, Tensor out);
Tensor aten_mv(const Tensor& self, const Tensor& vec);

// beta * self + alpha * (a @ b). Not in a form that PyTorch's stable ABI can register, which takes
// no Scalar: the extension module (csrc/python_products.c) calls it.
enum class SumOp : int { kAddmm, kBaddbmm, kAddmv, kCount };

// Where the result goes: to a new tensor, to `out`, or to `self`.
enum class SumForm : int { kNew, kOut, kInPlace, kCount };

struct SumCall {
  SumOp op;
  SumForm form;
  AtenTensorHandle self, a, b, out;  // borrowed; `out` of kOut only
  bool has_factors;                  // false for numbers that no double holds
  double beta, alpha;
};

// True if the call was computed, by us or by PyTorch; `result` of kNew is then a new handle. False,
// with nothing done, where PyTorch's kernel must be called by its Python: its C shims take no such
// call, or it would raise an error.
bool aten_sum(const SumCall& call, AtenTensorHandle* result);

}  // namespace torch_cubin
