// The sum of the losses of cross entropy or their mean, and the sum of the targets' weights;
// losses_params.h defines the computation. The order of the sums depends on the number of rows
// alone.
#include "target.cuh"

namespace torch_cubin::TC_KERNEL {

constexpr int kBlock = TC_THREADS, kAtOnce = 8;

extern "C" __global__ void __launch_bounds__(kBlock)
    TC_KERNEL(const __grid_constant__ LossesParams p) {
  wait_for_previous_kernel();
  RowJoin<Sums<2>, kBlock> join(p.threads, p.cluster);
  const bool valid = static_cast<int>(threadIdx.x) < p.threads;
  const Lane<Singles<kRowFloat32>> at(p.threads, p.cluster, valid ? p.columns : 0);
  const auto losses = static_cast<const float*>(p.losses);
  Sums<2> sums = {{0, 0}};
  // What a thread adds at a time is loaded before the first is used: one block waits for memory
  // less often.
#pragma unroll 1
  for (int first = at.lane; first < at.columns; first += kAtOnce * at.threads) {
    float loss[kAtOnce];
    tc_int64 target[kAtOnce];
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      const int row = first + i * at.threads;
      const bool has = row < at.columns;
      loss[i] = has && losses != nullptr ? losses[row] : 0.0f;
      target[i] = has ? p.targets[row] : p.ignore_index;
    }
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      sums.of[0] += loss[i];
      sums.of[1] += Target(p, target[i]).weight;
    }
  }
  join(sums, Sums<2>::Join{});
  if (!valid || at.lane != 0) return;
  *p.total = sums.of[1];
  if (p.out == nullptr) return;  // `losses` is null, too, where there are no rows
  const float out[1] = {p.mean ? sums.of[0] / sums.of[1] : sums.of[0]};
  Singles<kRowFloat32>::store(RowOf(p.out, 0, p.out_dtype), out, 0);
}

}  // namespace torch_cubin::TC_KERNEL

/* torch_cubin kernels
{"kernels": [
  {"name": "losses_sum_rows_f32", "kind": "losses_sum", "dtype": "float32", "math": "float32",
   "alignment": 4, "tile": [1, 8, 1], "block": [1024, 1, 1], "cost": {"k_tile": 0, "fixed": 0}}]}
*/
