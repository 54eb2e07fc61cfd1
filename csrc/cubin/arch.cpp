// The arch of a cubin: the number is in the ELF flags, the place of the suffix depends on the
// toolkit.
#include "cubin/arch.h"

#include "cubin/nv_info.h"

namespace torch_cubin {
namespace {

constexpr uint32_t kNoteHeader = 12;
constexpr uint64_t kNoteWords = 24;

// "90a" from a command line such as "-arch sm_90a -m 64"; empty if it names no arch.
std::string_view arch_option(std::string_view command) {
  for (std::string_view option : {"-arch sm_", "-arch=sm_"}) {
    const size_t at = command.find(option);
    if (at == std::string_view::npos) continue;
    command.remove_prefix(at + option.size());
    return command.substr(0, command.find_first_of(std::string_view(" \0", 2)));
  }
  return {};
}

// The command line in `.note.nv.tkinfo`, which ptxas 12.9 and later write: ELF note header, owner,
// six words (the last is the command line's offset), and the strings that they refer to.
std::string_view tool_command(const Elf& elf) {
  const ElfSection* note = elf.find(".note.nv.tkinfo");
  if (note == nullptr) return {};
  const Bytes& bytes = note->bytes;
  if (!bytes.contains(0, kNoteHeader)) elf.damaged("has a toolkit note cut short");
  const uint64_t owner = (uint64_t{bytes.u32(0)} + 3) & ~uint64_t{3};
  const uint64_t size = bytes.u32(4), start = kNoteHeader + owner;
  if (!bytes.contains(start, size)) elf.damaged("has a toolkit note that ends outside its section");
  const Bytes words(bytes.data() + start, static_cast<size_t>(size));
  if (!words.contains(0, kNoteWords)) return {};
  const uint64_t command = kNoteWords + words.u32(20);
  if (!words.contains(command, 1)) return {};  // a note of another tool
  const std::string_view text = words.text().substr(static_cast<size_t>(command));
  return text.substr(0, text.find('\0'));
}

}  // namespace

// NOTE: since CUDA 13 e_flags are the same for sm_90 and sm_90a (measured). The suffix comes from
// `.nv.compat` ('a' only), from the compiler's command line (the only place with 'f'), or in the
// older layout from an e_flags bit, which has this meaning for sm_90 only.
Arch read_arch(const Elf& elf) {
  const ElfHeader& header = elf.header();
  const bool old_layout = header.abi_version < 8;
  Arch arch;
  arch.sm = static_cast<int>((old_layout ? header.flags : header.flags >> 8) & 0xff);
  if (arch.sm < 20) {
    elf.damaged("names an unknown GPU architecture", "sm_20 or later",
                "sm_" + std::to_string(arch.sm));
  }
  if (old_layout && arch.sm == 90 && (header.flags & 0x800) != 0) arch.suffix = 'a';
  if (const ElfSection* compat = elf.find(".nv.compat")) {
    for (AttributeReader reader(elf, *compat); reader.next();) {
      const Attribute& attribute = reader.attribute();
      if (attribute.id == kCompatArchSpecific && (attribute.value & 0xff) == 1) arch.suffix = 'a';
    }
  }
  const std::string_view named = arch_option(tool_command(elf));
  const std::string base = std::to_string(arch.sm);
  if (arch.suffix == 0 && (named == base + "a" || named == base + "f")) arch.suffix = named.back();
  return arch;
}

std::string Arch::name() const {
  std::string text = "sm_" + std::to_string(sm);
  if (suffix != 0) text += suffix;
  return text;
}

bool Arch::runs_on(int device_sm) const {
  if (suffix == 'a') return device_sm == sm;
  // NOTE: 10.1 (Thor, 11.0 since CUDA 13) is a separate family within major 10.
  if (suffix == 'f' && (sm == 101) != (device_sm == 101)) return false;
  return device_sm / 10 == sm / 10 && device_sm >= sm;
}

int rank_cubin(const Arch& arch, int device_sm) {
  if (!arch.runs_on(device_sm)) return 0;
  const int group = arch.suffix == 'a' ? 3 : arch.suffix == 'f' ? 2 : 1;
  return group * 10000 + arch.sm;
}

int rank_ptx(const Arch& arch, int device_sm) {
  if (arch.suffix != 0) return rank_cubin(arch, device_sm);
  return arch.sm <= device_sm ? 10000 + arch.sm : 0;
}

}  // namespace torch_cubin
