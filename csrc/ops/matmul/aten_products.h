// aten::mm and related operators, which install() and drop_in() serve below autograd.
//
// Each function is a kernel for the CUDA key (for the CPU's, in tests): it checks whether our
// kernels support this call, and otherwise calls PyTorch's own. Autograd, autocast, vmap, DTensor
// and FakeTensor are above it, and come from PyTorch.
#pragma once

#include <string>

#include "pytorch/tensor.h"

namespace torch_cubin {

Tensor aten_mm(const Tensor& self, const Tensor& mat2);
Tensor aten_mm_out(const Tensor& self, const Tensor& mat2, Tensor out);
Tensor aten_bmm(const Tensor& self, const Tensor& mat2);
Tensor aten_bmm_out(const Tensor& self, const Tensor& mat2, Tensor out);
Tensor aten_mv(const Tensor& self, const Tensor& vec);

// beta * self + alpha * (a @ b). PyTorch's stable ABI cannot register this form, since it supports
// no Scalar: the extension module (csrc/python_products.c) calls it.
enum class SumOp : int { kAddmm, kBaddbmm, kAddmv, kCount };

// The destination of the result: a new tensor, `out`, or `self`.
enum class SumForm : int { kNew, kOut, kInPlace, kCount };

struct SumCall {
  SumOp op;
  SumForm form;
  AtenTensorHandle self, a, b, out;  // borrowed; `out` for kOut only
  bool has_factors;                  // false for numbers that no double holds
  double beta, alpha;
};

// True if the call was computed, by us or by PyTorch; `result` of kNew is then a new handle. False,
// with nothing done, if PyTorch's kernel must be called from Python: its C shims do not support the
// call, or it would raise an error.
bool aten_sum(const SumCall& call, AtenTensorHandle* result);

}  // namespace torch_cubin
