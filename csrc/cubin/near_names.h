// The names that come closest to one that is not there, for an error.
#pragma once

#include <string>
#include <vector>

#include "cubin/image.h"

namespace torch_cubin {

// "'vec_add', 'vec_sub' (nearest of 40 kernels)"; empty where there are no kernels.
std::string nearest_names(const std::vector<KernelInfo>& kernels, const std::string& name);

}  // namespace torch_cubin
