// What ops of every family ask of an argument's device and dtype. Each function throws [input] where the
// argument `name` of `op` does not answer.
#pragma once

#include <string>

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

// Throws for a dtype that the argument cannot have.
[[noreturn]] void fail_dtype(const char* op, const char* name, const std::string& expected,
                             const TensorView& view);

// Throws unless `view` lies on the device of `first` and has that dtype.
void check_side(const char* op, const char* name, const TensorView& view, const char* first_name,
                const TensorView& first, ScalarType dtype);

// Has a dtype that products and attention take. `instead`: the function of PyTorch's for others.
void check_float_dtype(const char* op, const char* name, const TensorView& view,
                       const std::string& instead);

}  // namespace torch_cubin
