// A call's tensors as the attention kernels read and write them: opened and checked once, copied if
// no kernel can read the layout; outputs with the required layout; sums over broadcast dims.
#pragma once

#include <cstdint>
#include <vector>

#include "kernels/attention/attention_params.h"
#include "ops/attention/problem/arguments.h"
#include "pytorch/tensor.h"

namespace torch_cubin {

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

// One attention problem in numbers: sizes, and the memory layout of every operand.
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

// Sets the band and the numbers of the rule.
void fill_settings(AttentionParams& params, const AttentionSettings& settings);

// The arguments of one call, each tensor opened once and checked.
struct AttentionCall : AttentionArguments {
  explicit AttentionCall(AttentionArguments arguments);

  TensorView q, k, v;
  AttentionViews views;
  AttentionShape shape;
  AttentionSettings settings;
  ScalarType dtype, out_dtype;
  int32_t device_index;
};

// query, key, value and the mask as the fused kernels read them, copied if necessary. It owns the
// copies.
struct FusedOperands {
  explicit FusedOperands(const AttentionCall& call);

  // The parameters that do not depend on the part; fill() adds the rest.
  AttentionParams params(int64_t head_dim, int64_t head_dim_v) const;
  void fill(AttentionParams& params, int64_t part) const;

  const AttentionCall& call;
  Tensor query, key, value;
  AttentionOptions options;  // with those per head and the offsets contiguous
  AttentionProblem problem;
  // Dropout's random numbers count all batches, but a launch only knows its own. So with dropout
  // and several batch dims, which might not merge, all operands are made contiguous.
  bool one_launch;
};

// The tensor itself if it is contiguous, else a copy; none if there is no tensor.
OptionalTensor contiguous(const OptionalTensor& tensor);

// `options` with those per head contiguous.
template <class Options>
void make_heads_contiguous(Options& options) {
#define TC_CONTIGUOUS(name, batched) options.name = contiguous(options.name);
  TC_PER_HEAD_OPTIONS(TC_CONTIGUOUS)
#undef TC_CONTIGUOUS
}

// Points a kernel's parameters to the options per head, whose heads are contiguous. `first`: the
// batch of the call with which the launch begins.
template <class Params, class Options>
void point_to_heads(Params& p, const Options& options, int64_t first = 0) {
  if (options.alibi_slopes) {
    const TensorView slopes(*options.alibi_slopes);
    p.alibi_stride = slopes.dim == 2 ? slopes.strides[0] : 0;
    p.alibi_slopes = static_cast<const float*>(slopes.data()) + first * p.alibi_stride;
  }
  if (options.sinks) p.sinks = static_cast<const float*>(options.sinks->data_ptr());
}

std::vector<int64_t> sizes_of(const TensorView& view);

// Whether kernels can read and write a tensor's rows in place: contiguous columns, all in whole
// 16-byte vectors.
bool has_vector_rows(const TensorView& view);

// `tensor` itself if kernels can read its rows, else a copy whose rows are whole vectors, padded
// with zeros.
Tensor vector_rows(const Tensor& tensor);

// Number of columns in the copy that vector_rows() makes.
int64_t padded_columns(int64_t columns, ScalarType dtype);

// key or value with the problem's kv_heads: itself, or a copy if enable_gqa gave key and value
// different numbers of heads.
Tensor repeat_heads(const Tensor& tensor, const AttentionShape& shape);

// `tensor` broadcast, as a view, to the problem's leading dims and `heads`.
Tensor expand_leading(const Tensor& tensor, const AttentionShape& shape, int64_t heads);

// The mask as a view of shape (batch..., heads, seqlen_q, seqlen_k).
Tensor expand_mask(const Tensor& mask, const AttentionShape& shape);

// Sums a gradient of shape (batch..., some heads, rows, cols), with any number of dims, to the
// shape of its operand.
Tensor sum_to_operand(const Tensor& grad, const AttentionShape& shape, const TensorView& operand);

// A fresh CUDA tensor of `sizes` on like's device, with the dims in the order of like's in memory.
Tensor empty_laid_out(const TensorView& like, const Shape& sizes, ScalarType dtype);

Shape shape_of(const TensorView& view);

}  // namespace torch_cubin
