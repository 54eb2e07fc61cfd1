// One spelling for C++ names and types that are written in several.
#pragma once

#include <string>
#include <string_view>

namespace torch_cubin {

// Without the blanks that mean nothing: "f<unsigned int,4>" of "f< unsigned int, 4 >".
std::string without_blanks(std::string_view text);

// The same, and types as a demangler writes them, without qualifiers: "f(float*,unsigned
// int,__half)" of "f(const float *, unsigned, half)". Constants lose their suffix, anonymous
// namespaces their name.
std::string common_spelling(std::string_view text);

}  // namespace torch_cubin
