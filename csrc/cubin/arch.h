// Which GPU architecture a cubin is for. Includes neither torch nor cuda.h.
#pragma once

#include "cubin/elf.h"
#include "cubin/image.h"

namespace torch_cubin {

// The arch with its 'a' or 'f' suffix; throws [image] where the file names none.
Arch read_arch(const Elf& elf);

// How well a cubin of that arch serves a device: higher is better, 0 is not at all. An exact 'a'
// beats a family beats a plain arch, and within each the later arch wins.
int rank_cubin(const Arch& arch, int device_sm);

// The same of PTX, compared with other PTX: any cubin goes before it. PTX for a plain arch is
// compiled for any later device; for an 'a' or 'f' arch it is bound to the devices that the cubin
// would be.
int rank_ptx(const Arch& arch, int device_sm);

}  // namespace torch_cubin
