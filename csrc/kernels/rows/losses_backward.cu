// The gradient of cross entropy's losses; losses_params.h defines the computation. It may be
// written over the logits: each thread writes what it has read.
//
// Each block takes as many rows as it holds, or several blocks one row.
#include "exponential.cuh"
#include "target.cuh"

namespace torch_cubin::TC_KERNEL {

constexpr int kBlock = TC_THREADS;
constexpr tc_int64 kStreamed = tc_int64{32} << 20;  // elements

// kWeighted: with label smoothing that is weighted by class. kStreams: the L2 cache does not hold
// the result (2048 x 128256, H200: 257 -> 250 us, a copy 246); a smaller one is there for the next
// kernel.
template <class Access, bool kWeighted, bool kStreams>
TC_DEVICE void differentiate(const LossesParams& p) {
  constexpr int kElements = Access::kElements;
  using Own = Lane<Access>;
  const OwnRow own_row(p.rows, p.threads, p.cluster);
  const tc_int64 row = own_row.row;
  if (!own_row.valid) return;
  const Own at(p.threads, p.cluster, p.columns);
  const RowOf x_row(p.x, row * p.x_stride, p.x_dtype), weight(p.weight, p.first, p.weight_dtype);
  const RowOf out(p.out, row * p.columns, p.x_dtype);
  float hit, uniform, of_exp, max, log_sum;
  int target_column;
  // Reads all that depends on the row and its target, and whether that is ignored. What does not
  // depend on the target is loaded with it (8192 x 32000, H200: 260 -> 256 us).
  const auto read_target = [&] {
    float scale = element_of(p.grad, p.losses_dtype, p.each_grad ? row : 0);
    const float total = p.total == nullptr ? 1.0f : *p.total;
    max = p.max[row];
    log_sum = p.log_sum[row];
    const Target target(p, p.targets[row]);
    if (target.ignored) return true;
    scale /= total;
    hit = (1.0f - p.label_smoothing) * target.weight * scale;
    uniform = target.uniform * scale;
    of_exp = kWeighted             ? hit + uniform * *p.weight_sum
             : p.weight == nullptr ? target.weight * scale
                                   : hit;
    const tc_int64 own = target.column - p.first;
    const bool is_column = target.valid && own >= 0 && own < p.columns;
    target_column = is_column ? static_cast<int>(own) : -kElements;
    return false;
  };
  bool ignored = false;
  at.stream(
      x_row, [&] { return ignored = read_target(); },
      [&](float (&x)[kElements], int column) {
#pragma unroll
        for (int j = 0; j < kElements; ++j) {
          x[j] = of_exp * exponential<Access::kExact>(x[j] - max - log_sum);
        }
        if constexpr (kWeighted) {
          float factor[kElements];
          Access::load(factor, weight, column);
#pragma unroll
          for (int j = 0; j < kElements; ++j) x[j] -= uniform * factor[j];
        } else {
#pragma unroll
          for (int j = 0; j < kElements; ++j) x[j] -= uniform;
        }
        const int own = target_column - column;
        if (own >= 0 && own < kElements) {
#pragma unroll
          for (int j = 0; j < kElements; ++j) {
            if (j == own) x[j] -= hit;
          }
        }
        kStreams ? Access::store_own_once(out, x, column) : Access::store_own(out, x, column);
      });
  if (!ignored) return;
  for (int column = at.lane * kElements; column < p.columns; column += at.threads * kElements) {
    const float zeros[kElements] = {};
    Access::store_own(out, zeros, column);
  }
}

extern "C" __global__ void __launch_bounds__(kBlock, TC_BLOCKS)
    TC_KERNEL(const __grid_constant__ LossesParams p) {
  wait_for_previous_kernel();
  with_access<RewrittenVectors, DType::TC_DTYPE>(p.columns, [&](auto access) {
    using Access = decltype(access);
    if (p.weight_sum != nullptr) {
      differentiate<Access, true, false>(p);
    } else if (p.rows * p.columns < kStreamed) {
      differentiate<Access, false, false>(p);
    } else {
      differentiate<Access, false, true>(p);
    }
  });
}

}  // namespace torch_cubin::TC_KERNEL

// accepted_spill: a few registers, of kernels that are bound by memory; a fifth block to hide its
// latency is worth more.
/* torch_cubin kernels
{"kernels": [
  {"name": "losses_backward_rows_{d.short}", "kind": "losses_backward", "math": "float32",
   "alignment": 2, "tile": [1, 8, 1], "block": [256, 1, 1],
   "accepted_spill": {"sm_80": 96, "sm_86": 96, "sm_89": 96, "sm_90a": 96, "sm_100a": 96,
                      "sm_120a": 96}, "cost": {"k_tile": 0, "fixed": 0},
   "defines": {"TC_DTYPE": "{d.dtype}", "TC_BLOCKS": 5}, "for": {"d": "f16 bf16 f32"}}]}
*/
