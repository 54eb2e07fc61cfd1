// The derivative of layer norm and RMS norm with the gradients of weight and bias for few rows, in
// one launch; norm_params.h defines the computation. The first blocks have columns of all rows,
// which the blocks of a cluster share (cluster_columns.cuh), the others rows. Both read x and
// grad_out, of which the L2 cache has the second copy.
//
// A row's gradient has the bits of norm_backward_sums.cu, whatever the number of rows: its threads
// have the same vectors, operations and order of sums.
#include "cluster_columns.cuh"
#include "norm_gradient.cuh"

namespace torch_cubin::TC_KERNEL {

constexpr int kBlock = TC_THREADS, kDtype = static_cast<int>(DType::TC_DTYPE);
constexpr int kHeld = 4;  // vectors of a column's thread
using Access = Vectors<kDtype>;
using Raw = typename Access::Raw;

template <bool kCentered>
TC_DEVICE void sum_columns(const NormParams& p) {
  constexpr int kKinds = kCentered ? 2 : 1;
  using Columns = ClusterColumns<kBlock, kKinds>;
  const Columns columns(p.cluster);
  const int log_cluster = 31 - __clz(p.cluster);
  const int first_column = static_cast<int>(blockIdx.x >> log_cluster) * Columns::kColumns;
  const int column = first_column + static_cast<int>(threadIdx.x) % kThreadsAcross * kRowVector;
  const bool valid = column < p.columns;
  const tc_int64 size = (p.rows + p.cluster - 1) >> log_cluster;
  const tc_int64 begin = size * (blockIdx.x & (p.cluster - 1)), end = min(begin + size, p.rows);
  float sums[kKinds][kRowVector] = {};
  // The thread's next row, in all that it reads.
  const tc_int64 own = begin + threadIdx.x / kThreadsAcross;
  const char* x_at = RowOf(p.x, own * p.x_stride + column, kDtype).data;
  const char* grad_at = RowOf(p.grad_out, own * p.grad_out_stride + column, kDtype).data;
  const tc_int64 x_step = p.x_stride * (2 * Columns::kRows),
                 grad_step = p.grad_out_stride * (2 * Columns::kRows);
  const float* mean_at = p.mean + own;
  const float* rstd_at = p.rstd + own;
  wait_for_previous_kernel();
#pragma unroll 1
  for (tc_int64 first = own; valid && first < end; first += kHeld * Columns::kRows) {
    Raw x_raw[kHeld], grad_raw[kHeld];
    float mean[kHeld], rstd[kHeld];
#pragma unroll
    for (int i = 0; i < kHeld; ++i) {
      const tc_int64 row = first + i * Columns::kRows;
      if (row >= end) break;
      Access::load_raw(x_raw[i], RowOf(x_at + i * x_step, 0, kDtype), 0);
      Access::load_raw(grad_raw[i], RowOf(grad_at + i * grad_step, 0, kDtype), 0);
      mean[i] = p.centered ? mean_at[i * Columns::kRows] : 0.0f;
      rstd[i] = rstd_at[i * Columns::kRows];
    }
#pragma unroll
    for (int i = 0; i < kHeld; ++i) {
      if (first + i * Columns::kRows >= end) break;
      float x[kRowVector], grad[kRowVector];
      Access::unpack(x, x_raw[i]);
      Access::unpack(grad, grad_raw[i]);
#pragma unroll
      for (int j = 0; j < kRowVector; ++j) {
        sums[0][j] += grad[j] * ((x[j] - mean[i]) * rstd[i]);
        if constexpr (kCentered) sums[1][j] += grad[j];
      }
    }
    x_at += kHeld * x_step;
    grad_at += kHeld * grad_step;
    mean_at += kHeld * Columns::kRows;
    rstd_at += kHeld * Columns::kRows;
  }
  columns.join(sums, [&](int kind, int own, const float (&sum)[1]) {
    void* const to = kind == 0 ? p.grad_weight : p.grad_bias;
    if (to == nullptr || first_column + own >= p.columns) return;
    const RowOf gradient(to, 0, kind == 0 ? p.weight_dtype : p.bias_dtype);
    Singles<kRowFloat32>::store(gradient, sum, first_column + own);
  });
}

template <bool kCentered, int kVectors>
TC_DEVICE void differentiate(const NormParams& p, int block) {
  using Totals = Sums<kCentered ? 2 : 1>;
  const int at_once = kBlock / p.threads;  // rows
  RowJoin<Totals, kBlock, false, true> join(at_once == 1 ? kBlock : p.threads, 1);
  const int own = static_cast<int>(threadIdx.x) / p.threads;
  const int lane = static_cast<int>(threadIdx.x) % p.threads;
  const tc_int64 row = static_cast<tc_int64>(block) * at_once + own;
  const bool valid = own < at_once && row < p.rows;
  const auto for_each = [&](auto&& body) {
#pragma unroll
    for (int i = 0; i < kVectors; ++i) {
      const int column = (lane + i * p.threads) * kRowVector;
      if (valid && column < p.columns) body(i, column);
    }
  };
  Raw x_raw[kVectors], grad_raw[kVectors], weight[kVectors];
  const RowOf x_row(p.x, row * p.x_stride, kDtype);
  const RowOf grad_row(p.grad_out, row * p.grad_out_stride, kDtype);
  wait_for_previous_kernel();
  for_each([&](int i, int column) {
    Access::load_raw(x_raw[i], x_row, column);
    Access::load_raw(grad_raw[i], grad_row, column);
  });
  for_each([&](int i, int column) {
    if (p.weight != nullptr) Access::load_raw(weight[i], RowOf(p.weight, 0, kDtype), column);
  });
  float mean = 0, rstd = 0;
  if (valid) {
    if (kCentered && p.centered) mean = p.mean[row];
    rstd = p.rstd[row];
  }
  const float part = 1.0f / static_cast<float>(p.columns);
  float x[kVectors][kRowVector], grad[kVectors][kRowVector];  // x - mean, rstd * grad_out * weight
  Totals totals[kVectors] = {};                               // of x * grad, and of grad
  for_each([&](int i, int) {
    float factor[kRowVector];
    Access::unpack(x[i], x_raw[i]);
    Access::unpack(grad[i], grad_raw[i]);
    if (p.weight != nullptr) Access::unpack(factor, weight[i]);
#pragma unroll
    for (int j = 0; j < kRowVector; ++j) {
      scale_gradient<kCentered>(x[i][j], grad[i][j], mean, rstd, [] {});
      if (p.weight != nullptr) grad[i][j] = __fmul_rn(grad[i][j], factor[j]);
      add_to_totals<kCentered>(totals[i], x[i][j], grad[i][j]);
    }
  });
  Raw sum_raw[kVectors];
  for_each([&](int i, int column) {
    if (p.grad_sum == nullptr) return;
    Access::load_raw(sum_raw[i], RowOf(p.grad_sum, row * p.grad_sum_stride, kDtype), column);
  });
#pragma unroll
  for (int i = 1; i < kVectors; ++i) totals[0] = typename Totals::Join{}(totals[0], totals[i]);
  join(totals[0], typename Totals::Join{});
  if (!valid) return;
  const NormGradient<kCentered> gradient(p, totals[0], rstd, part, [&] {
    for_each([&](int i, int) {
#pragma unroll
      for (int j = 0; j < kRowVector; ++j) x[i][j] *= rstd;
    });
  });
  const RowOf grad_x(p.grad_x, row * p.columns, kDtype);
  for_each([&](int i, int column) {
    float addend[kRowVector];
    if (p.grad_sum != nullptr) Access::unpack(addend, sum_raw[i]);
#pragma unroll
    for (int j = 0; j < kRowVector; ++j) {
      x[i][j] = gradient(x[i][j], grad[i][j]);
      if (p.grad_sum != nullptr) x[i][j] += addend[j];
    }
    Access::store_own(grad_x, x[i], column);
  });
}

template <bool kCentered>
TC_DEVICE void run(const NormParams& p) {
  const int block = static_cast<int>(blockIdx.x) - p.parts;
  if (block < 0) return sum_columns<kCentered>(p);
  p.vectors == 3 ? differentiate<kCentered, 3>(p, block) : differentiate<kCentered, 2>(p, block);
}

extern "C" __global__ void __launch_bounds__(kBlock, TC_BLOCKS)
    TC_KERNEL(const __grid_constant__ NormParams p) {
  p.centered || p.grad_bias != nullptr ? run<true>(p) : run<false>(p);
}

}  // namespace torch_cubin::TC_KERNEL

// accepted_spill: of three vectors a thread, which 520 to 768 columns have.
/* torch_cubin kernels
{"virtual_arch": [90],
 "kernels": [
  {"name": "norm_backward_few_rows_{d.short}", "kind": "norm_backward_few", "math": "float32",
   "tile": [1, 4096, 1], "block": [256, 1, 1], "archs": ["sm_90a"],
   "accepted_spill": {"sm_90a": 200}, "cost": {"k_tile": 0, "fixed": 0},
   "defines": {"TC_DTYPE": "{d.dtype}", "TC_BLOCKS": 3}, "for": {"d": "f16 bf16"}}]}
*/
