#include "ops/attention/problem/operands.h"

#include <algorithm>
#include <optional>
#include <utility>

#include "ops/common/dispatch.h"
#include "ops/common/stable_ops.h"

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

AttentionCall::AttentionCall(AttentionArguments arguments)
    : AttentionArguments(std::move(arguments)),
      q(query),
      k(key),
      v(value),
      views(views_of(options)) {
  shape = check_attention(op, q, k, v, views);
  settings = attention_settings(op, shape, views);
  dtype = q.dtype;
  out_dtype = options.e4m3 ? ScalarType::BFloat16 : dtype;
  device_index = q.device_index;
}

FusedOperands::FusedOperands(const AttentionCall& call)
    : call(call),
      query(vector_rows(call.query)),
      key(vector_rows(repeat_heads(call.key, call.shape))),
      value(vector_rows(repeat_heads(call.value, call.shape))),
      options(call.options),
      problem(call.shape),
      one_launch(call.settings.drop_below > 0 && call.shape.batch.dim > 1) {
  make_heads_contiguous(options);
  for (OptionalTensor* offsets : {&options.cu_seqlens_q, &options.cu_seqlens_k}) {
    *offsets = contiguous(*offsets);
  }
  OptionalTensor& mask = options.attn_mask;
  if (one_launch) {
    const auto copied = [&](const Tensor& tensor, int64_t heads) {
      return torch::stable::contiguous(expand_leading(tensor, call.shape, heads));
    };
    query = copied(query, call.shape.heads);
    key = copied(key, call.shape.kv_heads);
    value = copied(value, call.shape.kv_heads);
    if (mask) mask = torch::stable::contiguous(expand_mask(*mask, call.shape));
  }
  problem.add(kQuery, TensorView(query));
  problem.add(kKey, TensorView(key));
  problem.add(kValue, TensorView(value));
  if (mask) problem.add(kMask, TensorView(*mask));
}

void fill_settings(AttentionParams& params, const AttentionSettings& settings) {
  params.first = settings.first;
  params.last = settings.last;
  if (settings.bottom_right) params.flags |= kAttendBottomRight;
  copy_score_numbers(params, settings, [](double x) { return static_cast<float>(x); });
  params.drop_below = settings.drop_below;
}

AttentionParams FusedOperands::params(int64_t head_dim, int64_t head_dim_v) const {
  AttentionParams p{};
  fill_settings(p, call.settings);
  p.head_dim = static_cast<int>(head_dim);
  p.head_dim_v = static_cast<int>(head_dim_v);
  p.splits = 1;
  if (p.drop_below > 0) {
    p.flags |= kAttendDropout;
    p.dropout_seed = static_cast<const tc_int64*>(options.dropout_seed->data_ptr());
  }
  if (call.views.attn_mask) {
    const ScalarType dtype = call.views.attn_mask->dtype;
    p.flags |= dtype == ScalarType::Bool    ? kAttendBoolMask
               : dtype == ScalarType::Float ? kAttendFloatMask
                                            : kAttendOwnMask;
  }
  const auto offsets = [](const OptionalTensor& given) {
    return given ? static_cast<const int*>(given->data_ptr()) : nullptr;
  };
  p.cu_seqlens_q = offsets(options.cu_seqlens_q);
  p.cu_seqlens_k = offsets(options.cu_seqlens_k);
  return p;
}

void FusedOperands::fill(AttentionParams& p, int64_t part) const {
  problem.fill(p, part);
  point_to_heads(p, options, part * problem.batch());
}

OptionalTensor contiguous(const OptionalTensor& tensor) {
  if (!tensor) return std::nullopt;
  return torch::stable::contiguous(*tensor);
}

std::vector<int64_t> sizes_of(const TensorView& view) {
  return std::vector<int64_t>(view.sizes, view.sizes + view.dim);
}

Shape shape_of(const TensorView& view) {
  Shape shape;
  shape.dim = view.dim;
  std::copy(view.sizes, view.sizes + view.dim, shape.sizes);
  return shape;
}

int64_t padded_columns(int64_t columns, ScalarType dtype) {
  const int64_t vector = 16 / element_size(dtype);
  return (columns + vector - 1) / vector * vector;
}

Tensor vector_rows(const Tensor& tensor) {
  const TensorView view(tensor);
  if (has_vector_rows(view)) return tensor;
  std::vector<int64_t> sizes = sizes_of(view);
  const int64_t columns = sizes.back();
  sizes.back() = padded_columns(columns, view.dtype);
  Tensor copy = sizes.back() == columns ? torch::stable::new_empty(tensor, sizes, view.dtype)
                                        : torch::stable::new_zeros(tensor, sizes, view.dtype);
  Tensor part = torch::stable::narrow(copy, -1, 0, columns);
  torch::stable::copy_(part, tensor);
  return copy;
}

namespace {

Tensor expand(const Tensor& tensor, const AttentionShape& shape, int64_t heads, int64_t rows,
              int64_t columns) {
  std::vector<int64_t> sizes = shape.batch.vector();
  if (shape.has_heads) sizes.push_back(heads);
  sizes.push_back(rows);
  sizes.push_back(columns);
  if (sizes == sizes_of(TensorView(tensor))) return tensor;
  return call_tensor_op("aten::expand", "", tensor, sizes, false);
}

}  // namespace

Tensor repeat_heads(const Tensor& tensor, const AttentionShape& shape) {
  const TensorView view(tensor);
  const int64_t own = view.dim > 2 && !shape.packed ? view.sizes[view.dim - 3] : 1;
  if (own == 1 || own == shape.kv_heads) return tensor;
  return call_tensor_op("aten::repeat_interleave", "self_int", tensor, shape.kv_heads / own,
                        std::optional<int64_t>(-3), std::nullopt);
}

Tensor expand_leading(const Tensor& tensor, const AttentionShape& shape, int64_t heads) {
  const TensorView view(tensor);
  return expand(tensor, shape, heads, view.sizes[view.dim - 2], view.sizes[view.dim - 1]);
}

Tensor expand_mask(const Tensor& mask, const AttentionShape& shape) {
  return expand(mask, shape, shape.heads, shape.seqlen_q, shape.seqlen_k);
}

Tensor sum_to_operand(const Tensor& grad, const AttentionShape& shape, const TensorView& operand) {
  std::vector<int64_t> sizes = shape.batch.vector();
  const TensorView view(grad);
  const int64_t rows = view.sizes[view.dim - 2], columns = view.sizes[view.dim - 1];
  Tensor out = grad;
  if (shape.has_heads) {
    int64_t heads = 1;
    for (int64_t i = 0; i < view.dim - 2; ++i) heads *= view.sizes[i];
    const int64_t batch = shape.batch.numel();
    heads = batch > 0 ? heads / batch : 0;
    const int64_t own = operand.dim > 2 ? operand.sizes[operand.dim - 3] : 1;
    std::vector<int64_t> split = sizes;
    split.insert(split.end(), {own, own > 0 ? heads / own : 1, rows, columns});
    out = torch::stable::reshape(out, split);
    if (own != heads) out = torch::stable::sum(out, {{-3}}, false);
    sizes.push_back(own);
  }
  sizes.push_back(rows);
  sizes.push_back(columns);
  out = torch::stable::reshape(out, sizes);
  const auto dims = static_cast<int64_t>(sizes.size());
  for (int64_t i = 0; i < dims - 2; ++i) {
    const int64_t at = operand.dim - dims + i;
    const int64_t own = at >= 0 ? operand.sizes[at] : 1;
    if (own == 1 && sizes[i] != 1) out = torch::stable::sum(out, {{i}}, true);
  }
  return torch::stable::reshape(out, sizes_of(operand));
}

Tensor empty_laid_out(const TensorView& like, const Shape& sizes, ScalarType dtype) {
  int64_t strides[kMaxDims];
  output_strides(like, sizes, strides);
  return empty_cuda_strided(sizes.sizes, strides, sizes.dim, dtype, like.device_index);
}

}  // namespace torch_cubin
