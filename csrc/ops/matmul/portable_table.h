// The portable backend's kernels on one device, sorted for choosing. Which there are, and what they
// cost, is the manifest's data: a new instantiation is a new entry there.
#pragma once

#include <cstdint>
#include <vector>

#include "ops/matmul/backend.h"

namespace torch_cubin {

// Order of A, then of B: A "n" has contiguous K, "t" contiguous M; B "n" has contiguous N, "t"
// contiguous K. kLayoutAny takes any strides and any alignment.
enum Layout { kLayoutNN, kLayoutNT, kLayoutTN, kLayoutTT, kLayoutAny, kLayoutCount };

constexpr int64_t kSharedOfBlock = 1024;  // bytes that the driver takes of each block

// mma.cu has two kinds; dot.cu and axpy.cu share one.
enum PortableKind {
  kMatmulMma,
  kMatmulPersistent,
  kMatmulSimt,
  kMatmulSliced,
  kMatmulDot,
  kMatmulReduce
};

// "mma_matmul_bf16_nn_16x128x64" is "mma 16x128x64": type and layout are the product's.
std::string portable_name(const PackageKernel& kernel);

// One entry of the manifest.
struct PortableRow {
  // Throws [params] or [file] for an entry that these kernels do not have.
  PortableRow(PackageKernel& kernel, const Device& device);

  PackageKernel* kernel;
  PortableKind kind;
  Math math;
  Layout layout;
  int64_t alignment;  // bytes
  int64_t tile_m, tile_n, tile_k;
  int64_t slots;           // blocks that the device runs at a time
  double cost_k_tile;      // cycles of one block per k tile
  double cost_fixed;       // cycles of one block outside the k loop
  double cost_lone;        // share of cost_k_tile that a block alone on its multiprocessor needs
  double cost_lone_fixed;  // and of cost_fixed
  double correction;       // of its kind and its tile (Corrections)
  int64_t slices = 1;      // of K, that a block adds up by themselves
  int64_t chain = 0;       // float32: terms added from zero, and then to those before; 0: all
  bool invariant_alone;    // serves batch_invariant() alone: others have quicker ones

  bool dot() const { return kind == kMatmulDot; }
  // float32 kernels whose ring of stages is all of a block's shared memory.
  bool rings() const;
  bool chains_in_ring() const { return chain > 0 && rings(); }
  // Parts of K are blocks of a cluster, which adds them up.
  bool clusters() const { return kind == kMatmulSliced && chain == 0; }
  // A block can compute several tiles, one after the other, if all are whole.
  bool persistent() const { return kind == kMatmulPersistent; }
};

struct PortableTable {
  PortableTable(const Device& device, const std::vector<PackageKernel*>& kernels);

  std::vector<PortableRow> tiles[kMathCount][kLayoutCount];  // all kinds but "dot" and "reduce"
  std::vector<PortableRow> dots[kMathCount][kAccessCount];   // by B: at most tile_m rows of A
  PackageKernel* reduce[kMathCount] = {};                    // adds split-K partials
  int64_t reduce_outputs[kMathCount] = {};                   // of a block
  double reduce_cycles[kMathCount] = {};                     // of a launch
  int64_t multiprocessors = 0;
  int64_t shared_each = 0;  // bytes of shared memory of a multiprocessor
};

}  // namespace torch_cubin
