// parse_cubin: from the ELF and its attributes to the facts of image.h.
#include "cubin/image.h"

#include <algorithm>
#include <unordered_map>
#include <unordered_set>
#include <utility>

#include "cubin/arch.h"
#include "cubin/elf.h"
#include "cubin/error.h"
#include "cubin/near_names.h"
#include "cubin/nv_info.h"
#include "cubin/sass.h"
#include "cubin/sniff.h"

namespace torch_cubin {
namespace {

constexpr uint8_t kSymbolVariable = 1;
constexpr uint8_t kSymbolFunction = 2;
constexpr uint8_t kSymbolSection = 3;
constexpr uint8_t kBindingLocal = 0, kBindingWeak = 2;
constexpr uint8_t kSymbolIsEntry = 0x10;        // STO_CUDA_ENTRY, in st_other
constexpr uint32_t kSectionCode = 1;            // SHT_PROGBITS
constexpr uint32_t kSectionInfo = 0x70000000;   // `.nv.info`
constexpr uint32_t kReservedShared = 1024;      // the driver's shared memory, sm_90 and later
constexpr uint32_t kUnknownStack = 0xffffffff;  // recursion: the compiler cannot tell

constexpr std::string_view kVariables = ".nv.global", kInitialValues = ".nv.global.init",
                           kConstants = ".nv.constant3";

std::string toolkit_name(uint32_t version) {
  return version == 0 ? "" : std::to_string(version / 10) + "." + std::to_string(version % 10);
}

class CubinReader {
 public:
  CubinReader(const uint8_t* data, size_t size, const std::string& origin)
      : elf_(data, size, origin) {
    image_.arch = read_arch(elf_);
    image_.abi_version = elf_.header().abi_version;
    image_.relocatable = elf_.header().type == kElfRelocatable;
    image_.size = size;
  }

  Image read() {
    if (image_.abi_version < 8) toolkit_ = elf_.header().version;
    read_symbol_facts();
    read_symbols();
    mark_dynamic_shared();
    std::sort(image_.kernels.begin(), image_.kernels.end(),
              [](const KernelInfo& a, const KernelInfo& b) { return a.name < b.name; });
    std::sort(image_.variables.begin(), image_.variables.end(),
              [](const VariableInfo& a, const VariableInfo& b) { return a.name < b.name; });
    image_.toolkit = toolkit_name(toolkit_);
    return std::move(image_);
  }

 private:
  // What `.nv.info` records per symbol.
  struct SymbolFacts {
    uint32_t registers = 0;
    uint32_t frame = 0;
    uint32_t min_stack = kUnknownStack;
  };

  void read_symbol_facts();
  void read_symbols();
  void read_variable(const ElfSymbol& symbol);
  void mark_dynamic_shared();
  KernelInfo read_kernel(uint32_t index, const ElfSymbol& symbol, std::string_view name);
  const ElfSection& code_of(const ElfSymbol& symbol, const std::string& name) const;
  const ElfSection& info_of(const ElfSymbol& symbol, const std::string& name);
  uint64_t reserved_shared() const {  // the linker adds it
    return image_.arch.sm >= 90 && !image_.relocatable ? kReservedShared : 0;
  }

  Elf elf_;
  Image image_;
  std::unordered_map<uint32_t, SymbolFacts> facts_;
  std::vector<bool> has_symbol_;  // per section: a symbol stands for it
  uint64_t info_bytes_ = 0;
  uint32_t toolkit_ = 0;  // 130 for 13.0
};

void CubinReader::read_symbol_facts() {
  const ElfSection* info = elf_.find(".nv.info");
  if (info == nullptr) return;
  for (AttributeReader reader(elf_, *info); reader.next();) {
    const uint8_t id = reader.attribute().id;
    if (id != kAttrRegisters && id != kAttrFrameSize && id != kAttrMinStackSize) continue;
    const Bytes& payload = reader.payload(8);
    const uint32_t symbol = payload.u32(0), value = payload.u32(4);
    if (symbol >= elf_.symbol_count()) {
      elf_.damaged("has an attribute of a symbol that does not exist",
                   "an index below " + std::to_string(elf_.symbol_count()), std::to_string(symbol));
    }
    SymbolFacts& entry = facts_[symbol];
    if (id == kAttrRegisters) entry.registers = value;
    if (id == kAttrFrameSize) entry.frame = value;
    if (id == kAttrMinStackSize) entry.min_stack = value;
  }
}

void CubinReader::read_symbols() {
  has_symbol_.resize(elf_.sections().size());
  std::unordered_set<std::string_view> names;
  for (uint32_t i = 0; i < elf_.symbol_count(); ++i) {
    const ElfSymbol symbol = elf_.symbol(i);
    if (symbol.type == kSymbolSection && symbol.section < has_symbol_.size()) {
      has_symbol_[symbol.section] = true;
    }
    if (symbol.type == kSymbolVariable) read_variable(symbol);
    if (symbol.type != kSymbolFunction || (symbol.other & kSymbolIsEntry) == 0) continue;
    const std::string_view name = elf_.symbol_name(symbol);
    if (name.empty()) elf_.damaged("has a kernel without a name");
    if (!names.insert(name).second) {
      elf_.damaged("has two kernels named '" + printable(name) + "'", "one");
    }
    image_.kernels.push_back(read_kernel(i, symbol, name));
  }
}

// Compilers name what they add, as the texts of printf, with a '$' or '.'.
void CubinReader::read_variable(const ElfSymbol& symbol) {
  if (symbol.section >= elf_.sections().size()) return;
  const std::string_view section = elf_.sections()[symbol.section].name;
  const bool is_constant = section == kConstants;
  if (!is_constant && section != kVariables && section != kInitialValues) return;
  const std::string_view name = elf_.symbol_name(symbol);
  if (name.empty() || name[0] == '$' || name[0] == '.') return;
  image_.variables.push_back({std::string(name), symbol.size, is_constant});
}

KernelInfo CubinReader::read_kernel(uint32_t index, const ElfSymbol& symbol,
                                    std::string_view name) {
  KernelInfo kernel;
  kernel.name = std::string(name);
  kernel.is_local = symbol.binding == kBindingLocal;
  kernel.is_weak = symbol.binding == kBindingWeak;
  const ElfSection& code = code_of(symbol, kernel.name);
  const auto found = facts_.find(index);
  const SymbolFacts facts = found != facts_.end() ? found->second : SymbolFacts{};
  // The older layout also has both numbers in the code section's header, and CUDA 11.0 only there.
  kernel.registers = facts.registers != 0 ? facts.registers : code.info >> 24;
  kernel.stack = facts.min_stack != kUnknownStack ? facts.min_stack : facts.frame;
  if (image_.abi_version < 8) kernel.barriers = code.flags >> 20 & 0x7f;

  const ElfSection& info = info_of(symbol, kernel.name);
  toolkit_ = std::max(toolkit_, read_kernel_attributes(elf_, info, kernel).toolkit);

  if (const ElfSection* shared = elf_.find(".nv.shared." + kernel.name)) {
    if (shared->size > UINT32_MAX) {
      elf_.damaged("has too much static shared memory in kernel '" + printable(name) + "'",
                   "less than 4 GiB", std::to_string(shared->size) + " bytes");
    }
    const uint64_t bytes = shared->size - std::min(shared->size, reserved_shared());
    kernel.static_shared = static_cast<uint32_t>(bytes);
  }
  kernel.uses_dynamic_shared = kernel.static_shared == 0 && !image_.relocatable &&
                               image_.arch.sm >= kWideInstructionSm &&
                               accesses_shared_memory(code.bytes);
  return kernel;
}

const ElfSection& CubinReader::code_of(const ElfSymbol& symbol, const std::string& name) const {
  const ElfSection* code = elf_.find(".text." + name);
  if (code == nullptr || code->index != symbol.section || code->type != kSectionCode ||
      symbol.size == 0 || !code->bytes.contains(symbol.value, symbol.size)) {
    elf_.damaged("has no code for kernel '" + printable(name) + "'",
                 "its symbol inside section '.text." + printable(name) + "'");
  }
  return *code;
}

const ElfSection& CubinReader::info_of(const ElfSymbol& symbol, const std::string& name) {
  const ElfSection* info = elf_.find(".nv.info." + name);
  if (info == nullptr || info->type != kSectionInfo || info->info != symbol.section) {
    elf_.damaged("has no parameter table of kernel '" + printable(name) + "'",
                 "a section '.nv.info." + printable(name) + "' that belongs to its code");
  }
  // Tables that overlap would let a small file ask for endless work.
  info_bytes_ += info->bytes.size();
  if (info_bytes_ > image_.size) elf_.damaged("has parameter tables that overlap");
  return *info;
}

// A kernel whose shared memory is all dynamic has a section for it without contents and, unlike
// one with static arrays, without a symbol: that tells also where its code goes by generic
// addresses alone. NOTE: every kernel of a file gets such a section as soon as one needs it (all
// archs with CUDA 13, sm_90 always), so only a lone kernel is sure.
void CubinReader::mark_dynamic_shared() {
  if (image_.kernels.size() != 1 || image_.relocatable) return;
  KernelInfo& kernel = image_.kernels[0];
  const ElfSection* shared = elf_.find(".nv.shared." + kernel.name);
  kernel.uses_dynamic_shared |=
      shared != nullptr && !has_symbol_[shared->index] && shared->size == reserved_shared();
}

}  // namespace

Image parse_cubin(const uint8_t* data, size_t size, const std::string& origin) {
  require_cubin(data, size, origin);
  return CubinReader(data, size, origin).read();
}

Image inspect_cubin(const uint8_t* data, size_t size, const std::string& origin) {
  const Sniffed found = sniff(data, size, origin);
  if (found.format != Format::kCubin && found.format != Format::kRelocatableCubin) {
    fail(found.refusal);
  }
  return CubinReader(data, size, origin).read();
}

bool has_symbol(const uint8_t* data, size_t size, const std::string& origin,
                const std::string& name) {
  return Elf(data, size, origin).has_symbol(name);
}

bool state_types(KernelInfo& kernel, const std::string& demangled) {
  const std::vector<StatedType> types = stated_types(demangled);
  if (types.empty() || types.size() != kernel.params.size()) return false;
  for (size_t i = 0; i < types.size(); ++i) {
    const ParamInfo& param = kernel.params[i];
    const bool fits = types[i].size == 0 || types[i].size == param.size;
    if (!fits || (types[i].is_pointer && param.kind == ParamKind::kValue)) return false;
  }
  for (size_t i = 0; i < types.size(); ++i) {
    ParamInfo& param = kernel.params[i];
    if (param.kind == ParamKind::kUnknown && types[i].size != 0) {
      param.kind = types[i].is_pointer ? ParamKind::kPointer : ParamKind::kValue;
    }
    param.stated = types[i];
  }
  return true;
}

bool have_same_kernel(const uint8_t* a, size_t a_size, const uint8_t* b, size_t b_size,
                      const std::string& name) {
  const Elf first(a, a_size, "an image"), second(b, b_size, "an image");
  const auto same = [&](const std::string& section) {
    const ElfSection *const in_first = first.find(section), *const in_second = second.find(section);
    if (in_first == nullptr || in_second == nullptr) return in_first == in_second;
    return in_first->size == in_second->size && in_first->bytes.text() == in_second->bytes.text();
  };
  return same(".text." + name) && same(".nv.info." + name) && same(std::string(kVariables)) &&
         same(std::string(kInitialValues)) && same(std::string(kConstants));
}

const KernelInfo* Image::find(const std::string& name) const {
  const auto found = std::lower_bound(
      kernels.begin(), kernels.end(), name,
      [](const KernelInfo& kernel, const std::string& wanted) { return kernel.name < wanted; });
  return found != kernels.end() && found->name == name ? &*found : nullptr;
}

const KernelInfo& Image::kernel(const std::string& name) const {
  if (const KernelInfo* found = find(name)) return *found;
  if (kernels.empty()) {
    fail({"no_kernel", "kernel '" + printable(name) + "'", "is not in the image", "", "",
          "The image holds no kernel at all: is the kernel a __global__ function that is not "
          "static, and if it is a template, is it instantiated?"});
  }
  fail({"no_kernel", "kernel '" + printable(name) + "'", "is not in the image",
        nearest_names(names_of(kernels), name), "", kNamesAdvice});
}

}  // namespace torch_cubin
