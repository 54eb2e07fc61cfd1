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
// Whether a row belongs to more than one block; the loop over rows is 4% slower where it could
// (8192 x 8192, H200).
constexpr bool kClusters = TC_MOST_CLUSTER > 1;
// Threads of a row, besides kBlock, that the compiler knows: half a block, or a warp.
constexpr int kPart = TC_OF_WARPS ? 32 : kBlock / 2;
extern __shared__ FourWords staged[];

// The sums of a thread over its rows, of kVectors vectors.
struct ColumnSums {
  float of[kVectors][8] = {};
};

// kCentered: of layer norm, or with the sums for a bias. kWhole: rows fill their threads' vectors,
// and have a weight of their dtype; then no branch keeps the compiler from loading a row's vectors
// one right after another (8192 x 8192, H200: layer norm 134 -> 120 us). kThreads: of a row; 0:
// any, and p.grad_sum may be null though kAdds. kAhead: rows that are copied meanwhile.
template <bool kCentered, bool kWhole, int kThreads, bool kAdds, int kAhead>
struct Differentiation {
  static constexpr int kDtype = static_cast<int>(DType::TC_DTYPE);
  using Access = Vectors<kDtype>;
  using Raw = typename Access::Raw;
  using Totals = Sums<kCentered ? 2 : 1>;
  using Join = RowJoin<Totals, kBlock, kClusters, true, kThreads>;
  static constexpr int kParts = Access::kParts;
  static constexpr int kOfTensor = kVectors * (kParts * kBlock * 16);
  const NormParams& p;
  const int threads = kThreads > 0 ? kThreads : p.threads;
  const int at_once = kBlock / threads;  // rows
  const int lane = static_cast<int>(threadIdx.x) % threads +
                   static_cast<int>(kClusters ? cluster_rank() : 0) * threads;
  const int stride = kThreads > 0 && !kClusters ? kThreads : threads * p.cluster;
  const u32 of_tensor = kThreads > 0 ? kOfTensor : p.vectors*(kParts * kBlock * 16);
  const bool adds = kAdds && (kThreads > 0 || p.grad_sum != nullptr);
  const u32 of_stage = (adds ? 3 : 2) * of_tensor;
  const u32 base = shared_address(staged) + threadIdx.x * 16;

  // The weight of a thread's vectors, as floats where there are registers for them.
  static constexpr bool kUnpacks = kWhole && !kAdds;
  struct Weight {
    Raw raw[kUnpacks ? 1 : kVectors];
    float of[kUnpacks ? kVectors : 1][8];

    TC_DEVICE void set(int i, const Raw& from) {
      if constexpr (kUnpacks) {
        Access::unpack(of[i], from);
      } else {
        raw[i] = from;
      }
    }
    TC_DEVICE void get(float (&factor)[8], int i) const {
      if constexpr (kUnpacks) {
#pragma unroll
        for (int j = 0; j < 8; ++j) factor[j] = of[i][j];
      } else {
        Access::unpack(factor, raw[i]);
      }
    }
  };

  // Where a thread reads or writes a tensor's rows.
  struct Pointer {
    char* at;
    tc_int64 step;  // to the thread's next row, bytes
  };
  TC_DEVICE Pointer pointer(const void* tensor, tc_int64 row, tc_int64 step,
                            tc_int64 of_row) const {
    constexpr int kBytes = 2 * kParts;
    return {RowOf(tensor, row * of_row, kDtype).data + lane * tc_int64(8 * kBytes),
            step * of_row * kBytes};
  }

  // Calls body(i, column) for the thread's vectors.
  template <class Body>
  TC_DEVICE void for_each(Body&& body) const {
#pragma unroll
    for (int i = 0; i < kVectors; ++i) {
      const int column = (lane + i * stride) * 8;
      if (kWhole || column < p.columns) body(i, column);
    }
  }

  TC_DEVICE void copy(u32 to, Pointer& from) const {
    for_each([&](int i, int) {
#pragma unroll
      for (int part = 0; part < kParts; ++part) {
        cp_async<16>(to + (i * kParts + part) * (kBlock * 16),
                     from.at + i * stride * (16 * kParts) + part * 16, true);
      }
    });
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
    Join join(at_once == 1 ? kBlock : threads, p.cluster);
    if (at_once == 1 && kThreads == 0) join.clear_warps(blockDim.x / 32);
    const tc_int64 step = static_cast<tc_int64>(gridDim.x / p.cluster) * at_once;
    tc_int64 row = static_cast<tc_int64>(blockIdx.x / p.cluster) * at_once + threadIdx.x / threads;
    Pointer x_from = pointer(p.x, row, step, p.x_stride);
    Pointer grad_from = pointer(p.grad_out, row, step, p.grad_out_stride);
    Pointer sum_from = pointer(p.grad_sum, row, step, p.grad_sum_stride);
    Pointer to = pointer(p.grad_x, row, step, p.columns);
    // Begins to copy the thread's row after the next `ahead`, to a stage.
    const auto fetch = [&](u32 at, int ahead) {
      if (row < p.rows - ahead * step) {
        copy(at, x_from);
        copy(at + of_tensor, grad_from);
        if (adds) copy(at + 2 * of_tensor, sum_from);
      }
      x_from.at += x_from.step;
      grad_from.at += grad_from.step;
      if (adds) sum_from.at += sum_from.step;
      cp_async_commit();
    };
    // The statistics of the next row, read a row ahead as well.
    const float* mean_at = p.mean + row;
    const float* rstd_at = p.rstd + row;
    float mean = 0, rstd = 0;
    const auto read_statistics = [&](tc_int64 of) {
      if (of >= p.rows) return;
      if (kCentered && p.centered) mean = *mean_at;
      rstd = *rstd_at;
      mean_at += step;
      rstd_at += step;
    };
    wait_for_previous_kernel();
#pragma unroll
    for (int stage = 0; stage < kAhead; ++stage) fetch(base + stage * of_stage, stage);
    read_statistics(row);
    Weight weight;
    if constexpr (kWhole) {
      const RowOf of(p.weight, 0, kDtype);
      Raw raw[kVectors];
      for_each([&](int i, int column) { Access::load_raw(raw[i], of, column); });
      for_each([&](int i, int) { weight.set(i, raw[i]); });
    }
    ColumnSums of_weight, of_bias;
    u32 at = base, free = base + kAhead * of_stage;
    const u32 end = base + (kAhead + 1) * of_stage;
#pragma unroll 1
    for (tc_int64 first = row - threadIdx.x / threads; first < p.rows; first += step) {
      fetch(free, kAhead);
      const float own_mean = mean, own_rstd = rstd;
      read_statistics(row + step);
      cp_async_wait<kAhead>();
      differentiate(row < p.rows, to.at, at, own_mean, own_rstd, weight, join, of_weight, of_bias);
      free = at;
      at += of_stage;
      if (at == end) at = base;
      row += step;
      to.at += to.step;
    }
    cp_async_wait<0>();
    write(of_weight, of_bias);
  }

  // `weight` is kWhole's.
  TC_DEVICE void differentiate(bool valid, char* to, u32 at, float mean, float rstd,
                               const Weight& weight, Join& join, ColumnSums& of_weight,
                               ColumnSums& of_bias) const {
    const float part = 1.0f / static_cast<float>(p.columns);
    float x[kVectors][8], grad[kVectors][8];  // x - mean, and rstd * grad_out * weight
    Totals totals[kVectors] = {};             // of x * grad, and of grad
    if (kThreads == kBlock || valid) {
      for_each([&](int i, int column) {
        get(x[i], at, i);
        get(grad[i], at + of_tensor, i);
        float factor[8];
        if constexpr (kWhole) {
          weight.get(factor, i);
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
    if (kThreads != kBlock && !valid) return;
    const NormGradient<kCentered> gradient(p, totals[0], rstd, part, [&] {
      for_each([&](int i, int) {
#pragma unroll
        for (int j = 0; j < 8; ++j) x[i][j] *= rstd;
      });
    });
    for_each([&](int i, int) {
#pragma unroll
      for (int j = 0; j < 8; ++j) x[i][j] = gradient(x[i][j], grad[i][j]);
      if (adds) {
        get(grad[i], at + 2 * of_tensor, i);
#pragma unroll
        for (int j = 0; j < 8; ++j) x[i][j] += grad[i][j];
      }
      const RowOf own(to + i * stride * (16 * kParts), 0, kDtype);
      Access::store_own(own, x[i], 0);
    });
  }

  // Writes the block's sums.
  TC_DEVICE void write(const ColumnSums& of_weight, const ColumnSums& of_bias) const {
    if constexpr (kClusters) {
      const auto write_own = [&](float* to, const ColumnSums& sums) {
        if (to == nullptr) return;
        const RowOf row(to, static_cast<tc_int64>(blockIdx.x / p.cluster) * p.columns, kRowFloat32);
        for_each(
            [&](int i, int column) { Vectors<kRowFloat32>::store_own(row, sums.of[i], column); });
      };
      write_own(p.sums_w, of_weight);
      if (kCentered) write_own(p.sums_b, of_bias);
    } else {
      // Through the memory of the stages: those of the rows that the block took at a time are
      // added, first row first, and neighbours write neighbouring vectors.
      const auto of_rows = reinterpret_cast<float*>(staged);
      const int of_kind = at_once * p.columns;
      __syncthreads();
      const auto put = [&](float* to, const ColumnSums& sums) {
        const RowOf row(to + threadIdx.x / threads * p.columns, 0, kRowFloat32);
        for_each(
            [&](int i, int column) { Vectors<kRowFloat32>::store_own(row, sums.of[i], column); });
      };
      put(of_rows, of_weight);
      if (kCentered) put(of_rows + of_kind, of_bias);
      __syncthreads();
      const auto add = [&](float* to, const float* from) {
        if (to == nullptr) return;
        to += static_cast<tc_int64>(blockIdx.x) * p.columns;
        for (int column = 4 * threadIdx.x; column < p.columns; column += 4 * blockDim.x) {
          float4 sum = *reinterpret_cast<const float4*>(from + column);
#pragma unroll 4
          for (int other = 1; other < at_once; ++other) {
            const float4 x = *reinterpret_cast<const float4*>(from + other * p.columns + column);
            sum = {sum.x + x.x, sum.y + x.y, sum.z + x.z, sum.w + x.w};
          }
          *reinterpret_cast<float4*>(to + column) = sum;
        }
      };
      add(p.sums_w, of_rows);
      if (kCentered) add(p.sums_b, of_rows + of_kind);
    }
  }
};

template <bool kWhole, int kThreads, bool kAdds, int kAhead = kStages - 1>
TC_DEVICE void differentiate(const NormParams& p) {
  if (p.centered || p.sums_b != nullptr) {
    Differentiation<true, kWhole, kThreads, kAdds, kAhead>{p}.run();
  } else {
    Differentiation<false, kWhole, kThreads, kAdds, kAhead>{p}.run();
  }
}

extern "C" __global__ void __launch_bounds__(kBlock, TC_BLOCKS)
    TC_KERNEL(const __grid_constant__ NormParams p) {
  const bool whole = p.columns == p.threads * p.cluster * kVectors * 8 && p.weight != nullptr &&
                     p.weight_dtype == p.row_dtype;
  if (!whole) return differentiate<false, 0, true>(p);
  if constexpr (!kClusters && DType::TC_DTYPE != DType::float32) {
    const bool adds = p.grad_sum != nullptr;
    if (p.threads == kBlock && adds) return differentiate<true, kBlock, true>(p);
    if (p.threads == kBlock) return differentiate<true, kBlock, false>(p);
    if (p.threads == kPart && !adds) return differentiate<true, kPart, false>(p);
    if constexpr (kBlock == 256) {
      // Of short rows fewer copies at a time are quicker (65536 x 128, H200: layer norm 18.2 ->
      // 17.4 us, RMS norm 16.25 -> 15.8).
      if (p.threads < 32) return differentiate<true, 0, true, 1>(p);
    }
  }
  differentiate<true, 0, true>(p);
}

}  // namespace torch_cubin::TC_KERNEL

// of_warps: for rows of 16 bits that fill so many vectors of a warp's lanes, but for the last; two
// warps would leave a quarter of theirs empty.
//
// accepted_spill: a few registers of float32, and of GPUs that it was not tuned on.
/* torch_cubin kernels
{"defaults": {
  "name": "norm_backward_sums_rows_{d.short}_{size.name}", "kind": "norm_backward_sums",
  "math": "float32", "tile": [1, "{size.columns}", 1], "block": ["{size.threads}", 1, 1],
  "stages": 3, "archs": "{size.archs}",
  "accepted_spill": {"sm_80": 32, "sm_86": 32, "sm_89": 32, "sm_90a": 16, "sm_100a": 32,
                     "sm_120a": 32}, "cost": {"k_tile": 0, "fixed": 0}, "blocks": "{size.blocks}",
  "most_cluster": "{size.most_cluster}", "of_warps": "{size.of_warps}",
  "defines": {"TC_DTYPE": "{d.dtype}", "TC_BLOCKS": "{size.blocks}",
              "TC_MOST_CLUSTER": "{size.most_cluster}", "TC_OF_WARPS": "{size.of_warps}"}},
 "kernels": [
  {"for": {
    "d": "f16 bf16 f32",
    "size": [
     ["name", "threads", "columns", "blocks", "most_cluster", "of_warps", "archs"],
     ["256",         256, 4096, 2, 1, 0, []],
     ["512",         512, 8192, 1, 1, 0, []],
     ["512_cluster", 512, 8192, 1, 8, 0, ["sm_90a", "sm_100a", "sm_120a"]]]}},
  {"for": {
    "d": "f16 bf16",
    "size": [
     ["name", "threads", "columns", "blocks", "most_cluster", "of_warps", "archs"],
     ["3_vectors", 384, 9216, 1, 1, 1, ["sm_90a"]]]}}]}
*/
