// Which GPU architecture a cubin is for. Includes neither torch nor cuda.h.
#pragma once

#include "cubin/elf.h"
#include "cubin/image.h"

namespace torch_cubin {

// The arch with its 'a' or 'f' suffix; throws [image] where the file names none.
Arch read_arch(const Elf& elf);

}  // namespace torch_cubin
