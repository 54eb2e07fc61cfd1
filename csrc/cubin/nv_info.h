// The attributes of `.nv.info` sections: the compiler's metadata for the driver about each kernel.
//
// Decodes the encoding (format, id, value or payload) and the records that a launch needs. Includes
// neither torch nor cuda.h.
#pragma once

#include <array>
#include <cstdint>
#include <string>

#include "cubin/elf.h"
#include "cubin/image.h"

namespace torch_cubin {

// NVIDIA's ids (EIATTR_*), as nvlink 13.0 lists them.
constexpr uint8_t kAttrMaxThreads = 0x05;
constexpr uint8_t kAttrParamCbank = 0x0a;
constexpr uint8_t kAttrRequiredThreads = 0x10;
constexpr uint8_t kAttrFrameSize = 0x11;
constexpr uint8_t kAttrMinStackSize = 0x12;
constexpr uint8_t kAttrParam = 0x17;
constexpr uint8_t kAttrParamBytes = 0x19;
constexpr uint8_t kAttrRegisters = 0x2f;
constexpr uint8_t kAttrToolkit = 0x37;
constexpr uint8_t kAttrCluster = 0x3d;
constexpr uint8_t kAttrParamV2 = 0x45;
constexpr uint8_t kAttrBarriers = 0x4c;
constexpr uint8_t kAttrBlocksAreClusters = 0x5b;
constexpr uint8_t kCompatArchSpecific = 0x09;  // of `.nv.compat`, which has its own ids

struct Attribute {
  uint8_t id = 0;
  uint16_t value = 0;  // for formats without a payload
  Bytes payload;       // for format 4
};

// Reads the attributes of one section in order:
//   for (AttributeReader reader(elf, section); reader.next();) use(reader.attribute());
class AttributeReader {
 public:
  AttributeReader(const Elf& elf, const ElfSection& section) : elf_(elf), section_(section) {}
  bool next();
  const Attribute& attribute() const { return attribute_; }
  // The payload; throws unless it has exactly `bytes` bytes.
  const Bytes& payload(size_t bytes) const;

 private:
  const Elf& elf_;
  const ElfSection& section_;
  size_t at_ = 0;
  Attribute attribute_;
};

// The facts of `.nv.info.<kernel>` that are not in KernelInfo: the toolkit (130 for 13.0, or 0).
struct InfoAttributes {
  uint32_t toolkit = 0;
};

// Sets params, param_bytes, barriers, required_block, max_block, cluster and grid_in_clusters of
// `kernel`. Throws [image] if parameters are missing, duplicate or overlapping, or do not match
// their total size.
InfoAttributes read_kernel_attributes(const Elf& elf, const ElfSection& section,
                                      KernelInfo& kernel);

}  // namespace torch_cubin
