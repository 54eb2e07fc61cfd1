#include "ops/matmul/portable_table.h"

namespace torch_cubin {
namespace {

constexpr const char* kMathNames[] = {"float16", "bfloat16", "tf32", "float32", "float64"};
constexpr const char* kLayoutNames[] = {"nn", "nt", "tn", "tt", "any"};
constexpr const char* kPortableKindNames[] = {"mma",    "persistent", "simt",
                                              "sliced", "dot",        "reduce"};

constexpr int64_t kWarpThreads = 32;

// Dot-product kernels read A at any strides; their layout and alignment speak of B.
Access dot_access(const PortableRow& row) {
  if (row.layout == kLayoutAny) return kKElements;
  if (row.layout == kLayoutNT) return kKVectors;
  return row.alignment == kVectorBytes ? kOwnVectors : kOwnElements;
}

}  // namespace

std::string portable_name(const PackageKernel& kernel) {
  const std::string& full = kernel.entry().name;
  return full.substr(0, full.find('_')) + " " + full.substr(full.rfind('_') + 1);
}

PortableRow::PortableRow(PackageKernel& entry, const Device& device) : kernel(&entry) {
  const KernelFields fields(entry);
  kind = static_cast<PortableKind>(fields.index("kind", kPortableKindNames));
  math = static_cast<Math>(fields.index("math", kMathNames));
  layout = static_cast<Layout>(fields.index("layout", kLayoutNames));
  alignment = fields.integer("alignment", 1);
  int64_t tile[3];
  fields.triple("tile", 1, tile);
  tile_m = tile[0];
  tile_n = tile[1];
  tile_k = tile[2];
  slots = device.multiprocessors * fields.integer("blocks_per_multiprocessor", 1);
  if (kind == kMatmulSliced) {  // one a warp
    int64_t block[3];
    fields.triple("block", 1, block);
    slices = block[0] / kWarpThreads;
  }
  chain = static_cast<int64_t>(fields.number("chain", 0, 0));
  invariant_alone = fields.number("invariant_alone", 0, 0) > 0;
  const KernelFields cost = fields.object("cost");
  cost_k_tile = cost.number("k_tile", 0);
  cost_fixed = cost.number("fixed", 0);
  cost_lone = cost.number("lone", 0, Terms().lone);
  cost_lone_fixed = cost.number("lone_fixed", 0, 1);
  const Corrections corrections(device);
  correction = corrections.of(kPortableKindNames[kind]) + corrections.of(portable_name(entry));
}

bool PortableRow::rings() const {
  return kind == kMatmulSliced || (kind == kMatmulSimt && kernel->entry().dynamic_shared > 0);
}

PortableTable::PortableTable(const Device& device, const std::vector<PackageKernel*>& kernels)
    : multiprocessors(device.multiprocessors), shared_each(device.shared_optin + kSharedOfBlock) {
  for (PackageKernel* kernel : kernels) {
    const PortableRow row(*kernel, device);
    switch (row.kind) {
      case kMatmulDot:
        dots[row.math][dot_access(row)].push_back(row);
        break;
      case kMatmulReduce:
        reduce[row.math] = kernel;
        reduce_outputs[row.math] = row.tile_n;
        reduce_cycles[row.math] = row.cost_fixed;
        break;
      default:
        tiles[row.math][row.layout].push_back(row);
    }
  }
  // A dot product of float32 is bound by memory: TF32 would gain nothing, so it stays exact. The
  // partial sums of both are float32.
  for (int i = 0; i < kAccessCount; ++i) dots[kMathTF32][i] = dots[kMathFloat32][i];
  reduce[kMathTF32] = reduce[kMathFloat32];
  reduce_outputs[kMathTF32] = reduce_outputs[kMathFloat32];
  reduce_cycles[kMathTF32] = reduce_cycles[kMathFloat32];
}

}  // namespace torch_cubin
