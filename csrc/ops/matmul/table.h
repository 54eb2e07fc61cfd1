// The catalog's matmul kernels for one device, sorted for choosing. Which kernels there are, and
// what they cost, is the manifest's data: a new kernel is a new entry there.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "package/catalog.h"
#include "pytorch/tensor.h"
#include "runtime/device.h"

namespace torch_cubin {

// What the multiplications are done in. float32 tensors have two.
enum Math { kMathFloat16, kMathBFloat16, kMathTF32, kMathFloat32, kMathFloat64, kMathCount };

// Order of A, then of B: A "n" has contiguous K, "t" contiguous M; B "n" has contiguous N, "t"
// contiguous K. kLayoutAny takes any strides and any alignment.
enum Layout { kLayoutNN, kLayoutNT, kLayoutTN, kLayoutTT, kLayoutAny, kLayoutCount };

constexpr int64_t kVectorBytes = 16;  // what the aligned kernels load at a time

// How a kernel can read an operand. "Own" is the operand's dim that is not K: M of A, N of B.
enum Access {
  kKVectors,     // K is contiguous, in 16-byte vectors
  kOwnVectors,   // the own dim is contiguous, in 16-byte vectors
  kOwnElements,  // by elements, and neighbours along the own dim are nearer
  kKElements,    // by elements, and neighbours along K are nearer
  kAccessCount
};

struct MatmulTable {
  struct Row {
    CatalogKernel* kernel;
    int64_t tile_m, tile_n, tile_k;
    int64_t slots;  // blocks that the device runs at a time
    double cost_k_tile, cost_fixed, cost_lone;
    bool dot;
    bool persistent;  // a block can compute several tiles, one after the other, if all are whole
  };
  std::string arch;
  std::vector<Row> tiles[kMathCount][kLayoutCount];  // kinds "mma", "persistent", "simt"
  std::vector<Row> dots[kMathCount][kAccessCount];   // kind "dot", by B: at most tile_m rows of A
  CatalogKernel* reduce[kMathCount] = {};            // kind "reduce": adds split-K partials
  int64_t multiprocessors = 0;
  double bytes_per_cycle = 0;  // of the device's memory
};

// Built on first use of the device; throws [arch] if the catalog has nothing for it, [internal] if
// the manifest names a math, layout or kind that this library does not know.
const MatmulTable& matmul_table(const Device& device);

}  // namespace torch_cubin
