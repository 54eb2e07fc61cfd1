// Eight elements at a time: loads, scales, rounding and stores. quantize_params.h defines them.
#pragma once

#include "common/dtype.cuh"
#include "quantize_params.h"

namespace torch_cubin {

constexpr int kEight = 8;  // elements that a thread handles together

// Elements from `from` on, zeros from `count` on.
template <DType kType>
TC_DEVICE void load_eight(float (&x)[kEight], const void* base, tc_int64 at, int count,
                          bool vectors) {
  using Traits = DTypeTraits<kType>;
  auto from = static_cast<const typename Traits::Storage*>(base) + at;
  if (!vectors || count < kEight) {
#pragma unroll
    for (int i = 0; i < kEight; ++i) x[i] = i < count ? Traits::load(from[i]) : 0.0f;
  } else if constexpr (kType == DType::float32) {
    const float4 low = reinterpret_cast<const float4*>(from)[0];
    const float4 high = reinterpret_cast<const float4*>(from)[1];
    x[0] = low.x, x[1] = low.y, x[2] = low.z, x[3] = low.w;
    x[4] = high.x, x[5] = high.y, x[6] = high.z, x[7] = high.w;
  } else {
    const uint4 bits = *reinterpret_cast<const uint4*>(from);
    const u32 words[] = {bits.x, bits.y, bits.z, bits.w};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      x[2 * i] = Traits::load(static_cast<u16>(words[i]));
      x[2 * i + 1] = Traits::load(static_cast<u16>(words[i] >> 16));
    }
  }
}

// NaN for an infinity, other numbers as they are: infinities have no scale.
TC_DEVICE void drop_infinities(float (&x)[kEight]) {
#pragma unroll
  for (int i = 0; i < kEight; ++i) x[i] = __fmaf_rn(x[i], 0.0f, x[i]);
}

// The largest magnitude, without NaN.
TC_DEVICE float largest_of(const float (&x)[kEight], float most = 0.0f) {
#pragma unroll
  for (int i = 0; i < kEight; ++i) most = fmaxf(most, fabsf(x[i]));
  return most;
}

// Over kLanes neighbouring lanes.
template <int kLanes>
TC_DEVICE float largest_of_lanes(float most) {
#pragma unroll
  for (int step = 1; step < kLanes; step *= 2) {
    most = fmaxf(most, __shfl_xor_sync(~0u, most, step));
  }
  return most;
}

// Over a block of 256 threads; `shared` has 8 floats.
TC_DEVICE float largest_of_block(float most, float* shared) {
  most = largest_of_lanes<32>(most);
  if (threadIdx.x % 32 == 0) shared[threadIdx.x / 32] = most;
  __syncthreads();
  return largest_of_lanes<8>(shared[threadIdx.x % 8]);
}

TC_DEVICE float scale_of(float largest, int flags) {
  constexpr float kLeast = 1.17549435e-38f;  // 2^-126: its inverse is finite
  if (largest == 0.0f) return 1.0f;
  float scale = fmaxf(__fdiv_rn(largest, flags & kQuantizeE5m2 ? 57344.0f : 448.0f), kLeast);
  if (flags & kQuantizePowerOfTwo) {
    const u32 bits = __float_as_uint(scale);
    scale = __uint_as_float((bits + 0x7FFFFF) & 0xFF800000);
  }
  return scale;
}

TC_DEVICE u32 pack_two(float low, float high, int flags) {
  u16 out;
  if (flags & kQuantizeE5m2) {
    asm("cvt.rn.satfinite.e5m2x2.f32 %0, %1, %2;" : "=h"(out) : "f"(high), "f"(low));
  } else {
    out = pack_e4m3(low, high);
  }
  return out;
}

TC_DEVICE uint2 quantized(const float (&x)[kEight], float inverse, int flags) {
  u32 words[2];
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const float* own = x + 4 * i;
    words[i] = pack_two(own[0] * inverse, own[1] * inverse, flags) |
               pack_two(own[2] * inverse, own[3] * inverse, flags) << 16;
  }
  return make_uint2(words[0], words[1]);
}

// The first `count` of eight bytes.
TC_DEVICE void store_eight(unsigned char* to, uint2 bytes, int count, bool vectors) {
  if (vectors && count >= kEight) {
    *reinterpret_cast<uint2*>(to) = bytes;
    return;
  }
#pragma unroll
  for (int i = 0; i < kEight; ++i) {
    const u32 word = i < 4 ? bytes.x : bytes.y;
    if (i < count) to[i] = static_cast<unsigned char>(word >> (i % 4 * 8));
  }
}

}  // namespace torch_cubin
