// The Python type of a tensor, for errors about tensors that have no memory of their own: a wrapper
// subclass that lets PyTorch compute with itself, instead of with what it wraps.
#pragma once

#include <torch/csrc/inductor/aoti_torch/c/shim.h>

#include <cstddef>
#include <string>

namespace torch_cubin {

// Writes the name of the type of the tensor whose at::TensorImpl is `implementation` to `name`, of
// `size` bytes with the null at its end; leaves it alone where it finds none.
using FindTensorType = void (*)(const void* implementation, char* name, size_t size);

// Called once by the Python package. Without Python no type is named.
void set_find_tensor_type(FindTensorType find);

// "a Wrapper", or "a tensor" where its type is not known.
std::string tensor_type_text(AtenTensorHandle tensor);

// Throws [input] for a tensor with elements and no memory; `argument` counts from 1.
void require_memory(const char* op, size_t argument, AtenTensorHandle tensor);

}  // namespace torch_cubin
