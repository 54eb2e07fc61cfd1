// Image: the facts in a cubin's bytes, read without a GPU. The bytes are untrusted.
//
// Includes neither torch nor cuda.h.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "cubin/stated_type.h"

namespace torch_cubin {

// A GPU architecture: sm_90 is {90, 0}, sm_90a {90, 'a'}, sm_100f {100, 'f'}.
struct Arch {
  int sm = 0;
  char suffix = 0;
  std::string name() const;

  // Whether code for this arch runs on a device of compute capability `device_sm` (90 for 9.0): 'a'
  // only on its own, 'f' on its own and later ones of its family, plain on the same major with an
  // equal or higher minor.
  bool runs_on(int device_sm) const;
};

enum class ParamKind { kUnknown, kPointer, kValue };

struct ParamInfo {
  uint32_t index = 0;
  uint32_t offset = 0;                   // bytes from the start of the parameter block
  uint32_t size = 0;                     // bytes
  ParamKind kind = ParamKind::kUnknown;  // recorded only by some compilers
  StatedType stated;                     // from PTX, or from state_types() below
  // Of which its values are multiples, by a file beside (package/triton_notes.h); a power of 2.
  uint32_t multiple_of = 1;
};

struct KernelInfo {
  std::string name;               // the symbol, for cuLibraryGetKernel
  std::vector<ParamInfo> params;  // by index
  uint32_t param_bytes = 0;       // end of the last parameter
  uint32_t registers = 0;         // per thread
  uint32_t static_shared = 0;     // bytes, without the driver's reserved ones
  uint32_t stack = 0;             // bytes per thread
  uint32_t barriers = 0;
  std::array<uint32_t, 3> required_block{};  // 0 if not recorded
  std::array<uint32_t, 3> max_block{};       // 0 if not recorded
  std::array<uint32_t, 3> cluster{};         // 0 if not recorded
  // True if the kernel uses shared memory and the file reserves none, so that every launch must
  // pass some (`extern __shared__`; the size is not recorded). False if unknown: a kernel with
  // static arrays may also use dynamic shared memory.
  bool uses_dynamic_shared = false;
  // True for `__block_size__` with a cluster: a launch's grid counts clusters instead of blocks.
  bool grid_in_clusters = false;
  bool is_local = false;  // its symbol is local: a `static` kernel
  bool is_weak = false;
};

// A `__device__` or `__constant__` variable.
struct VariableInfo {
  std::string name;  // the symbol
  uint64_t size = 0;
  bool is_constant = false;
};

struct Image {
  Arch arch;
  bool relocatable = false;             // must be linked before it can be loaded
  int abi_version = 0;                  // EI_ABIVERSION: 7 or 8
  std::string toolkit;                  // "13.0"; empty if not recorded
  size_t size = 0;                      // bytes
  std::vector<KernelInfo> kernels;      // entry kernels only, by name
  std::vector<VariableInfo> variables;  // by name

  const KernelInfo* find(const std::string& name) const;  // null if missing
  // The kernel of that name. Throws [no_kernel] with the nearest names.
  const KernelInfo& kernel(const std::string& name) const;
};

// Parses a loadable cubin. `origin` names it in errors ("file 'x.cubin'", "bytes"). Throws [image]
// for any other format, every truncation and every inconsistent offset.
Image parse_cubin(const uint8_t* data, size_t size, const std::string& origin);

// Whether a loadable cubin's symbol table has a symbol of that name, of any kind.
bool has_symbol(const uint8_t* data, size_t size, const std::string& origin,
                const std::string& name);

// Adds the parameter types in the kernel's demangled name. Returns false, without changes, if they
// do not match the parameters: a compiler may change a kernel's parameters.
bool state_types(KernelInfo& kernel, const std::string& demangled);

// Whether two loadable cubins have the same kernel of that name: equal code, and equal initial
// values of the variables that it may use.
bool have_same_kernel(const uint8_t* a, size_t a_size, const uint8_t* b, size_t b_size,
                      const std::string& name);

// Like parse_cubin, but also accepts relocatable cubins: for inspection, not for loading.
Image inspect_cubin(const uint8_t* data, size_t size, const std::string& origin);

// The same facts as JSON, the result of torch_cubin.inspect.
std::string image_to_json(const Image& image);

}  // namespace torch_cubin
