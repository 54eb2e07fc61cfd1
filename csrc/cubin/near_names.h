// The nearest names to an unknown one, for errors.
#pragma once

#include <string>
#include <vector>

#include "cubin/image.h"

namespace torch_cubin {

constexpr const char* kNamesAdvice =
    "A name is a symbol of the file, or what C++ calls it: 'f', 'ns::f', 'f<float>'.";

std::vector<std::string> names_of(const std::vector<KernelInfo>& kernels);

// "'vec_add', 'vec_sub' (nearest of 40 names)", symbols with their C++ names; empty if there are no
// names.
std::string nearest_names(const std::vector<std::string>& names, const std::string& name);

}  // namespace torch_cubin
