#include "ops/grouped/operands.h"

#include <algorithm>

#include "cubin/error.h"
#include "ops/common/aten.h"
#include "ops/common/shape.h"
#include "ops/common/stable_ops.h"
#include "ops/grouped/grouped.h"
#include "ops/grouped/portable.h"
#include "ops/grouped/sm90_grouped.h"

namespace torch_cubin {
namespace {

constexpr int64_t kVectorElements = 8;  // of 16 bytes

// Matrices as kernels read them: `columns` follow one another in memory. Strides in elements.
struct Matrices {
  // Contiguous along the tensor's dim -2 with `along_rows`, else along -1.
  Matrices(const TensorView& x, bool along_rows) : data(static_cast<const char*>(x.data())) {
    // The stride of a single row is any.
    const auto stride_of = [&](int64_t dim, int64_t otherwise) {
      return x.sizes[dim] > 1 ? x.strides[dim] : otherwise;
    };
    column_stride = stride_of(along_rows ? x.dim - 2 : x.dim - 1, 1);
    stride = stride_of(along_rows ? x.dim - 1 : x.dim - 2, kVectorElements);
    group_stride = x.dim == 3 ? stride_of(0, kVectorElements) : kVectorElements;
  }

  // Whether the kernels of the dtype read them: those of 16-bit types by a tensor map.
  bool readable(ScalarType dtype) const {
    if (element_size(dtype) > 2) return column_stride == 1;
    const auto aligned = [](int64_t stride) { return stride > 0 && stride % kVectorElements == 0; };
    return column_stride == 1 && aligned(stride) && aligned(group_stride) &&
           reinterpret_cast<uintptr_t>(data) % (2 * kVectorElements) == 0;
  }

  const char* data;
  int64_t column_stride, stride, group_stride;
};

// A copy whose rows are contiguous and begin at multiples of 16 bytes.
Tensor padded_copy(const Tensor& tensor) {
  const TensorView x(tensor);
  int64_t sizes[3];
  std::copy(x.sizes, x.sizes + x.dim, sizes);
  const int64_t columns = sizes[x.dim - 1];
  sizes[x.dim - 1] = ceil_div(columns, kVectorElements) * kVectorElements;
  Tensor padded = empty_cuda(sizes, x.dim, x.dtype, x.device_index);
  Tensor copy = torch::stable::narrow(padded, x.dim - 1, 0, columns);
  torch::stable::copy_(copy, tensor);
  return copy;
}

// The operand contiguous along dim -2 (`along_rows`) or -1; `copy` owns what was copied for that.
Matrices read_along(bool along_rows, const Tensor& tensor, std::optional<Tensor>& copy) {
  const Matrices own(TensorView(tensor), along_rows);
  if (own.readable(TensorView(tensor).dtype)) return own;
  copy = padded_copy(along_rows ? matrices_transposed(detach(tensor)) : detach(tensor));
  return {TensorView(*copy), false};
}

}  // namespace

void check_kernel_sizes(const char* op, int64_t m, int64_t n, int64_t k, int64_t groups) {
  constexpr int64_t kMost = INT32_MAX / 2;
  if (std::max({m, n, k, groups}) <= kMost) return;
  const int64_t sizes[] = {m, n, k};
  fail({"no_kernel", op, "has a size that no kernel takes", "at most " + std::to_string(kMost),
        tuple_text(sizes, 3) + " as M, N and K, " + counted(groups, "group"), ""});
}

GroupedOperands::GroupedOperands(const char* op, const Tensor& mat_a, const Tensor& mat_b,
                                 int64_t groups, bool transposed, Gating gating) {
  const TensorView x(mat_a), y(mat_b);
  call.dtype = x.dtype;
  call.contraction = y.dim == 2;
  const bool a_transposed = transposed && call.contraction;
  const bool b_transposed = transposed && !call.contraction;
  call.m = x.sizes[a_transposed ? 1 : 0];
  call.k = x.sizes[a_transposed ? 0 : 1];
  call.n = y.sizes[y.dim - (b_transposed ? 2 : 1)];
  call.groups = groups;
  check_kernel_sizes(op, call.m, call.n, call.k, call.groups);
  // Kernels read A along M where groups divide K, and B along N unless it is contiguous along K.
  const Matrices along_k(y, !b_transposed);
  // NOTE: the TMA faults where a box begins at no multiple of 16 bytes of a row, as a second half
  // may.
  const bool halves_begin_aligned = gating.activation == kActivationNone || gating.interleaved ||
                                    call.n / 2 % kVectorElements == 0;
  call.b_mn_major = call.contraction || (!along_k.readable(y.dtype) && halves_begin_aligned);
  const Matrices a = read_along(call.contraction && !a_transposed, mat_a, a_copy_);
  const Matrices b = read_along(call.b_mn_major == b_transposed, mat_b, b_copy_);
  call.a = a.data;
  call.b = b.data;
  call.a_stride = a.stride;
  call.b_stride = b.stride;
  call.b_group_stride = b.group_stride;
  call.gating = gating;
}

void run_grouped(const Device& device, const GroupedCall& call) {
  const auto& run = element_size(call.dtype) == 2 ? run_sm90_grouped : run_portable_grouped;
  run(device, call);
}

}  // namespace torch_cubin
