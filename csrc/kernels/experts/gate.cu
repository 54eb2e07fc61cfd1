// The gate of experts' rows and its derivative. gate_params.h defines the result.
//
// A warp has a slot's row. Each lane has 16 bytes of columns at a time, or one column where rows
// are no multiples of 16 bytes. Bound by memory bandwidth.
#include "gate_params.h"
#include "vectors.cuh"
#include "weights.cuh"

namespace torch_cubin::TC_KERNEL {

using Elements = RowElements<DType::TC_DTYPE>;
constexpr bool kBackward = TC_BACKWARD;

// activation(x) and its derivative, in float32.
struct ValueAndSlope {
  float value, slope;
};

TC_DEVICE ValueAndSlope activate_with_slope(float x, int activation) {
  if (activation == kGateNone) return {x, 1.0f};
  if (activation == kGateRelu) return {x < 0.0f ? 0.0f : x, x <= 0.0f ? 0.0f : 1.0f};
  if (activation == kGateGelu) {
    const float part = 0.5f * (1.0f + erff(0.70710678118654752f * x));
    return {x * part, part + x * 0.39894228040143268f * expf(-0.5f * x * x)};
  }
  float y = x, slope = 1.0f;  // x * sigmoid(y), and dy / dx
  if (activation == kGateGeluTanh) {
    constexpr float kScale = 2.0f * 0.79788456080286536f;
    y = kScale * (x + 0.044715f * x * x * x);
    slope = kScale * (1.0f + 3.0f * 0.044715f * x * x);
  }
  const float part = __fdiv_rn(1.0f, 1.0f + expf(-y));
  return {x * part, part + x * part * (1.0f - part) * slope};
}

// Where a lane's `kElements` gates and ups from column i on are in `before` and its gradient.
template <int kElements>
struct GatesAndUps {
  tc_int64 first, second;  // of two vectors
  bool interleaved;

  TC_DEVICE GatesAndUps(const ExpertGateParams& p, tc_int64 row, int i)
      : first(row * 2 * p.inner + i), second(first + p.inner), interleaved(p.interleaved) {
    if (!interleaved) return;
    first += i;
    second = first + kElements;
  }

  // Exchanges pairs and halves of the 2 * kElements values of both vectors.
  static TC_DEVICE void to_halves(float (&gate)[kElements], float (&up)[kElements]) {
    float all[2 * kElements];
#pragma unroll
    for (int e = 0; e < kElements; ++e) {
      all[e] = gate[e];
      all[kElements + e] = up[e];
    }
#pragma unroll
    for (int e = 0; e < kElements; ++e) {
      gate[e] = all[2 * e];
      up[e] = all[2 * e + 1];
    }
  }

  static TC_DEVICE void to_pairs(float (&gate)[kElements], float (&up)[kElements]) {
    float all[2 * kElements];
#pragma unroll
    for (int e = 0; e < kElements; ++e) {
      all[2 * e] = gate[e];
      all[2 * e + 1] = up[e];
    }
#pragma unroll
    for (int e = 0; e < kElements; ++e) {
      gate[e] = all[e];
      up[e] = all[kElements + e];
    }
  }

  TC_DEVICE void load(const void* from, float (&gate)[kElements], float (&up)[kElements]) const {
    Elements::load(from, first, gate);
    Elements::load(from, second, up);
    if (interleaved) to_halves(gate, up);
  }

  TC_DEVICE void store(void* to, float (&gate)[kElements], float (&up)[kElements]) const {
    if (interleaved) to_pairs(gate, up);
    Elements::store(to, first, gate);
    Elements::store(to, second, up);
  }
};

// The row of a slot, with its weight: the lane's columns, `kElements` at a time. Returns its part
// of the weight's gradient.
template <int kElements>
TC_DEVICE float run(const ExpertGateParams& p, tc_int64 row, float weight) {
  float sum = 0.0f;
  for (int i = threadIdx.x % 32 * kElements; i < p.inner; i += 32 * kElements) {
    const tc_int64 at = row * p.inner + i;
    const GatesAndUps<kElements> both(p, row, i);
    float gate[kElements], up[kElements], grad[kElements], inside[kElements];
    both.load(p.before, gate, up);
    if constexpr (kBackward) Elements::load(p.grad, at, grad);
#pragma unroll
    for (int e = 0; e < kElements; ++e) {
      if constexpr (kBackward) {
        const ValueAndSlope own = activate_with_slope(gate[e], p.activation);
        const float result = own.value * up[e];
        sum = __fmaf_rn(grad[e], result, sum);
        inside[e] = weight * result;
        grad[e] *= weight;
        gate[e] = grad[e] * up[e] * own.slope;
        up[e] = grad[e] * own.value;
      } else {
        inside[e] = activate_with_slope(gate[e], p.activation).value * up[e];
      }
    }
    Elements::store(p.inside, at, inside);
    if constexpr (kBackward) both.store(p.before_grad, gate, up);
  }
  return sum;
}

extern "C" __global__ void __launch_bounds__(TC_THREADS)
    TC_KERNEL(const __grid_constant__ ExpertGateParams p) {
  wait_for_previous_kernel();
  const tc_int64 slot = static_cast<tc_int64>(blockIdx.x) * (TC_THREADS / 32) + threadIdx.x / 32;
  if (slot >= p.slots) return;
  const int row = p.places[slot];
  const bool exists = static_cast<u32>(row) < static_cast<u32>(p.row_count);
  float sum = 0.0f;
  if (exists) {
    const float weight = kBackward ? read_weight(p.weights, p.weights_type, slot) : 1.0f;
    sum = p.elements == 1 ? run<1>(p, row, weight) : run<Elements::kVector>(p, row, weight);
  }
  if constexpr (kBackward) {
#pragma unroll
    for (int step = 16; step > 0; step /= 2) sum += __shfl_xor_sync(~0u, sum, step);
    if (threadIdx.x % 32 == 0) p.weights_grad[slot] = sum;
  }
}

}  // namespace torch_cubin::TC_KERNEL

/* torch_cubin kernels
{"virtual_arch": ["90a"],
 "kernels": [
  {"name": "gate_experts_{b.name}{d.short}", "kind": "gate{b.kind}", "archs": ["sm_90a"],
   "dtype": "{d.dtype}", "math": "{d.dtype}", "layout": "any", "alignment": 16,
   "tile": [8, "{d.columns}", 1], "stages": 1, "block": [256, 1, 1], "dynamic_shared": 0,
   "defines": {"TC_DTYPE": "{d.dtype}", "TC_BACKWARD": "{b.backward}"}, "cost": {},
   "for": {"d": [{"short": "f16", "dtype": "float16", "columns": 256},
                 {"short": "bf16", "dtype": "bfloat16", "columns": 256},
                 {"short": "f32", "dtype": "float32", "columns": 128}],
           "b": [{"name": "", "kind": "", "backward": 0},
                 {"name": "backward_", "kind": "_backward", "backward": 1}]}}]}
*/
