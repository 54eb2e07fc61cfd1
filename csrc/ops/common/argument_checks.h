// Checks of an argument's device and dtype, for ops of every family. Each function throws [input]
// if the argument `name` of `op` does not comply.
#pragma once

#include <string>

#include "pytorch/overlap.h"
#include "pytorch/tensor.h"

namespace torch_cubin {

// "linear argument 'bias'"
std::string argument_text(const char* op, const char* name);

// Throws unless `view` lies on the device of `first`, another argument.
void check_device(const char* op, const char* name, const TensorView& view, const char* first_name,
                  const TensorView& first);

// Throws unless `view` has the device and the dtype of `first`.
void check_like(const char* op, const char* name, const TensorView& view, const char* first_name,
                const TensorView& first);

// Throws the error for an unsupported dtype.
[[noreturn]] void fail_dtype(const char* op, const char* name, const std::string& expected,
                             const TensorView& view);

// Throws unless `view` is on the device of `first` and has that dtype.
void check_side(const char* op, const char* name, const TensorView& view, const char* first_name,
                const TensorView& first, ScalarType dtype);

// Throws unless products and attention support the dtype. `instead` is PyTorch's function for
// others.
void check_float_dtype(const char* op, const char* name, const TensorView& view,
                       const std::string& instead);

// A tensor given by its metadata has no memory.
MemoryFacts memory_of(const TensorView& view);

// Throws if `written`, which the op writes, shares memory with `view`, another argument.
void check_apart(const char* op, const char* name, const TensorView& written,
                 const char* other_name, const TensorView& view);

}  // namespace torch_cubin
