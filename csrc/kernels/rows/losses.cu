// The losses of cross entropy; losses_params.h defines the computation. A row is read once: each
// thread's sum is relative to the maximum of its own elements.
//
// Each block takes as many rows as it holds, or each cluster of blocks one row. Many small blocks
// hide each other's latency: rows are not held in registers.
#include "exponential.cuh"
#include "shifted.cuh"
#include "target.cuh"

namespace torch_cubin::TC_KERNEL {

constexpr int kBlock = TC_THREADS, kDtype = static_cast<int>(DType::TC_DTYPE);

// How many vectors a thread has at a time changes no sum: it adds them one after another.
struct OwnVectors : StreamedVectors<kDtype> {
  static constexpr int kHeld = TC_HELD / StreamedVectors<kDtype>::kParts;
};

// Own: the part of a row that is a thread's.
template <class Own, class Access, bool kSmooth>
TC_DEVICE void compute_losses(const LossesParams& p) {
  constexpr int kElements = Access::kElements;
  using Sum = ExpSum<Access::kExact>;
  RowJoin<Sum, kBlock> join(p.threads, p.cluster);
  const OwnRow own(p.rows, p.threads, p.cluster);
  const tc_int64 row = own.row;
  const Own at(p.threads, p.cluster, p.columns);
  const RowOf x_row(p.x, row * p.x_stride, p.x_dtype), weight(p.weight, 0, p.weight_dtype);
  Sum sum;
  sum.clear();
  Sums<1> elements = {{0}};  // weighted
  at.stream(
      x_row, [&] { return p.targets[row] == p.ignore_index; },
      [&](float (&x)[kElements], int column) {
        sum.add(x);
        if (!kSmooth) return;
        float factor[kElements];
        if (p.weight != nullptr) Access::load(factor, weight, column);
#pragma unroll
        for (int j = 0; j < kElements; ++j) {
          elements.of[0] += p.weight == nullptr ? x[j] : x[j] * factor[j];
        }
      });
  join(sum, typename Sum::Join{});
  if (kSmooth) {
    RowJoin<Sums<1>, kBlock> join_elements(p.threads, p.cluster);
    join_elements(elements, Sums<1>::Join{});
  }
  if (!own.valid || at.lane != 0) return;
  const Target target(p, p.targets[row]);
  const float max = sum.max(), log_sum = logf(sum.total());
  float loss[1] = {target.weight};  // 0 if ignored, NaN without a class
  if (target.valid) {
    // Differences from the maximum come first, as in PyTorch: logsumexp would round away digits of
    // small losses.
    loss[0] *= log_sum - (element_of(x_row.data, p.x_dtype, target.column) - max);
    if (kSmooth) {
      const float total = p.weight == nullptr ? static_cast<float>(p.classes) : *p.weight_sum;
      const float smooth = total * log_sum - (elements.of[0] - total * max);
      loss[0] = (1.0f - p.label_smoothing) * loss[0] + target.uniform * smooth;
    }
  }
  Singles<kRowFloat32>::store(RowOf(p.losses, row, p.losses_dtype), loss, 0);
  p.max[row] = max;
  p.log_sum[row] = log_sum;
}

extern "C" __global__ void __launch_bounds__(kBlock, TC_BLOCKS)
    TC_KERNEL(const __grid_constant__ LossesParams p) {
  wait_for_previous_kernel();
  if constexpr (!TC_GENERAL) {
    compute_losses<Lane<OwnVectors>, OwnVectors, false>(p);
  } else if (p.label_smoothing == 0) {
    compute_losses<ShiftedLane<kDtype>, OwnVectors, false>(p);
  } else if (p.columns % kRowVector == 0) {
    compute_losses<Lane<OwnVectors>, OwnVectors, true>(p);
  } else {
    compute_losses<Lane<Singles<kDtype>>, Singles<kDtype>, true>(p);
  }
}

}  // namespace torch_cubin::TC_KERNEL

// Kernels of kind losses are for rows by vectors without label smoothing, those of losses_general
// for all others. Few long rows leave a multiprocessor one or two blocks, which losses_few lets
// wait for memory fewer times.
//
// accepted_spill: a few registers, of kernels that are bound by memory; a fifth block to hide its
// latency is worth more, and a sixth one (8192 x 32000, H200: 134.5 -> 132 us), but not to
// losses_general (4096 x 50257: 174 -> 188 us).
/* torch_cubin kernels
{"defaults": {
  "math": "float32", "alignment": 2, "tile": [1, 8, 1], "block": [256, 1, 1],
  "accepted_spill": {"sm_80": 208, "sm_86": 200, "sm_89": 200, "sm_90a": 200, "sm_100a": 200,
                     "sm_120a": 200}, "cost": {"k_tile": 0, "fixed": 0},
  "defines": {"TC_DTYPE": "{d.dtype}"}},
 "kernels": [
  {"name": "losses_rows_{d.short}", "kind": "losses",
   "defines": {"TC_BLOCKS": "{d.blocks}", "TC_HELD": 4, "TC_GENERAL": "false"},
   "for": {
    "d": [
     ["short", "dtype", "blocks"],
     ["f16",  "float16",  6],
     ["bf16", "bfloat16", 6],
     ["f32",  "float32",  5]]}},
  {"name": "losses_rows_few_{d.short}", "kind": "losses_few", "archs": ["sm_90a"],
   "defines": {"TC_BLOCKS": 2, "TC_HELD": 16, "TC_GENERAL": "false"}, "for": {"d": "f16 bf16"}},
  {"name": "losses_rows_general_{d.short}", "kind": "losses_general",
   "defines": {"TC_BLOCKS": 5, "TC_HELD": 4, "TC_GENERAL": "true"}, "for": {"d": "f16 bf16 f32"}}]}
*/
