// softmax.cu for long rows by vectors of 16 bits that the blocks of a cluster hold in registers, a
// part each. Each warp's sum is relative to the maximum of its own elements.
#include "exponential.cuh"
#include "softmax_params.h"

namespace torch_cubin::TC_KERNEL {

constexpr int kBlock = TC_THREADS, kVectors = TC_TILE_N / (kBlock * kRowVector);
// All blocks have the first vectors of each thread: the host launches as few as hold the row, so
// that they have more than half of what all threads hold but for seven, which the last may lack.
constexpr int kSure = kVectors / 2 - 1;
static_assert(kBlock > kMostCluster);
using Access = Vectors<static_cast<int>(DType::TC_DTYPE)>;
using Raw = typename Access::Raw;
using Sum = ExpSum<false>;

struct Shared {
  Sum of_warps[kBlock / 32];
  Exchanged<Sum::kCount> of_blocks;
};

// The vectors of a row that this block has. kThreads: of the block; 0: any.
template <int kThreads>
struct Part {
  tc_int64 row;
  int begin, vectors;
  const int threads = kThreads > 0 ? kThreads : static_cast<int>(blockDim.x);

  TC_DEVICE Part(int columns, int cluster) {
    const int all = columns / kRowVector, most = (all + cluster - 1) / cluster;
    row = blockIdx.x / cluster;
    begin = static_cast<int>(blockIdx.x % cluster) * most;
    vectors = min(most, all - begin);
  }

  // Calls body(i, column) for the thread's vectors, columns counted from the block's first.
  template <class Body>
  TC_DEVICE void for_each(Body&& body) const {
#pragma unroll
    for (int i = 0; i < kVectors; ++i) {
      const int vector = static_cast<int>(threadIdx.x) + i * threads;
      if (i < kSure || vector < vectors) body(i, vector * kRowVector);
    }
  }
};

// The sum of `count` sums, at most 32, of which a lane gets one: get(lane).
template <class Get>
TC_DEVICE Sum total_of(int count, Get&& get) {
  const int lane = threadIdx.x % 32;
  Sum sum;
  sum.clear();
  if (lane < count) sum = get(lane);
  sum.join_warp();
  return sum;
}

template <bool kLog, class Part>
TC_DEVICE void softmax(const RowsSoftmaxParams& p, Shared& shared, const Part& part,
                       const Raw (&raw)[kVectors]) {
  Sum own;
  own.clear();
  part.for_each([&](int i, int) { own.max() = fmaxf(own.max(), Access::max_of(raw[i])); });
  own.max() = max_of_warp(own.max());
  part.for_each([&](int i, int) {
    float x[kRowVector];
    Access::unpack(x, raw[i]);
    own.add_below_max(x);
  });
  own.total() = sum_of_warp(own.total());
  if (threadIdx.x % 32 == 0) shared.of_warps[threadIdx.x / 32] = own;
  __syncthreads();
  Sum sum = total_of(part.threads / 32, [&](int i) { return shared.of_warps[i]; });
  shared.of_blocks.send(sum.of, p.cluster);
  sum = total_of(p.cluster, [&](int i) {
    return Sum{{shared.of_blocks.of[i][0], shared.of_blocks.of[i][1]}};
  });
  const float max = sum.max(), log_sum = logf(sum.total()), scale = 1.0f / sum.total();
  const RowOf out(p.out, part.row * p.columns + part.begin * kRowVector, p.out_dtype);
  part.for_each([&](int i, int column) {
    float x[kRowVector];
    Access::unpack(x, raw[i]);
#pragma unroll
    for (int j = 0; j < kRowVector; ++j) {
      x[j] = kLog ? x[j] - max - log_sum : exponential<false>(x[j] - max) * scale;
    }
    Access::store(out, x, column);
  });
}

template <int kThreads>
TC_DEVICE void softmax(const RowsSoftmaxParams& p, Shared& shared) {
  const Part<kThreads> part(p.columns, p.cluster);
  if (threadIdx.x == 0) {
    shared.of_blocks.begin();
    sm90::fence_barrier_init();
  }
  wait_for_previous_kernel();
  const RowOf row(p.x, part.row * p.x_stride + part.begin * kRowVector, p.x_dtype);
  Raw raw[kVectors];
  part.for_each([&](int i, int column) { Access::load_raw(raw[i], row, column); });
  __syncwarp();  // thread 0 had work of its own, and cluster_arrive() is for converged warps
  sm90::cluster_arrive();
  p.log ? softmax<true>(p, shared, part, raw) : softmax<false>(p, shared, part, raw);
}

extern "C" __global__ void __launch_bounds__(kBlock, TC_BLOCKS)
    TC_KERNEL(const __grid_constant__ RowsSoftmaxParams p) {
  __shared__ Shared shared;
  blockDim.x == kBlock ? softmax<kBlock>(p, shared) : softmax<0>(p, shared);
}

}  // namespace torch_cubin::TC_KERNEL

// A fifth block is quicker for softmax, but spills in log-softmax (2048 x 128256, H200: 257.6 ->
// 306 us).
/* torch_cubin kernels
{"virtual_arch": [90],
 "kernels": [
  {"name": "softmax_cluster_rows_{d.short}", "kind": "softmax_cluster", "math": "float32",
   "tile": [1, 16384, 1], "block": [256, 1, 1], "archs": ["sm_90a"],
   "cost": {"k_tile": 0, "fixed": 0}, "defines": {"TC_DTYPE": "{d.dtype}", "TC_BLOCKS": 4},
   "for": {"d": "f16 bf16"}}]}
*/
