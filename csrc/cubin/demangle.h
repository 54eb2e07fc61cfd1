// C++ names of kernels and variables, for callers that know "scale" or "ns::fill<int>" and not
// their symbols.
//
// Includes neither torch nor cuda.h.
#pragma once

#include <string>
#include <string_view>
#include <vector>

namespace torch_cubin {

// "void ns::fill<int>(int*, int)" of "_ZN2ns4fillIiEEvPT_S1_"; "" for what is no mangled name.
std::string demangled(const std::string& symbol);

// The same for a list of names that nobody asked for: "" as well where the text may be many times
// as long as the symbol, which repeats its own parts by reference.
std::string demangled_if_short(const std::string& symbol);

// What stands between the parentheses of a demangled function: "int*, int". False where there are
// none.
bool find_parameters(std::string_view demangled, std::string_view* parameters);

// The identifier alone: "fill" of "ns::fill<int>(int*, int)".
std::string_view identifier_of(std::string_view name);

// Of these symbols those that people call so: the symbol itself and no other where it is one, and
// otherwise all whose C++ name it is, in full or from any scope on, with or without template
// arguments and parameters: "ns::fill<int>(int*, int)", "ns::fill<int>", "fill". Blanks do not
// matter. Where none has that name to the letter, spellings of one type count as one (`const T*`
// and `T const*`, unsigned and unsigned int, int64_t and long, half and __half, 4u and 4).
std::vector<std::string> symbols_called(const std::vector<std::string>& symbols,
                                        const std::string& name);

// "'_ZN2ns4fillIiEEvPT_S1_' (void ns::fill<int>(int*, int))"; the symbol alone where it is no C++
// name.
std::string shown_symbol(const std::string& symbol);

}  // namespace torch_cubin
