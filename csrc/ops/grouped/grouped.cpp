// grouped_matmul on CUDA: operands as the kernels read them, copied where no tensor map describes
// them.
#include "ops/grouped/grouped.h"

#include <algorithm>

#include "cubin/error.h"
#include "ops/common/aten.h"
#include "ops/common/stable_ops.h"
#include "ops/grouped/sm90_grouped.h"
#include "runtime/device.h"

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

  // Whether a tensor map describes them.
  bool mappable() const {
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
  if (own.mappable()) return own;
  copy = padded_copy(along_rows ? matrices_transposed(detach(tensor)) : detach(tensor));
  return {TensorView(*copy), false};
}

void check_sizes(const GroupedCall& call) {
  constexpr int64_t kMost = INT32_MAX / 2;
  if (std::max({call.m, call.n, call.k, call.groups}) <= kMost) return;
  fail({"no_kernel", "grouped_matmul", "has a size that no kernel takes",
        "at most " + std::to_string(kMost),
        tuple_text(&call.m, 3) + " as M, N and K, " + counted(call.groups, "group"), ""});
}

}  // namespace

Tensor grouped_matmul_cuda(const Tensor& mat_a, const Tensor& mat_b, const Tensor& offs,
                           bool zero_rest) {
  const TensorView x(mat_a), y(mat_b);
  const Shape shape = check_grouped(x, y, TensorView(offs));
  if (element_size(x.dtype) != 2) {
    fail({"no_kernel", "grouped_matmul", "has no kernel for this dtype on CUDA",
          "float16 or bfloat16", dtype_name(x.dtype),
          "Convert the operands, or use torch.nn.functional.grouped_mm."});
  }
  check_ends(offs, y.dim == 2 ? x.sizes[1] : x.sizes[0]);
  GroupedCall call;
  call.dtype = x.dtype;
  call.contraction = y.dim == 2;
  call.zero_rest = zero_rest;
  call.m = x.sizes[0];
  call.k = x.sizes[1];
  call.n = y.sizes[y.dim - 1];
  call.groups = TensorView(offs).sizes[0];
  Tensor out = empty_cuda(shape.sizes, shape.dim, x.dtype, x.device_index);
  if (shape.numel() == 0) return out;
  if (call.k == 0 || call.groups == 0) {
    if (call.groups > 0 || zero_rest) torch::stable::zero_(out);
    return out;
  }
  check_sizes(call);

  // Kernels read A along M where groups divide K, and B along N unless it is contiguous along K.
  const Matrices along_k(y, true);
  call.b_mn_major = call.contraction || !along_k.mappable();
  std::optional<Tensor> a_copy, b_copy;
  const Matrices a = read_along(call.contraction, mat_a, a_copy);
  const Matrices b = call.b_mn_major ? read_along(false, mat_b, b_copy) : along_k;
  call.a = a.data;
  call.b = b.data;
  call.a_stride = a.stride;
  call.b_stride = b.stride;
  call.b_group_stride = b.group_stride;
  call.out = static_cast<char*>(out.mutable_data_ptr());
  std::optional<Tensor> ends_copy;
  TensorView e(offs);
  if (call.groups > 1 && e.strides[0] != 1) {
    ends_copy = torch::stable::contiguous(detach(offs));
    e = TensorView(*ends_copy);
  }
  call.ends = e.data();
  call.wide_ends = e.dtype == ScalarType::Long;
  run_sm90_grouped(device(x.device_index), call);
  return out;
}

}  // namespace torch_cubin
