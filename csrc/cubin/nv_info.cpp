// Decoder of `.nv.info`. The record layouts were found by compiling kernels with known parameters
// and directives with ptxas 11.8, 12.4, 12.9 and 13.0; the tests repeat that if nvcc is installed.
#include "cubin/nv_info.h"

#include <algorithm>

#include "cubin/error.h"

namespace torch_cubin {
namespace {

constexpr uint32_t kPointerBytes = 8;

std::string in_section(const ElfSection& section) {
  return "in section '" + printable(section.name) + "'";
}

std::array<uint32_t, 3> read_triple(const AttributeReader& reader) {
  const Bytes& payload = reader.payload(12);
  return {payload.u32(0), payload.u32(4), payload.u32(8)};
}

// `space`: the state space that `.ptr` declares, 0 if absent. nvcc writes it for sm_100 and later,
// Triton always; no compiler writes it for integers.
ParamKind kind_of(uint32_t size, uint32_t space) {
  if (size != kPointerBytes) return ParamKind::kValue;
  return space != 0 ? ParamKind::kPointer : ParamKind::kUnknown;
}

ParamInfo read_param(const AttributeReader& reader) {
  const Bytes& payload = reader.payload(12);
  ParamInfo param;
  param.index = payload.u16(4);
  param.offset = payload.u16(6);
  uint32_t space;
  if (reader.attribute().id == kAttrParam) {
    const uint32_t word = payload.u32(8);
    param.size = word >> 18;
    space = word >> 8 & 15;
  } else {
    // NOTE: fields are a 16-bit size, log2 of the pointee's alignment, and the space: `.ptr .global
    // .align 16` is 0x04040008 (ptxas 12.4 to 13.0).
    param.size = payload.u16(8);
    space = payload.u8(11);
  }
  param.kind = kind_of(param.size, space);
  return param;
}

void check_params(const Elf& elf, const ElfSection& section, KernelInfo& kernel,
                  int64_t recorded_bytes) {
  std::sort(kernel.params.begin(), kernel.params.end(),
            [](const ParamInfo& a, const ParamInfo& b) { return a.index < b.index; });
  uint32_t end = 0;
  for (size_t i = 0; i < kernel.params.size(); ++i) {
    const ParamInfo& param = kernel.params[i];
    if (param.index != i) {
      elf.damaged("skips or repeats a parameter " + in_section(section),
                  "parameter " + std::to_string(i), "parameter " + std::to_string(param.index));
    }
    if (param.offset < end) {
      elf.damaged(
          "has overlapping parameters " + in_section(section),
          "parameter " + std::to_string(i) + " at offset " + std::to_string(end) + " or later",
          "offset " + std::to_string(param.offset));
    }
    end = param.offset + param.size;  // at most 2^17
  }
  // The compiler does not round up the total, so it equals the last parameter's end.
  if (recorded_bytes >= 0 && recorded_bytes != end) {
    elf.damaged("has parameters that disagree with their total size " + in_section(section),
                std::to_string(recorded_bytes) + " bytes",
                counted(end, "byte") + " in " + counted(kernel.params.size(), "parameter"));
  }
  kernel.param_bytes = end;
}

}  // namespace

bool AttributeReader::next() {
  const Bytes& bytes = section_.bytes;
  if (at_ == bytes.size()) return false;
  if (!bytes.contains(at_, 4)) elf_.damaged("has an attribute cut short " + in_section(section_));
  const uint8_t format = bytes.u8(at_);
  attribute_.id = bytes.u8(at_ + 1);
  attribute_.value = bytes.u16(at_ + 2);
  attribute_.payload = Bytes();
  at_ += 4;
  if (format < 1 || format > 4) {
    elf_.damaged("has an attribute of unknown format " + in_section(section_), "1 to 4",
                 std::to_string(format));
  }
  if (format == 4) {
    if (!bytes.contains(at_, attribute_.value)) {
      elf_.damaged("has an attribute that ends outside its section " + in_section(section_),
                   "at most " + std::to_string(bytes.size() - at_) + " bytes",
                   std::to_string(attribute_.value) + " bytes");
    }
    attribute_.payload = Bytes(bytes.data() + at_, attribute_.value);
    at_ += attribute_.value;
  }
  return true;
}

const Bytes& AttributeReader::payload(size_t bytes) const {
  if (attribute_.payload.size() != bytes) {
    elf_.damaged("has an attribute " + std::to_string(attribute_.id) + " of a wrong size " +
                     in_section(section_),
                 std::to_string(bytes) + " bytes",
                 std::to_string(attribute_.payload.size()) + " bytes");
  }
  return attribute_.payload;
}

InfoAttributes read_kernel_attributes(const Elf& elf, const ElfSection& section,
                                      KernelInfo& kernel) {
  InfoAttributes found;
  int64_t param_bytes = -1, bank_bytes = -1;
  for (AttributeReader reader(elf, section); reader.next();) {
    const Attribute& attribute = reader.attribute();
    switch (attribute.id) {
      case kAttrParam:
      case kAttrParamV2:
        kernel.params.push_back(read_param(reader));
        break;
      case kAttrParamBytes:
        param_bytes = attribute.value;
        break;
      case kAttrParamCbank:
        bank_bytes = reader.payload(8).u16(6);
        break;
      case kAttrBarriers:
        kernel.barriers = attribute.value & 0xff;
        break;
      case kAttrRequiredThreads:
        kernel.required_block = read_triple(reader);
        break;
      case kAttrMaxThreads:
        kernel.max_block = read_triple(reader);
        break;
      case kAttrCluster:
        kernel.cluster = read_triple(reader);
        break;
      case kAttrBlocksAreClusters:
        kernel.grid_in_clusters = true;
        break;
      case kAttrToolkit:
        found.toolkit = reader.payload(4).u32(0);
        break;
      default:
        break;  // irrelevant to a launch
    }
  }
  if (param_bytes >= 0 && bank_bytes >= 0 && param_bytes != bank_bytes) {
    elf.damaged("has two sizes of the parameters " + in_section(section),
                std::to_string(param_bytes) + " bytes", std::to_string(bank_bytes) + " bytes");
  }
  check_params(elf, section, kernel, param_bytes >= 0 ? param_bytes : bank_bytes);
  return found;
}

}  // namespace torch_cubin
