// The dynamic loader, pinned to symbol versions that every supported glibc has.
//
// NOTE: a plain call of dlopen on a build machine with glibc >= 2.34 needs dlopen@GLIBC_2.34 at
// run time, which would shut out every system older than 2021. Only dl.cpp calls the loader.
#pragma once

#include <string>

namespace torch_cubin {

// A library that is already loaded, or null. Never loads one.
void* dl_loaded(const char* name);

// Loads a library; null, and the loader's text in `error`, if that fails.
void* dl_open(const char* name, std::string* error);

// A symbol of `library`, or null.
void* dl_symbol(void* library, const char* name);

// The path of the shared library that holds `address`, "" if unknown.
std::string dl_path_of(const void* address);

}  // namespace torch_cubin
