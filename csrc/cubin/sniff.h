// Tells a cubin from the many other things that people pass for one.
//
// Looks at the first bytes only. Includes neither torch nor cuda.h.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

namespace torch_cubin {

// Returns if the bytes begin as a loadable cubin does; otherwise throws [image] with what they are
// and what to do with such a file.
void require_cubin(const uint8_t* data, size_t size, const std::string& origin);

}  // namespace torch_cubin
