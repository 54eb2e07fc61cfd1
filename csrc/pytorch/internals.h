// What this library takes of PyTorch beyond its stable ABI: symbols of libraries that are already in
// the process, each with the feature that needs it and what happens without it.
//
// A symbol that this PyTorch lacks costs its feature, never the load. `python -m torch_cubin doctor`
// lists them; torch_cubin/_pytorch does the same for Python's private names.
#pragma once

#include <string>

namespace torch_cubin {

// The symbol, or null: it or its library is missing. One that is not in the table is an internal
// error.
void* pytorch_symbol(const char* symbol);

// The table with what was found, as JSON: {"symbols": [{"name", "library", "feature", "without",
// "found": null where the library is not loaded}]}.
std::string pytorch_symbols_json();

}  // namespace torch_cubin
