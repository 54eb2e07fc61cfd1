// matmul and linear on CUDA: check -> choose -> launch.
#include "ops/matmul/matmul.h"

#include <torch/csrc/stable/ops.h>

#include <algorithm>

#include "cubin/error.h"
#include "kernels/matmul/matmul_params.h"
#include "ops/matmul/checks.h"
#include "ops/matmul/plan.h"
#include "ops/matmul/problem.h"
#include "ops/matmul/table.h"
#include "pytorch/settings.h"

namespace torch_cubin {
namespace {

constexpr int kReduceBlocks = 16;  // a multiprocessor: full, and no more rounds than needed

// What a launch reads and writes besides the problem's integers.
struct Buffers {
  const char* a;
  const char* b;
  const char* bias;  // null: none
  int64_t bias_stride;
  char* c;
};

Math math_of(ScalarType dtype) {
  switch (dtype) {
    case ScalarType::Half:
      return kMathFloat16;
    case ScalarType::BFloat16:
      return kMathBFloat16;
    case ScalarType::Float:
      return tf32_allowed() ? kMathTF32 : kMathFloat32;
    default:
      return kMathFloat64;
  }
}

void fill_params(MatmulParams& out, const MatmulProblem& p, const MatmulPlan& plan,
                 const Buffers& buffers, void* partial) {
  out.a = plan.swapped ? buffers.b : buffers.a;
  out.b = plan.swapped ? buffers.a : buffers.b;
  out.bias = buffers.bias;
  out.c = buffers.c;
  out.partial = partial;
  out.m = plan.swapped ? p.n : p.m;
  out.n = plan.swapped ? p.m : p.n;
  out.k = p.k;
  out.a_stride_m = plan.swapped ? p.b_stride_n : p.a_stride_m;
  out.a_stride_k = plan.swapped ? p.b_stride_k : p.a_stride_k;
  out.b_stride_k = plan.swapped ? p.a_stride_k : p.b_stride_k;
  out.b_stride_n = plan.swapped ? p.a_stride_m : p.b_stride_n;
  out.c_stride_m = plan.swapped ? 1 : p.n;
  out.c_stride_n = plan.swapped ? p.n : 1;
  out.bias_stride = buffers.bias_stride;
  out.batch = p.batch();
  for (int i = 0; i < kMaxBatchDims; ++i) {
    const bool used = i < p.batch_dims;
    out.batch_size[i] = used ? p.batch_size[i] : 1;
    out.a_batch_stride[i] = used ? (plan.swapped ? p.b_batch_stride[i] : p.a_batch_stride[i]) : 0;
    out.b_batch_stride[i] = used ? (plan.swapped ? p.a_batch_stride[i] : p.b_batch_stride[i]) : 0;
  }
  out.tiles_m = plan.tiles_m;
  out.tiles_n = plan.tiles_n;
  out.k_tiles_per_split = plan.k_tiles_per_split;
  out.splits = plan.splits;
  out.flags = plan.swapped ? kFlagSwapped : 0;
}

void run(const MatmulProblem& p, const Buffers& buffers, ScalarType dtype, const Device& device);

// More batch dims or blocks than one launch takes: one launch for each part of the outermost dim.
void run_in_parts(const MatmulProblem& p, const Buffers& buffers, ScalarType dtype,
                  const Device& device, int64_t part) {
  const int last = p.batch_dims - 1;
  const int64_t bytes = element_size(dtype);
  const int64_t c_stride = p.batch() / p.batch_size[last] * p.m * p.n;
  for (int64_t begin = 0; begin < p.batch_size[last]; begin += part) {
    MatmulProblem inner = p;
    inner.batch_size[last] = std::min(part, p.batch_size[last] - begin);
    if (inner.batch_size[last] == 1) --inner.batch_dims;
    Buffers moved = buffers;
    moved.a += begin * p.a_batch_stride[last] * bytes;
    moved.b += begin * p.b_batch_stride[last] * bytes;
    moved.c += begin * c_stride * bytes;
    run(inner, moved, dtype, device);
  }
}

void run(const MatmulProblem& p, const Buffers& buffers, ScalarType dtype, const Device& device) {
  if (p.batch_dims > kMaxBatchDims) return run_in_parts(p, buffers, dtype, device, 1);

  const int64_t bytes = element_size(dtype);
  const Math math = math_of(dtype);
  const MatmulTable& table = matmul_table(device);
  const MatmulAccess access = matmul_access(p, bytes, buffers.a, buffers.b);
  const MatmulPlan plan = choose_matmul(table, math, access, p);
  const int64_t tiles = plan.tiles_m * plan.tiles_n;
  if (tiles > kMaxGrid[0] / p.batch()) {
    const int last = p.batch_dims - 1;
    if (last < 0) {
      fail({"input", "this product", "is too large for one launch",
            "at most " + std::to_string(kMaxGrid[0]) + " tiles of output", std::to_string(tiles),
            "Multiply it in parts."});
    }
    const int64_t inner = tiles * (p.batch() / p.batch_size[last]);
    const int64_t part = std::max<int64_t>(1, kMaxGrid[0] / inner);
    return run_in_parts(p, buffers, dtype, device, part);
  }

  MatmulParams params;
  if (plan.reduce == nullptr) {
    fill_params(params, p, plan, buffers, nullptr);
    // Blocks of several tiles run long: an early start of the next gains nothing and, where they do
    // not fill the device, costs locality in L2 (0.4% of 4096^3 on the H200; 2048^3 gains 1%).
    const bool one_tile = plan.blocks == plan.tiles_m * plan.tiles_n * p.batch();
    plan.kernel->launch(plan.blocks, 1, device, &params, one_tile);
    return;
  }
  // Freed on return: the caching allocator keeps the memory in this stream's order.
  const int64_t outputs = p.batch() * p.m * p.n;
  const int64_t partials = outputs * plan.splits;
  const Tensor workspace = empty_cuda(
      &partials, 1, math == kMathFloat64 ? ScalarType::Double : ScalarType::Float, device.index);
  fill_params(params, p, plan, buffers, workspace.data_ptr());
  plan.kernel->launch(plan.blocks, plan.splits, device, &params);
  // Any number of blocks is right: they share the outputs out among themselves.
  const int64_t per_block = plan.reduce->entry().tile[1];
  const int64_t blocks = std::min((outputs + per_block - 1) / per_block,
                                  int64_t{kReduceBlocks} * device.multiprocessors);
  plan.reduce->launch(blocks, 1, device, &params);
}

// K = 0: sums of nothing, plus the bias. There is no product to compute, only memory to fill.
Tensor empty_sums(const Shape& shape, const TensorView& like, const Tensor* bias) {
  Tensor out = empty_cuda(shape.sizes, shape.dim, like.dtype, like.device_index);
  if (bias != nullptr) return torch::stable::copy_(out, *bias);
  return torch::stable::zero_(out);
}

Tensor run_matmul(const MatmulProblem& problem, const Shape& shape, const TensorView& a,
                  const TensorView& b, const TensorView* bias) {
  const Device& gpu = device(a.device_index);
  Tensor out = empty_cuda(shape.sizes, shape.dim, a.dtype, a.device_index);
  Buffers buffers{};
  buffers.a = static_cast<const char*>(a.data());
  buffers.b = static_cast<const char*>(b.data());
  buffers.c = static_cast<char*>(out.mutable_data_ptr());
  if (bias != nullptr) {
    buffers.bias = static_cast<const char*>(bias->data());
    buffers.bias_stride = bias->dim == 1 && bias->sizes[0] != 1 ? bias->strides[0] : 0;
  }
  run(problem, buffers, a.dtype, gpu);
  return out;
}

}  // namespace

Tensor matmul_cuda(const Tensor& self, const Tensor& other) {
  const TensorView a(self);
  const TensorView b(other);
  const Shape shape = check_matmul(a, b);
  if (shape.numel() == 0) return empty_cuda(shape.sizes, shape.dim, a.dtype, a.device_index);
  if (a.sizes[a.dim - 1] == 0) return empty_sums(shape, a, nullptr);
  return run_matmul(matmul_problem(a, b, shape), shape, a, b, nullptr);
}

Tensor linear_cuda(const Tensor& input, const Tensor& weight, const std::optional<Tensor>& bias) {
  const TensorView a(input);
  const TensorView b(weight);
  std::optional<TensorView> bias_view;
  if (bias.has_value()) bias_view.emplace(*bias);
  const TensorView* view = bias_view.has_value() ? &*bias_view : nullptr;
  const Shape shape = check_linear(a, b, view);
  if (shape.numel() == 0) return empty_cuda(shape.sizes, shape.dim, a.dtype, a.device_index);
  if (a.sizes[a.dim - 1] == 0) return empty_sums(shape, a, bias.has_value() ? &*bias : nullptr);
  return run_matmul(linear_problem(a, b), shape, a, b, view);
}

}  // namespace torch_cubin
