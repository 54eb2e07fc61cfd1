// What a kernel's machine code (SASS) tells beyond the notes around it.
#pragma once

#include "cubin/elf.h"

namespace torch_cubin {

// Compute capability from which an instruction is 16 bytes long, with its opcode in the lowest 12
// bits.
constexpr int kWideInstructionSm = 70;

// Whether some instruction of `code`, for kWideInstructionSm or newer, reads or writes shared
// memory. False may also mean that it does so by generic addresses.
bool accesses_shared_memory(const Bytes& code);

}  // namespace torch_cubin
