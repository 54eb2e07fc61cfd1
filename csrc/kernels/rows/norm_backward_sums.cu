// The derivative of layer norm and RMS norm with the sums for the gradients of weight and bias, for
// rows that the threads of a block or a cluster hold; norm_params.h defines the computation. A
// block takes many rows, as many at a time as fit, and sums over them in registers; norm_parts.cu
// adds the sums of the blocks.
//
// Rows are copied to shared memory ahead. A thread reads only what it copied itself, so that
// nothing needs a barrier. grid.x decides the order of the sums.
#include "norm_gradient.cuh"

namespace torch_cubin::TC_KERNEL {

constexpr int kBlock = TC_THREADS, kStages = TC_STAGES, kVectors = TC_TILE_N / kBlock / 8;
constexpr int kAhead = kStages - 1;  // rows
// Whether a row belongs to more than one block; the loop over rows is 4% slower where it could
// (8192 x 8192, H200).
constexpr bool kClusters = TC_MOST_CLUSTER > 1;
extern __shared__ FourWords staged[];

// The sums of a thread over its rows, of kVectors vectors.
struct ColumnSums {
  float of[kVectors][8] = {};
};

// kCentered: of layer norm, or with the sums for a bias. kWhole: rows fill their threads' vectors,
// and have a weight of their dtype; then no branch keeps the compiler from loading a row's vectors
// one right after another (8192 x 8192, H200: layer norm 134 -> 120 us).
template <bool kCentered, bool kWhole>
struct Differentiation {
  static constexpr int kDtype = static_cast<int>(DType::TC_DTYPE);
  using Access = Vectors<kDtype>;
  using Raw = typename Access::Raw;
  using Totals = Sums<kCentered ? 2 : 1>;
  using Join = RowJoin<Totals, kBlock, kClusters, true>;
  static constexpr int kParts = Access::kParts;
  const NormParams& p;
  const int at_once = kBlock / p.threads;  // rows
  const int lane = static_cast<int>(threadIdx.x) % p.threads +
                   static_cast<int>(kClusters ? cluster_rank() : 0) * p.threads;
  const int stride = p.threads * p.cluster;                  // of a thread's vectors
  const u32 of_tensor = p.vectors * (kParts * kBlock * 16);  // bytes of a stage
  const u32 of_stage = (p.grad_sum == nullptr ? 2 : 3) * of_tensor;
  const u32 base = shared_address(staged) + threadIdx.x * 16;

  // Calls body(i, column) for the thread's vectors.
  template <class Body>
  TC_DEVICE void for_each(Body&& body) const {
#pragma unroll
    for (int i = 0; i < kVectors; ++i) {
      const int column = (lane + i * stride) * 8;
      if (kWhole || column < p.columns) body(i, column);
    }
  }

  TC_DEVICE void copy(u32 to, const void* tensor, tc_int64 first) const {
    const char* from = RowOf(tensor, first, kDtype).data + lane * tc_int64(16 * kParts);
    for_each([&](int i, int) {
#pragma unroll
      for (int part = 0; part < kParts; ++part) {
        cp_async<16>(to + (i * kParts + part) * (kBlock * 16),
                     from + i * stride * (16 * kParts) + part * 16, true);
      }
    });
  }

  // Begins to copy a row to a stage.
  TC_DEVICE void fetch(tc_int64 row, int stage) const {
    if (row < p.rows) {
      const u32 to = base + stage * of_stage;
      copy(to, p.x, row * p.x_stride);
      copy(to + of_tensor, p.grad_out, row * p.grad_out_stride);
      if (p.grad_sum != nullptr) {
        copy(to + 2 * of_tensor, p.grad_sum, row * p.grad_sum_stride);
      }
    }
    cp_async_commit();
  }

  TC_DEVICE void get(float (&x)[8], u32 tensor, int i) const {
    Raw raw;
#pragma unroll
    for (int part = 0; part < kParts; ++part) {
      load_shared(raw.parts[part].words, tensor + (i * kParts + part) * (kBlock * 16));
    }
    Access::unpack(x, raw);
  }

  TC_DEVICE void run() const {
    Join join(at_once == 1 ? kBlock : p.threads, p.cluster);
    if (at_once == 1) join.clear_warps(blockDim.x / 32);
    ColumnSums of_weight, of_bias;
    Raw weight[kVectors];
    if constexpr (kWhole) {
      const RowOf row(p.weight, 0, kDtype);
      for_each([&](int i, int column) { Access::load_raw(weight[i], row, column); });
    }
    const tc_int64 step = static_cast<tc_int64>(gridDim.x / p.cluster) * at_once;
    tc_int64 row =
        static_cast<tc_int64>(blockIdx.x / p.cluster) * at_once + threadIdx.x / p.threads;
    // The statistics of the next row, read a row ahead as well.
    float mean = 0, rstd = 0;
    const auto read_statistics = [&](tc_int64 of) {
      if (of >= p.rows) return;
      if (kCentered && p.centered) mean = p.mean[of];
      rstd = p.rstd[of];
    };
#pragma unroll
    for (int stage = 0; stage < kAhead; ++stage) fetch(row + stage * step, stage);
    read_statistics(row);
    int stage = 0;
#pragma unroll 1
    for (tc_int64 first = row - threadIdx.x / p.threads; first < p.rows; first += step) {
      fetch(row + kAhead * step, stage == 0 ? kAhead : stage - 1);
      const float own_mean = mean, own_rstd = rstd;
      read_statistics(row + step);
      cp_async_wait<kAhead>();
      differentiate(row, base + stage * of_stage, own_mean, own_rstd, weight, join, of_weight,
                    of_bias);
      stage = stage == kAhead ? 0 : stage + 1;
      row += step;
    }
    cp_async_wait<0>();
    write(p.sums_w, of_weight);
    if (kCentered) write(p.sums_b, of_bias);
  }

  // `weight` is kWhole's.
  TC_DEVICE void differentiate(tc_int64 row, u32 at, float mean, float rstd,
                               const Raw (&weight)[kVectors], Join& join, ColumnSums& of_weight,
                               ColumnSums& of_bias) const {
    const bool valid = row < p.rows;
    const float part = 1.0f / static_cast<float>(p.columns);
    float x[kVectors][8], grad[kVectors][8];  // x - mean, and rstd * grad_out * weight
    Totals totals[kVectors] = {};             // of x * grad, and of grad
    if (valid) {
      for_each([&](int i, int column) {
        get(x[i], at, i);
        get(grad[i], at + of_tensor, i);
        float factor[8];
        if constexpr (kWhole) {
          Access::unpack(factor, weight[i]);
        } else if (p.weight != nullptr) {
          Access::load(factor, RowOf(p.weight, 0, p.weight_dtype), column);
        }
#pragma unroll
        for (int j = 0; j < 8; ++j) {
          scale_gradient<kCentered>(x[i][j], grad[i][j], mean, rstd,
                                    [&] { of_bias.of[i][j] += grad[i][j]; });
          of_weight.of[i][j] = fmaf(grad[i][j], x[i][j], of_weight.of[i][j]);
          if (kWhole || p.weight != nullptr) grad[i][j] = __fmul_rn(grad[i][j], factor[j]);
          add_to_totals<kCentered>(totals[i], x[i][j], grad[i][j]);
        }
      });
    }
#pragma unroll
    for (int i = 1; i < kVectors; ++i) totals[0] = typename Totals::Join{}(totals[0], totals[i]);
    join(totals[0], typename Totals::Join{});
    if (!valid) return;
    const NormGradient<kCentered> gradient(p, totals[0], rstd, part, [&] {
      for_each([&](int i, int) {
#pragma unroll
        for (int j = 0; j < 8; ++j) x[i][j] *= rstd;
      });
    });
    const RowOf grad_x(p.grad_x, row * p.columns, kDtype);
    for_each([&](int i, int column) {
#pragma unroll
      for (int j = 0; j < 8; ++j) x[i][j] = gradient(x[i][j], grad[i][j]);
      if (p.grad_sum != nullptr) {
        get(grad[i], at + 2 * of_tensor, i);
#pragma unroll
        for (int j = 0; j < 8; ++j) x[i][j] += grad[i][j];
      }
      Access::store_own(grad_x, x[i], column);
    });
  }

  // Writes the block's sums. Those of the rows that it took at a time are added, first row first,
  // in the memory of the stages.
  TC_DEVICE void write(float* to, const ColumnSums& sums) const {
    if (to == nullptr) return;
    to += static_cast<tc_int64>(blockIdx.x / p.cluster) * p.columns;
    auto of_rows = reinterpret_cast<float*>(staged);
    const RowOf row(at_once == 1 ? to : of_rows + threadIdx.x / p.threads * p.columns, 0,
                    kRowFloat32);
    __syncthreads();
    for_each([&](int i, int column) { Vectors<kRowFloat32>::store_own(row, sums.of[i], column); });
    if (at_once == 1) return;
    __syncthreads();
    for (int column = threadIdx.x; column < p.columns; column += kBlock) {
      float sum = of_rows[column];
      for (int other = 1; other < at_once; ++other) sum += of_rows[other * p.columns + column];
      to[column] = sum;
    }
  }
};

extern "C" __global__ void __launch_bounds__(kBlock, TC_BLOCKS)
    TC_KERNEL(const __grid_constant__ NormParams p) {
  wait_for_previous_kernel();
  const bool centered = p.centered || p.sums_b != nullptr;
  const bool whole = p.columns == p.threads * p.cluster * kVectors * 8 && p.weight != nullptr &&
                     p.weight_dtype == p.row_dtype;
  if (whole) {
    centered ? Differentiation<true, true>{p}.run() : Differentiation<false, true>{p}.run();
  } else {
    centered ? Differentiation<true, false>{p}.run() : Differentiation<false, false>{p}.run();
  }
}

}  // namespace torch_cubin::TC_KERNEL

// of_warps: for rows of 16 bits that fill so many vectors of a warp's lanes, but for the last; two
// warps would leave a quarter of theirs empty.
//
// accepted_spill: registers of rows that a cluster shares; the kernel uses all that there are.
/* torch_cubin kernels
{"virtual_arch": [80, 90],
 "defaults": {
  "name": "norm_backward_sums_rows_{d.short}_{size.name}", "kind": "norm_backward_sums",
  "dtype": "{d.dtype}", "math": "float32", "layout": "any", "alignment": 16,
  "tile": [1, "{size.columns}", 1], "stages": 3, "block": ["{size.threads}", 1, 1],
  "dynamic_shared": 0, "blocks": "{size.blocks}", "most_cluster": "{size.most_cluster}",
  "of_warps": 0, "archs": "{size.archs}",
  "defines": {"TC_DTYPE": "{d.dtype}", "TC_BLOCKS": "{size.blocks}", "TC_MOST_CLUSTER": "{size.most_cluster}"},
  "accepted_spill": {"sm_80": 64, "sm_86": 64, "sm_89": 64, "sm_90a": 64, "sm_100a": 160, "sm_120a": 160},
  "cost": {"k_tile": 0, "fixed": 0}},
 "kernels": [
  {"for": {"d": [
     {"short": "f16", "dtype": "float16"}, {"short": "bf16", "dtype": "bfloat16"},
     {"short": "f32", "dtype": "float32"}],
    "size": [
     {"name": "256", "threads": 256, "columns": 4096, "blocks": 2, "most_cluster": 1, "archs": []},
     {"name": "512", "threads": 512, "columns": 8192, "blocks": 1, "most_cluster": 1, "archs": []},
     {"name": "512_cluster", "threads": 512, "columns": 8192, "blocks": 1, "most_cluster": 8,
      "archs": ["sm_90a", "sm_100a", "sm_120a"]}]}},
  {"of_warps": 1,
   "for": {"d": [{"short": "f16", "dtype": "float16"}, {"short": "bf16", "dtype": "bfloat16"}],
    "size": [
     {"name": "3_vectors", "threads": 384, "columns": 9216, "blocks": 1, "most_cluster": 1,
      "archs": ["sm_90a"]}]}}]}
*/
