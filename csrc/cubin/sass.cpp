// Opcodes from cuobjdump 13.0 for sm_75 to sm_121, in kernels built by ptxas 11.8 to 13.0. No other
// instruction uses them. tests/unit/test_cubin_parser.py compiles some of each.
#include "cubin/sass.h"

#include <algorithm>
#include <iterator>

namespace torch_cubin {
namespace {

constexpr uint64_t kInstructionBytes = 16;
constexpr uint16_t kSharedOpcodes[] = {
    0x984,                              // LDS
    0x388, 0x988,                       // STS
    0x83b,                              // LDSM: ldmatrix
    0x844,                              // STSM: stmatrix
    0x38c, 0x38d, 0x58d, 0x98c, 0xf8c,  // ATOMS
    0xfae,                              // LDGSTS: cp.async
    0x5a7, 0x9a7, 0x5b2,                // SYNCS: mbarrier
    0x3ba,                              // UBLKCP: cp.async.bulk
    0x5b4, 0x3b5,                       // UTMALDG, UTMASTG: cp.async.bulk.tensor
};
// The guard of an instruction that never runs, @!PT. ptxas -g puts four such LDS before the fences
// of a kernel, whether or not it has shared memory.
constexpr uint16_t kNever = 0xf;

}  // namespace

bool accesses_shared_memory(const Bytes& code) {
  for (uint64_t at = 0; code.contains(at, kInstructionBytes); at += kInstructionBytes) {
    const uint16_t word = code.u16(at), opcode = word & 0xfff, guard = word >> 12;
    if (guard == kNever) continue;
    if (std::find(std::begin(kSharedOpcodes), std::end(kSharedOpcodes), opcode) !=
        std::end(kSharedOpcodes)) {
      return true;
    }
  }
  return false;
}

}  // namespace torch_cubin
