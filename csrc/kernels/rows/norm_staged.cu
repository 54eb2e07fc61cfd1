// norm.cu for rows without a residual, by vectors, whose parameters have their dtype: one thread
// copies a block's rows to shared memory in bulk, and every pass reads them there. So all bytes of
// a block are loaded at once, no registers hold them, and half as many threads again run at a time.
//
// Threads own the same elements as in norm.cu, and add them in the same order: a row has the same
// bits by either.
#include "common/hopper.cuh"
#include "norm_params.h"
#include "norm_prefetch.cuh"
#include "rows.cuh"

namespace torch_cubin::TC_KERNEL {

constexpr int kBlock = TC_THREADS;

struct Staged {
  FourWords rows[kBlock * (kThreadBytes / 16)];
  u64 arrived;  // mbarrier of all rows
};

// Begins to copy the block's rows, one after the other, and waits for the previous kernel. For one
// thread.
TC_DEVICE void fetch(const NormParams& p, Staged& staged) {
  const int at_once = blockDim.x / p.threads, bytes = p.columns * 2;
  const tc_int64 first = static_cast<tc_int64>(blockIdx.x) * at_once;
  const int count = static_cast<int>(min(p.rows - first, tc_int64(at_once)));
  const u32 arrived = shared_address(&staged.arrived);
  sm90::barrier_init(arrived, 1);
  sm90::fence_barrier_init();
  wait_for_previous_grid();
  sm90::barrier_expect(arrived, count * bytes);
  for (int i = 0; i < count; ++i) {
    sm90::bulk_load(shared_address(staged.rows) + i * bytes,
                    static_cast<const char*>(p.x) + (first + i) * p.x_stride * 2, bytes, arrived);
  }
}

template <bool kCentered>
TC_DEVICE void normalize(const NormParams& p, const Staged& staged) {
  using Access = Vectors<static_cast<int>(DType::TC_DTYPE)>;
  using Raw = Access::Raw;
  constexpr int kHeld = Access::kHeld;
  static_assert(Access::kParts == 1);
  const auto [row, valid] = OwnRow(p.rows, p.threads, 1);
  const Lane<Access> at(p.threads, 1, p.columns);
  const u32 from = shared_address(staged.rows) + threadIdx.x / p.threads * (p.columns * 2);
  sm90::barrier_wait(shared_address(&staged.arrived), 0);
  const auto for_each = [&](auto&& body) {
#pragma unroll
    for (int i = 0; i < kHeld; ++i) {
      if (!at.has(0, i)) continue;
      Raw raw;
      load_shared(raw.parts[0].words, from + at.column(0, i) * 2);
      float x[8];
      Access::unpack(x, raw);
      body(x, at.column(0, i));
    }
  };
  RowJoin<Sums<1>, kBlock, false> join(p.threads, 1);
  const float part = 1.0f / static_cast<float>(p.columns);
  float mean = 0;
  if constexpr (kCentered) {
    Sums<1> sum = {{0}};
    for_each([&](float (&x)[8], int) {
#pragma unroll
      for (int j = 0; j < 8; ++j) sum.of[0] += x[j];
    });
    join(sum, Sums<1>::Join{});
    mean = sum.of[0] * part;
  }
  Sums<1> squares = {{0}};
  for_each([&](float (&x)[8], int) {
#pragma unroll
    for (int j = 0; j < 8; ++j) squares.of[0] += (x[j] - mean) * (x[j] - mean);
  });
  join(squares, Sums<1>::Join{});
  const float rstd = rsqrtf(squares.of[0] * part + p.eps);
  if (!valid) return;
  if (at.lane == 0) {
    if (kCentered) p.mean[row] = mean;
    p.rstd[row] = rstd;
  }
  char* const out = static_cast<char*>(p.out) + row * p.columns * 2;
  const auto parameter = [](float (&x)[8], const void* tensor, int column) {
    Raw own;
    own.parts[0] = *reinterpret_cast<const FourWords*>(static_cast<const char*>(tensor) +
                                                       column * tc_int64(2));
    Access::unpack(x, own);
  };
  for_each([&](float (&x)[8], int column) {
    float other[8];
#pragma unroll
    for (int j = 0; j < 8; ++j) x[j] = (x[j] - mean) * rstd;
    if (p.weight != nullptr) {
      parameter(other, p.weight, column);
#pragma unroll
      for (int j = 0; j < 8; ++j) x[j] = __fmul_rn(x[j], other[j]);
    }
    if (p.bias != nullptr) {
      parameter(other, p.bias, column);
#pragma unroll
      for (int j = 0; j < 8; ++j) x[j] = __fadd_rn(x[j], other[j]);
    }
    Raw result;
    Access::pack(result, x);
    *reinterpret_cast<FourWords*>(out + column * tc_int64(2)) = result.parts[0];
  });
}

extern "C" __global__ void __launch_bounds__(kBlock, TC_BLOCKS)
    TC_KERNEL(const __grid_constant__ NormParams p) {
  __shared__ Staged staged;
  if (threadIdx.x == 0) fetch(p, staged);
  prefetch_parameters(p);
  wait_for_previous_kernel();
  __syncthreads();  // the mbarrier is initialized
  p.centered ? normalize<true>(p, staged) : normalize<false>(p, staged);
}

}  // namespace torch_cubin::TC_KERNEL

/* torch_cubin kernels
{"virtual_arch": [90],
 "kernels": [
  {"name": "norm_staged_rows_{d.short}_{size.threads}", "kind": "norm_staged",
   "archs": ["sm_90a"], "dtype": "{d.dtype}",
   "math": "float32", "layout": "any", "alignment": 16, "tile": [1, 8, 1], "stages": 1,
   "block": ["{size.threads}", 1, 1], "dynamic_shared": 0,
   "defines": {"TC_DTYPE": "{d.dtype}", "TC_BLOCKS": "{size.blocks}"},
   "cost": {"k_tile": 0, "fixed": 0},
   "for": {"d": [{"short": "f16", "dtype": "float16"}, {"short": "bf16", "dtype": "bfloat16"}],
    "size": [{"threads": 256, "blocks": 6}, {"threads": 512, "blocks": 3}]}}]}
*/
