// The C API of what the library and PyTorch's Python know of each other: the symbols outside its
// stable ABI, for `doctor`, what its current stream records, and the types of tensors and names of
// arguments, for errors.
#include <cstdint>

#include "c_answer.h"
#include "pytorch/internals.h"
#include "pytorch/stream.h"
#include "pytorch/tensor_type.h"
#include "runtime/device.h"

using namespace torch_cubin;

// {"symbols": [...]}: csrc/pytorch/internals.h. Never touches the driver.
TORCH_CUBIN_API char* torch_cubin_pytorch_symbols() {
  return answer([] { return pytorch_symbols_json(); });
}

// The capture_of() of the device's current stream.
TORCH_CUBIN_API char* torch_cubin_capture_of(int index, uint64_t* number) {
  return answer([&] {
    uint64_t& to = *given(number, "number");
    to = capture_of(device(index), current_stream(index).handle);
  });
}

// pytorch/tensor_type.h
TORCH_CUBIN_API void torch_cubin_set_error_names(FindTensorType type, FindArgument argument) {
  set_error_names(type, argument);
}
