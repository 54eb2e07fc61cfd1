// Canonical spellings of C++ names and types.
#pragma once

#include <string>
#include <string_view>
#include <vector>

namespace torch_cubin {

// Removes insignificant blanks: "f<unsigned int,4>" for "f< unsigned int, 4 >".
std::string without_blanks(std::string_view text);

// The same, with types as a demangler writes them, without qualifiers: "f(float*,unsigned
// int,__half)" for "f(const float *, unsigned, half)". Also removes the suffixes of constants and
// the names of anonymous namespaces.
std::string common_spelling(std::string_view text);

// For each character of a C++ name, the number of brackets that enclose it; a bracket does not
// enclose itself. `<` and `>` that are operators, as in `If<((4)>(3)), float>`, are no brackets.
std::vector<int> bracket_depths(std::string_view text);

}  // namespace torch_cubin
