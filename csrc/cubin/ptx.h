// The facts in PTX text: version, target, and each entry with its parameters.
//
// Reads declarations and skips the code, so it knows nothing of instructions. Includes neither
// torch nor cuda.h.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "cubin/image.h"

namespace torch_cubin {

struct PtxParam {
  uint32_t index = 0;
  std::string name;
  std::string type;        // "u64", "f32", "b8[128]"
  uint64_t size = 0;       // bytes; 0 for textures, samplers and surfaces
  uint64_t alignment = 0;  // bytes
  ParamKind kind = ParamKind::kUnknown;
};

struct PtxKernel {
  std::string name;
  std::vector<PtxParam> params;
  uint32_t max_registers = 0;                // 0 where not declared
  std::array<uint32_t, 3> required_block{};  // 0 where not declared
  std::array<uint32_t, 3> max_block{};       // 0 where not declared
  std::array<uint32_t, 3> cluster{};         // 0 where not declared
  // Its body, or a function that it calls, names shared memory that the file declares `.extern`,
  // and none of a size of its own.
  bool uses_dynamic_shared = false;
  bool grid_in_clusters = false;  // .blocksareclusters
  bool is_local = false;          // neither .visible nor .weak
  bool is_weak = false;
  size_t begin = 0, end = 0;  // of its text in the file, from `.entry` to the last brace
};

struct Ptx {
  std::string version;  // "9.0"
  Arch arch;            // of the target "sm_90a"
  int address_size = 0;
  size_t size = 0;                      // bytes, without NULs at the end
  bool uses_dynamic_shared = false;     // the file declares `.extern .shared`
  std::vector<PtxKernel> kernels;       // in the file's order
  std::vector<VariableInfo> variables;  // .global and .const, in the file's order
  // Functions and variables that it uses and no part of it defines, but for those that the driver
  // has.
  std::vector<std::string> imports;
};

// Throws [image] for text that is not whole: no version or target, an entry cut short, a brace left
// open. NULs at the end are taken for the text's end.
Ptx parse_ptx(const uint8_t* data, size_t size, const std::string& origin);

// The facts of an entry as those of a cubin's kernel. Offsets are the driver's business: a launch
// passes parameters one by one.
KernelInfo kernel_info_of(const PtxKernel& entry);

// Whether two texts have the same entry of that name: the same text, and the same of all that is no
// entry, which it may use.
bool have_same_entry(const Ptx& a, std::string_view a_text, const Ptx& b, std::string_view b_text,
                     const std::string& name);

// Whether the text has that word anywhere: PTX writes the names of its variables as they are.
bool has_ptx_word(const uint8_t* data, size_t size, const std::string& word);

}  // namespace torch_cubin
