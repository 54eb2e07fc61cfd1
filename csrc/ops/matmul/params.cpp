#include "ops/matmul/params.h"

#include <utility>

namespace torch_cubin {

static_assert(kMaxBatchDims == kMaxPlannedBatchDims, "all that is planned can be launched");

MatmulParams matmul_params(const MatmulProblem& p, const MatmulOperands& operands, bool swapped) {
  struct Side {  // an operand, and its own dim beside K
    const char* data;
    int64_t size, stride, k_stride;
    const int64_t* batch_stride;
  };
  Side a = {operands.a, p.m, p.a_stride_m, p.a_stride_k, p.a_batch_stride};
  Side b = {operands.b, p.n, p.b_stride_n, p.b_stride_k, p.b_batch_stride};
  if (swapped) std::swap(a, b);
  MatmulParams out{};
  out.a = a.data;
  out.b = b.data;
  out.bias = operands.bias;
  out.c = operands.c;
  out.m = a.size;
  out.n = b.size;
  out.k = p.k;
  out.a_stride_m = a.stride;
  out.a_stride_k = a.k_stride;
  out.b_stride_k = b.k_stride;
  out.b_stride_n = b.stride;
  out.c_stride_m = swapped ? 1 : p.n;
  out.c_stride_n = swapped ? p.n : 1;
  out.bias_stride = operands.bias_stride;
  out.batch = p.batch();
  for (int i = 0; i < kMaxBatchDims; ++i) {
    const bool used = i < p.batch_dims;
    out.batch_size[i] = used ? p.batch_size[i] : 1;
    out.a_batch_stride[i] = used ? a.batch_stride[i] : 0;
    out.b_batch_stride[i] = used ? b.batch_stride[i] : 0;
  }
  out.splits = 1;
  out.flags = swapped ? kFlagSwapped : 0;
  return out;
}

}  // namespace torch_cubin
