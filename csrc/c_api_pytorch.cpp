// The C API of what the library and PyTorch's Python know of each other: the symbols outside its
// stable ABI, for `doctor`, and the types of tensors and names of arguments, for errors.
#include "c_answer.h"
#include "pytorch/internals.h"
#include "pytorch/tensor_type.h"

using namespace torch_cubin;

// {"symbols": [...]}: csrc/pytorch/internals.h. Never touches the driver.
TORCH_CUBIN_API char* torch_cubin_pytorch_symbols() {
  return answer([] { return pytorch_symbols_json(); });
}

// pytorch/tensor_type.h
TORCH_CUBIN_API void torch_cubin_set_error_names(FindTensorType type, FindArgument argument) {
  set_error_names(type, argument);
}
