// One attention problem in numbers: sizes, and the memory layout of every operand.
#pragma once

#include <cstdint>

#include "ops/attention/problem/checks.h"
#include "pytorch/tensor.h"

namespace torch_cubin {

struct AttentionParams;

// The tensors that a kernel addresses by strides.
enum AttentionOperand {
  kQuery,
  kKey,
  kValue,
  kOut,
  kMask,
  kGradOut,
  kGradQuery,
  kGradKey,
  kGradValue,
  kAttentionOperands
};

class AttentionProblem {
 public:
  explicit AttentionProblem(const AttentionShape& shape) : shape_(shape) {}

  // `view` has the problem's own dims, fewer dims, or size 1 in broadcast dims.
  void add(AttentionOperand operand, const TensorView& view);

  // Merges neighbouring batch dims if the strides of all operands allow it. For the remaining outer
  // dims there is one launch for each index: parts().
  void merge();
  int64_t parts() const;

  // Fills in everything that depends on the operands for part `part`: pointers, strides, sizes.
  // Pointers that run through all batches (logsumexp) advance by part * batch * heads * rows.
  void fill(AttentionParams& params, int64_t part) const;
  int64_t batch() const { return dims_ > 0 ? sizes_[0] : 1; }

 private:
  struct Operand {
    bool present = false;
    char* data = nullptr;
    int64_t element = 0;           // bytes
    int64_t batch[kMaxDims] = {};  // innermost first
    int64_t head = 0, row = 0, column = 0;
  };
  const AttentionShape& shape_;
  Operand operands_[kAttentionOperands];
  int dims_ = 0;
  int64_t sizes_[kMaxDims] = {};  // of the batch dims, innermost first
};

// Whether kernels can read and write a tensor's rows in place: contiguous columns, all in whole
// 16-byte vectors.
bool has_vector_rows(const TensorView& view);

}  // namespace torch_cubin
