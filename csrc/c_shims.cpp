// The C shims through which compiled C++ (Inductor's cpp_wrapper and AOTInductor) calls our ops,
// like PyTorch's own shims. torch_cubin.aot_options() provides the declarations.
//
// The signatures are those of ops/matmul/out.h with `out` first and null for a missing tensor.
#include <torch/csrc/inductor/aoti_torch/c/shim.h>

#include <exception>
#include <iostream>

#include "c_answer.h"
#include "ops/matmul/out.h"

using namespace torch_cubin;

namespace {

Tensor borrowed(AtenTensorHandle handle) {
  AtenTensorHandle own = nullptr;
  if (aoti_torch_new_tensor_handle(handle, &own) != AOTI_TORCH_SUCCESS) {
    fail({"internal", "a compiled graph", "gives a tensor that PyTorch cannot read", "", "", ""});
  }
  return Tensor(own);
}

std::optional<Tensor> borrowed_if(AtenTensorHandle handle) {
  return handle != nullptr ? std::optional<Tensor>(borrowed(handle)) : std::nullopt;
}

// Like PyTorch's shims, reports an exception's text on stderr: the caller throws its own.
template <class Call>
AOTITorchError status_of(Call&& call) {
  try {
    call();
    return AOTI_TORCH_SUCCESS;
  } catch (const std::exception& error) {
    std::cerr << error.what() << std::endl;
  } catch (...) {
    std::cerr << "torch_cubin [internal]: an unknown error." << std::endl;
  }
  return AOTI_TORCH_FAILURE;
}

}  // namespace

TORCH_CUBIN_API AOTITorchError aoti_torch_cubin_matmul_out(AtenTensorHandle out,
                                                           AtenTensorHandle self,
                                                           AtenTensorHandle other) {
  return status_of([&] { matmul_to(borrowed(self), borrowed(other), borrowed(out)); });
}

TORCH_CUBIN_API AOTITorchError aoti_torch_cubin_linear_out(AtenTensorHandle out,
                                                           AtenTensorHandle input,
                                                           AtenTensorHandle weight,
                                                           AtenTensorHandle bias) {
  return status_of(
      [&] { linear_to(borrowed(input), borrowed(weight), borrowed_if(bias), borrowed(out)); });
}

TORCH_CUBIN_API AOTITorchError aoti_torch_cubin_linear_activation_out(AtenTensorHandle out,
                                                                      AtenTensorHandle input,
                                                                      AtenTensorHandle weight,
                                                                      AtenTensorHandle bias,
                                                                      const char* activation) {
  return status_of([&] {
    linear_activation_to(borrowed(input), borrowed(weight), borrowed_if(bias), activation,
                         borrowed(out));
  });
}

TORCH_CUBIN_API AOTITorchError aoti_torch_cubin_addmm_out(AtenTensorHandle out,
                                                          AtenTensorHandle input,
                                                          AtenTensorHandle mat1,
                                                          AtenTensorHandle mat2, double beta,
                                                          double alpha) {
  return status_of([&] {
    addmm_to(borrowed(input), borrowed(mat1), borrowed(mat2), beta, alpha, borrowed(out));
  });
}

TORCH_CUBIN_API AOTITorchError aoti_torch_cubin_linear_glu_out(AtenTensorHandle out,
                                                               AtenTensorHandle input,
                                                               AtenTensorHandle gate,
                                                               AtenTensorHandle up,
                                                               const char* activation) {
  return status_of([&] {
    linear_glu_to(borrowed(input), borrowed(gate), borrowed(up), activation, borrowed(out));
  });
}
