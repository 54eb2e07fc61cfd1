// The GPU architecture of a cubin. Includes neither torch nor cuda.h.
#pragma once

#include "cubin/elf.h"
#include "cubin/image.h"

namespace torch_cubin {

// The arch with its 'a' or 'f' suffix. Throws [image] if the file names none.
Arch read_arch(const Elf& elf);

// How well a cubin of the arch suits a device: higher is better, 0 means that it cannot run. An
// exact 'a' arch precedes a family, which precedes a plain arch; within each, a later arch is
// better.
int rank_cubin(const Arch& arch, int device_sm);

// The same for PTX, comparable only with other PTX, since any cubin is preferred. PTX for a plain
// arch runs on all later devices; PTX for an 'a' or 'f' arch only on the devices of such a cubin.
int rank_ptx(const Arch& arch, int device_sm);

}  // namespace torch_cubin
