// C++ names of kernels, for callers that know "scale" or "ns::fill<int>" and not their symbols.
//
// Includes neither torch nor cuda.h.
#pragma once

#include <string>
#include <string_view>

namespace torch_cubin {

// "void ns::fill<int>(int*, int)" of "_ZN2ns4fillIiEEvPT_S1_"; "" for what is no mangled name.
std::string demangled(const std::string& symbol);

// Whether people call a function so whose demangled name that is: "ns::fill<int>(int*, int)",
// "ns::fill<int>", "ns::fill", "fill<int>", "fill".
bool is_name_of(std::string_view demangled, std::string_view name);

}  // namespace torch_cubin
