// The text of an error that PyTorch's C API swallowed.
#pragma once

#include <string>

namespace torch_cubin {

// What the C API call that just failed on this thread had to say; empty below torch 2.13, which
// only prints it on stderr.
std::string torch_error();

}  // namespace torch_cubin
