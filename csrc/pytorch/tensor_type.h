// The Python type of a tensor and the name of an op's argument, for errors about tensors without
// memory of their own: a wrapper subclass that passes itself to PyTorch's ops instead of the tensor
// that it wraps.
#pragma once

#include <torch/csrc/inductor/aoti_torch/c/shim.h>

#include <cstddef>
#include <string>

namespace torch_cubin {

// Writes the name of the type of the tensor whose at::TensorImpl is `implementation` to `name`,
// which has `size` bytes including the terminating null. Leaves `name` unchanged if it finds no
// type.
using FindTensorType = void (*)(const void* implementation, char* name, size_t size);

// Writes the name of an op's argument, counted from 1, in the same format.
using FindArgument = void (*)(const char* op, size_t argument, char* name, size_t size);

// Called once by the Python package. Without Python, types are not named and arguments are
// numbered.
void set_error_names(FindTensorType type, FindArgument argument);

// "a Wrapper", or "a tensor" if its type is not known.
std::string tensor_type_text(AtenTensorHandle tensor);

// Throws [input] for a tensor that has elements but no memory; `argument` counts from 1.
void require_memory(const char* op, size_t argument, AtenTensorHandle tensor);

}  // namespace torch_cubin
