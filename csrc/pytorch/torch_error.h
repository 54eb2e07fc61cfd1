// The text of an error that PyTorch's C API swallowed.
#pragma once

#include <string>

namespace torch_cubin {

// The message of the C API call that just failed on this thread. Empty below torch 2.13, which only
// prints it to stderr.
std::string torch_error();

// Whether this PyTorch has such messages.
bool has_torch_error();

}  // namespace torch_cubin
