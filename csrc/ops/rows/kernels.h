// The kernels of csrc/kernels/rows: which threads take a row, and how much of it waits in shared
// memory.
#pragma once

#include <optional>

#include "ops/common/launch.h"
#include "ops/rows/rows.h"

namespace torch_cubin {

enum RowsKind {
  kNorm,
  kNormBackward,
  kNormColumns,
  kRowsSoftmax,
  kRowsSoftmaxBackward,
  kRowsSum,
  kRowsKinds
};

// Throws [no_kernel] or [arch] where the device has no such kernel.
PackageKernel& rows_kernel(RowsKind kind, const Device& device);

constexpr int64_t kRowVector = 8;  // elements

// Whether kernels read rows of that length by vectors, and not by single elements.
inline bool has_vectors(const RowSizes& sizes) { return sizes.columns % kRowVector == 0; }

// How a kernel takes rows of a length. Threads, and the elements of each, depend on the length
// alone.
struct RowsLayout {
  // `tensors` of `row_dtype` are staged; `sums` is the number of vectors of floats that a thread
  // keeps beside each staged vector.
  RowsLayout(PackageKernel& kernel, const Device& device, const RowSizes& sizes, int64_t tensors,
             ScalarType row_dtype, int64_t sums = 0);

  Grid grid(const Device& device) const;

  int64_t threads;                // of a row
  int64_t vectors = 0;            // of a thread, at most
  int64_t resident = 0;           // of them in shared memory
  int64_t at_once;                // rows of a block
  int64_t tiles;                  // at_once rows each
  int64_t shared = 0;             // bytes of a block
  int64_t multiprocessor_blocks;  // resident at a time, by registers
};

// A tensor as kernels read it: rows that are contiguous, follow each other in one stride, and begin
// at multiples of 16 bytes if they have vectors.
struct RowsOperand {
  // Copies the tensor if it is no such; the last `dims` dims are a row.
  RowsOperand(const Tensor& tensor, int64_t dims, const RowSizes& sizes);

  const void* data = nullptr;
  int64_t stride = 0;  // in elements

 private:
  std::optional<Tensor> copy_;
};

// The value of a parameter's dtype field; throws [no_kernel] for one without kernels.
int row_dtype(const char* op, ScalarType dtype);

// Throws [no_kernel] for rows longer than a kernel counts.
void check_length(const char* op, const RowSizes& sizes);

}  // namespace torch_cubin
