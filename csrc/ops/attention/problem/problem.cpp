#include "ops/attention/problem/problem.h"

#include "kernels/attention/attention_params.h"

namespace torch_cubin {
namespace {

constexpr int64_t kVector = 16;  // bytes

// Stride of the i-th dim from the end; 0 if the tensor is broadcast there.
int64_t stride_from_end(const TensorView& view, int64_t i) {
  return i <= view.dim && view.sizes[view.dim - i] != 1 ? view.strides[view.dim - i] : 0;
}

}  // namespace

bool has_vector_rows(const TensorView& view) {
  const int64_t element = element_size(view.dtype);
  const int64_t columns = view.sizes[view.dim - 1];
  if (view.strides[view.dim - 1] != 1 && columns > 1) return false;
  if (columns * element % kVector != 0) return false;
  for (int64_t i = 0; i < view.dim - 1; ++i) {
    if (view.sizes[i] != 1 && view.strides[i] * element % kVector != 0) return false;
  }
  return reinterpret_cast<uintptr_t>(view.data()) % kVector == 0;
}

void AttentionProblem::add(AttentionOperand operand, const TensorView& view) {
  Operand& o = operands_[operand];
  o.present = true;
  o.data = const_cast<char*>(static_cast<const char*>(view.data()));
  o.element = view.dtype == ScalarType::Bool ? 1 : element_size(view.dtype);
  o.column = stride_from_end(view, 1);
  if (shape_.packed) {
    o.row = stride_from_end(view, 3);
    o.head = stride_from_end(view, 2);
    return;
  }
  o.row = stride_from_end(view, 2);
  o.head = shape_.has_heads ? stride_from_end(view, 3) : 0;
  const int64_t outside = shape_.has_heads ? 4 : 3;
  for (int64_t i = 0; i < shape_.batch.dim; ++i) o.batch[i] = stride_from_end(view, outside + i);
}

void AttentionProblem::merge() {
  dims_ = 0;
  if (shape_.packed) {
    dims_ = 1;
    sizes_[0] = shape_.batch.sizes[0];
    return;
  }
  for (int64_t i = 0; i < shape_.batch.dim; ++i) {
    const int64_t size = shape_.batch.sizes[shape_.batch.dim - 1 - i];
    if (size == 1) continue;
    bool runs_on = dims_ > 0;
    for (const Operand& o : operands_) {
      if (!o.present || dims_ == 0) continue;
      runs_on = runs_on && o.batch[i] == o.batch[dims_ - 1] * sizes_[dims_ - 1];
    }
    if (runs_on) {
      sizes_[dims_ - 1] *= size;
      continue;
    }
    for (Operand& o : operands_) o.batch[dims_] = o.batch[i];
    sizes_[dims_++] = size;
  }
}

int64_t AttentionProblem::parts() const {
  int64_t parts = 1;
  for (int i = 1; i < dims_; ++i) parts *= sizes_[i];
  return parts;
}

void AttentionProblem::fill(AttentionParams& params, int64_t part) const {
  char* data[kAttentionOperands];
  for (int i = 0; i < kAttentionOperands; ++i) {
    const Operand& o = operands_[i];
    data[i] = o.data;
    int64_t index = part;
    for (int d = 1; d < dims_ && o.present; ++d) {
      data[i] += index % sizes_[d] * o.batch[d] * o.element;
      index /= sizes_[d];
    }
  }
  const auto strides = [&](AttentionOperand operand, tc_int64* out) {
    const Operand& o = operands_[operand];
    out[0] = dims_ > 0 ? o.batch[0] : 0;
    out[1] = o.head;
    out[2] = o.row;
  };
  params.q = data[kQuery];
  params.k = data[kKey];
  params.v = data[kValue];
  params.out = data[kOut];
  params.mask = data[kMask];
  params.grad_out = data[kGradOut];
  params.dq = data[kGradQuery];
  params.dk = data[kGradKey];
  params.dv = data[kGradValue];
  strides(kQuery, params.q_stride);
  strides(kKey, params.k_stride);
  strides(kValue, params.v_stride);
  strides(kOut, params.out_stride);
  strides(kGradOut, params.grad_out_stride);
  strides(kGradQuery, params.dq_stride);
  strides(kGradKey, params.dk_stride);
  strides(kGradValue, params.dv_stride);
  strides(kMask, params.mask_stride);
  params.mask_stride[3] = operands_[kMask].column;
  params.batch = static_cast<int>(batch());
  params.heads = static_cast<int>(shape_.heads);
  params.group = static_cast<int>(shape_.group());
  params.seqlen_q = static_cast<int>(shape_.seqlen_q);
  params.seqlen_k = static_cast<int>(shape_.seqlen_k);
  params.total_q = static_cast<int>(shape_.total_q);
  params.total_k = static_cast<int>(shape_.total_k);
}

}  // namespace torch_cubin
