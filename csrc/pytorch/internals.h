// PyTorch symbols outside its stable ABI, looked up in the libraries that the process has loaded:
// each with the feature that needs it and the behaviour without it.
//
// A missing symbol disables its feature; the library still loads. `python -m torch_cubin doctor`
// lists the symbols. torch_cubin/_pytorch does the same for private names of PyTorch's Python side.
#pragma once

#include <string>

namespace torch_cubin {

// The symbol's address; null if the symbol or its library is missing. Throws [internal] for a
// symbol that is not in the table.
void* pytorch_symbol(const char* symbol);

// The table with the lookups' results, as JSON: {"symbols": [{"name", "library", "feature",
// "without", "found": null if the library is not loaded}]}.
std::string pytorch_symbols_json();

}  // namespace torch_cubin
