// The facts in PTX text: version, target, and each entry with its parameters.
//
// Reads declarations and ignores instructions. Includes neither torch nor cuda.h.
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
  uint32_t max_registers = 0;                // 0 if not declared
  std::array<uint32_t, 3> required_block{};  // 0 if not declared
  std::array<uint32_t, 3> max_block{};       // 0 if not declared
  std::array<uint32_t, 3> cluster{};         // 0 if not declared
  // The entry or a function that it calls uses `.extern` shared memory, and none of a fixed size.
  bool uses_dynamic_shared = false;
  bool grid_in_clusters = false;  // .blocksareclusters
  bool is_local = false;          // neither .visible nor .weak
  bool is_weak = false;
  size_t begin = 0, end = 0;  // range in the text, from `.entry` to the last brace
};

struct Ptx {
  std::string version;  // "9.0"
  Arch arch;            // of the target "sm_90a"
  int address_size = 0;
  size_t size = 0;                      // bytes, without NULs at the end
  bool uses_dynamic_shared = false;     // the file declares `.extern .shared`
  std::vector<PtxKernel> kernels;       // in the file's order
  std::vector<VariableInfo> variables;  // .global and .const, in the file's order
  // Functions and variables that the file uses without defining them, except those that the driver
  // provides.
  std::vector<std::string> imports;
};

// Throws [image] for incomplete text: no version or target, a truncated entry, an unclosed brace.
// NULs at the end are ignored.
Ptx parse_ptx(const uint8_t* data, size_t size, const std::string& origin);

// The facts of an entry as a KernelInfo. Offsets ignore alignment, since a launch passes parameters
// one by one.
KernelInfo kernel_info_of(const PtxKernel& entry);

// Whether two texts have the same entry of that name: equal text of the entry, and of everything
// outside of entries, which it may use.
bool have_same_entry(const Ptx& a, std::string_view a_text, const Ptx& b, std::string_view b_text,
                     const std::string& name);

// Whether the text contains the word: PTX writes the names of variables literally.
bool has_ptx_word(const uint8_t* data, size_t size, const std::string& word);

}  // namespace torch_cubin
