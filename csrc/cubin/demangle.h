// C++ names of kernels and variables, for callers that pass "scale" or "ns::fill<int>" instead of
// symbols.
//
// Includes neither torch nor cuda.h.
#pragma once

#include <string>
#include <string_view>
#include <vector>

namespace torch_cubin {

// "void ns::fill<int>(int*, int)" for "_ZN2ns4fillIiEEvPT_S1_"; "" if it is not a mangled name.
std::string demangled(const std::string& symbol);

// The same for names that were not requested: also "" if the text could be many times as long as
// the symbol, which may refer to its own parts repeatedly.
std::string demangled_if_short(const std::string& symbol);

// The parameter list of a demangled function, without parentheses: "int*, int". Returns false if it
// has none.
bool find_parameters(std::string_view demangled, std::string_view* parameters);

// The bare identifier: "fill" for "ns::fill<int>(int*, int)".
std::string_view identifier_of(std::string_view name);

// The symbols that `name` may refer to. If it is a symbol, only that one. Otherwise all whose C++
// name matches, in full or from any scope on, with or without template arguments and parameters:
// "ns::fill<int>(int*, int)", "ns::fill<int>", "fill". Ignores blanks. If no name matches
// literally, spellings of the same type are equal (`const T*` and `T const*`, unsigned and unsigned
// int, int64_t and long, half and __half, 4u and 4).
std::vector<std::string> symbols_called(const std::vector<std::string>& symbols,
                                        const std::string& name);

// "'_ZN2ns4fillIiEEvPT_S1_' (void ns::fill<int>(int*, int))"; only the symbol if it is not a
// mangled name.
std::string shown_symbol(const std::string& symbol);

}  // namespace torch_cubin
