// The sum of the losses of cross entropy, or their mean by the rows' weights; losses_params.h
// defines the computation. The order of the sum depends on the number of rows alone.
#include "losses_params.h"
#include "rows.cuh"

namespace torch_cubin::TC_KERNEL {

constexpr int kBlock = TC_THREADS;

extern "C" __global__ void __launch_bounds__(kBlock)
    TC_KERNEL(const __grid_constant__ LossesParams p) {
  using Access = Singles<kRowFloat32>;
  using Own = Lane<Access>;
  wait_for_previous_kernel();
  RowJoin<Sums<2>, kBlock> join(p.threads, p.cluster);
  const auto [row, valid] = OwnRow<kBlock>(1, p.threads, p.cluster);
  const Own at(p.threads, p.cluster, p.columns);
  const RowOf losses(p.losses, 0, kRowFloat32), weights(p.weights, 0, kRowFloat32);
  typename Own::Raw loss[Own::kHeld], weight[Own::kHeld];
  Sums<2> sums = {{0, 0}};
  at.stream(
      [&](int first) {
        at.load(loss, losses, first);
        if (p.total != nullptr) at.load(weight, weights, first);
      },
      [&](int i, int) {
        sums.of[0] += __uint_as_float(loss[i]);
        if (p.total != nullptr) sums.of[1] += __uint_as_float(weight[i]);
      });
  join(sums, Sums<2>::Join{});
  if (!valid || at.lane != 0) return;
  const float out[1] = {p.total == nullptr ? sums.of[0] : sums.of[0] / sums.of[1]};
  Access::store(RowOf(p.out, 0, p.out_dtype), out, 0);
  if (p.total != nullptr) *p.total = sums.of[1];
}

}  // namespace torch_cubin::TC_KERNEL

/* torch_cubin kernels
{"virtual_arch": [80, 90],
 "kernels": [
  {"name": "losses_sum_rows", "kind": "losses_sum", "dtype": "float32",
   "math": "float32", "layout": "any", "alignment": 4, "tile": [1, 8, 1], "stages": 1,
   "block": [512, 1, 1], "dynamic_shared": 0, "cost": {"k_tile": 0, "fixed": 0}}]}
*/
