// PyTorch's own kernels of matrix products, called through its C shims, which are below the
// dispatcher: what install() does not serve runs there, and cannot come back to our kernels.
#pragma once

#include <torch/csrc/inductor/aoti_torch/c/shim.h>

namespace torch_cubin {

// Functions of libtorch_cpu or libtorch_cuda; null where this PyTorch lacks one.
struct AtenProducts {
  using Product = AOTITorchError (*)(AtenTensorHandle out, AtenTensorHandle, AtenTensorHandle);
  using Sum = AOTITorchError (*)(AtenTensorHandle out, AtenTensorHandle self, AtenTensorHandle,
                                 AtenTensorHandle, double beta, double alpha);
  using NewSum = AOTITorchError (*)(AtenTensorHandle self, AtenTensorHandle, AtenTensorHandle,
                                    double beta, double alpha, AtenTensorHandle* result);
  Product mm_out, bmm_out;
  Sum addmm_out, baddbmm_out;
  NewSum addmv;

  bool complete() const { return mm_out && bmm_out && addmm_out && baddbmm_out && addmv; }
};

const AtenProducts& aten_products(bool on_cuda);

// Throws PyTorch's error as it is, which the user's own call to PyTorch raised.
void check_aten(AOTITorchError error, const char* op);

}  // namespace torch_cubin
