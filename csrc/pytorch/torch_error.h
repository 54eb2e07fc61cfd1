// The text of an error that PyTorch's C API swallowed, and an error of PyTorch's own type.
#pragma once

#include <string>

namespace torch_cubin {

// The message of the C API call that just failed on this thread. Empty below torch 2.13, which only
// prints it to stderr.
std::string torch_error();

// Whether this PyTorch has such messages.
bool has_torch_error();

// Throws c10::OutOfMemoryError, which becomes torch.OutOfMemoryError in Python. Does nothing in a
// PyTorch that lacks its symbols.
void throw_torch_out_of_memory(const std::string& text);

}  // namespace torch_cubin
