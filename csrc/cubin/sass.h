// Facts from a kernel's machine code (SASS) that the cubin's metadata does not contain.
#pragma once

#include "cubin/elf.h"

namespace torch_cubin {

// The first compute capability with 16-byte instructions, whose opcode is in the lowest 12 bits.
constexpr int kWideInstructionSm = 70;

// Whether an instruction of `code`, for kWideInstructionSm or newer, accesses shared memory: one
// that can run, since compilers also write some that cannot. Does not detect accesses by generic
// addresses.
bool accesses_shared_memory(const Bytes& code);

}  // namespace torch_cubin
