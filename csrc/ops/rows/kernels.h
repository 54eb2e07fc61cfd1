// The kernels of csrc/kernels/rows: which threads take a row, and which kernel of a kind.
#pragma once

#include <optional>

#include "kernels/rows/rows_params.h"
#include "ops/common/launch.h"
#include "ops/rows/rows.h"

namespace torch_cubin {

enum RowsKind {
  kNorm,
  kNormStaged,
  kNormWarp,
  kNormBlock,
  kNormBackward,
  kNormBackwardSums,
  kNormBackwardFew,
  kNormColumns,
  kNormParts,
  kRowsSoftmax,
  kRowsSoftmaxStaged,
  kRowsSoftmaxCluster,
  kRowsSoftmaxWarp,
  kRowsSoftmaxBackward,
  kRowsSoftmaxBackwardStaged,
  kRowsSoftmaxBackwardBlock,
  kRowsSoftmaxBackwardWarp,
  kRowsSum,
  kColumnSums,
  kLosses,
  kLossesFew,
  kLossesGeneral,
  kLossesBackward,
  kLossesSum,
  kScale,
  kRowsKinds
};

// Whether kernels read rows of that length by vectors, and not by single elements.
inline bool has_vectors(const RowSizes& sizes) { return sizes.columns % kRowVector == 0; }

// The kernel for rows of a length, and how it takes them: all of it depends on the length alone.
struct RowsLayout {
  // Throws [no_kernel] or [arch] where the device has no such kernel. `tensors`: that a row has in
  // shared memory.
  RowsLayout(RowsKind kind, const Device& device, const RowSizes& sizes, ScalarType row_dtype,
             int64_t tensors = 1);

  Grid grid() const;

  PackageKernel* kernel;
  int64_t threads;             // of a row, in each of its blocks
  int64_t cluster = 1;         // blocks of a row
  bool joins;                  // whether they exchange values, as a cluster
  int64_t own_block;           // threads of a block, at most the kernel's
  int64_t at_once;             // rows of a block
  int64_t tiles;               // at_once rows each
  int64_t dynamic_shared = 0;  // bytes
};

// Launches a kernel for rows of these sizes, which it writes to the parameter together with the
// threads that take a row.
template <class Params>
void launch_rows(const RowsLayout& layout, Params& p, const Device& device, const RowSizes& sizes) {
  p.rows = sizes.rows;
  p.columns = static_cast<int>(sizes.columns);
  p.threads = static_cast<int>(layout.threads);
  p.cluster = static_cast<int>(layout.cluster);
  launch(*layout.kernel, layout.grid(), device, p);
}

template <class Params>
void launch_rows(RowsKind kind, Params& p, const Device& device, const RowSizes& sizes,
                 ScalarType row_dtype, int64_t tensors = 1) {
  launch_rows(RowsLayout(kind, device, sizes, row_dtype, tensors), p, device, sizes);
}

// The same for norm_backward_sums: its blocks take many rows each, and copy them ahead.
struct SumsLayout {
  // Null `kernel` where no cluster of blocks holds such a row.
  // `with_bias_sums`: of layer norm, too, though it may have no bias.
  SumsLayout(const Device& device, const RowSizes& sizes, ScalarType row_dtype, bool with_grad_sum,
             bool with_bias_sums);

  PackageKernel* kernel = nullptr;
  int64_t threads = 0;  // of a row, in each of its blocks
  int64_t cluster = 1;  // blocks of a row
  int64_t vectors = 0;  // of a thread, at most
  int64_t parts = 0;    // that the rows are summed in
  Grid grid;
};

// The same for norm_backward_few, of rows that `sums` has.
struct FewRowsLayout {
  // Null `kernel` where norm_backward_sums takes them: which kernel does depends on sizes alone.
  FewRowsLayout(const Device& device, const RowSizes& sizes, ScalarType row_dtype,
                const SumsLayout& sums);

  PackageKernel* kernel = nullptr;
  int64_t cluster = 1;            // blocks that share the rows of some columns
  int64_t blocks_of_columns = 0;  // all of them
  Grid grid;
};

// Whether kernels of a kind take such rows, whole or in a cluster's parts, in shared memory.
bool has_staged_rows(RowsKind kind, const RowSizes& sizes, ScalarType row_dtype,
                     const Device& device);

// Whether kernels of a kind take such rows, each in the registers of a warp, of a part of one, of a
// block, or of a cluster's blocks.
bool has_held_rows(RowsKind kind, const RowSizes& sizes, ScalarType row_dtype,
                   const Device& device);

// Whether losses_few computes such rows' losses, with the bits of losses.
bool has_few_losses(const RowSizes& sizes, ScalarType row_dtype, const Device& device);

// Whether norm_backward_few takes such rows.
bool has_few_rows(const RowSizes& sizes, ScalarType row_dtype, const Device& device);

// The kernel that is the only one of its kind; throws as RowsLayout.
PackageKernel& rows_kernel(RowsKind kind, ScalarType row_dtype, const Device& device);

// The blocks of the largest cluster of that kernel; 1 where the device has none.
int64_t largest_cluster(RowsKind kind, ScalarType row_dtype, const Device& device);

// The blocks that have all columns of a matrix, for kernels that sum over its rows, and for
// norm_parts.cu.
inline int64_t blocks_of_columns(const RowSizes& sizes) {
  return ceil_div(sizes.columns, kThreadsAcross * (has_vectors(sizes) ? kRowVector : 1));
}
inline int64_t blocks_of_parts(const RowSizes& sizes) {
  return ceil_div(sizes.columns,
                  kThreadsAcross * (sizes.columns % kPartsVector == 0 ? kPartsVector : 1));
}

// A tensor as kernels read it: rows that are contiguous, follow each other in one stride, and begin
// at multiples of 16 bytes if they have vectors.
struct RowsOperand {
  // Copies the tensor if it is no such; the last `dims` dims are a row.
  RowsOperand(const Tensor& tensor, int64_t dims, const RowSizes& sizes);

  // Whether it is one without a copy.
  static bool is_readable(const TensorView& x, int64_t dims, const RowSizes& sizes);

  const void* data = nullptr;
  int64_t stride = 0;  // in elements

 private:
  std::optional<Tensor> copy_;
};

// The value of a parameter's dtype field, a RowDtype; throws [no_kernel] for one without kernels.
int row_dtype(const char* op, ScalarType dtype);

// Whether rows are longer than a kernel counts; check_length throws [no_kernel] for such rows.
bool are_too_long(const RowSizes& sizes);
void check_length(const char* op, const RowSizes& sizes);

}  // namespace torch_cubin
