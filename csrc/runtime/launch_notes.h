// LaunchNotes: the facts about launches in a file that a compiler wrote next to a cubin (Triton's
// NAME.json).
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

namespace torch_cubin {

class Kernel;

struct LaunchNotes {
  std::string kernel;         // its symbol
  std::string origin;         // for errors: "file 'add.json'"
  size_t hidden = 0;          // trailing pointers that the compiler added, for scratch memory
  int64_t scratch = 0;        // bytes a block that they must point to
  int64_t shared_memory = 0;  // dynamic, bytes a block
  int64_t threads = 0;        // a block
  bool cooperative = false;
  bool dependent = false;  // programmatic dependent launch
  bool is_filled = false;  // launches get all of this, and null pointers for the hidden parameters
};

// The notes that fill in the kernel's launches; null where callers pass everything. Throws [params]
// if the kernel's images say different things.
const LaunchNotes* filled_notes(const Kernel& kernel);

// The advice for a call with `given` arguments if the kernel has another number of parameters and
// the notes next to its file, or pointers at the end, show that a compiler added some; or "".
std::string hidden_advice(const Kernel& kernel, size_t given);

}  // namespace torch_cubin
