// Eight elements at a time: loads, scales, rounding and stores. quantize_params.h defines them.
#pragma once

#include "common/dtype.cuh"
#include "common/float8_scale.cuh"
#include "common/hopper.cuh"
#include "quantize_params.h"

namespace torch_cubin {

constexpr int kEight = 8;  // elements that a thread handles together

// The numbers of a word, one or two, with NaN for infinities, which have no scale.
template <DType kType>
TC_DEVICE u32 without_infinities(u32 x) {
  u32 out;
  if constexpr (kType == DType::float32) {
    out = __float_as_uint(__fmaf_rn(__uint_as_float(x), 0.0f, __uint_as_float(x)));
  } else if constexpr (kType == DType::bfloat16) {
    asm("fma.rn.bf16x2 %0, %1, %2, %1;" : "=r"(out) : "r"(x), "r"(0));
  } else {
    asm("fma.rn.f16x2 %0, %1, %2, %1;" : "=r"(out) : "r"(x), "r"(0));
  }
  return out;
}

// The larger magnitudes of the numbers of two words, with any sign; the other's for NaN.
template <DType kType>
TC_DEVICE u32 larger(u32 x, u32 y) {
  u32 out;
  if constexpr (kType == DType::float32) {
    out = __float_as_uint(fmaxf(fabsf(__uint_as_float(x)), fabsf(__uint_as_float(y))));
  } else if constexpr (kType == DType::bfloat16) {
    asm("max.xorsign.abs.bf16x2 %0, %1, %2;" : "=r"(out) : "r"(x), "r"(y));
  } else {
    asm("max.xorsign.abs.f16x2 %0, %1, %2;" : "=r"(out) : "r"(x), "r"(y));
  }
  return out;
}

// Loads what the L2 cache may drop before all else.
TC_DEVICE uint4 load_once(const uint4* from) {
  uint4 out;
  asm volatile("ld.global.L2::cache_hint.v4.u32 {%0, %1, %2, %3}, [%4], %5;"
               : "=r"(out.x), "=r"(out.y), "=r"(out.z), "=r"(out.w)
               : "l"(from), "l"(sm90::kEvictFirst));
  return out;
}

// Eight elements as they are stored, in words of one or two. They are loaded before any is used, so
// that many loads are in flight; so a load has no branch if kVectors. The largest is looked for two
// elements at a time, since these kernels have as many instructions as the memory leaves time for.
template <DType kType>
struct Eight {
  using Traits = DTypeTraits<kType>;
  using Storage = typename Traits::Storage;
  static constexpr int kWords = kEight * sizeof(Storage) / 4;
  u32 words[kWords] = {};

  // Zeros from `count` on. kVectors: they are aligned to 16 bytes, and `count` is at most 0 or at
  // least 8. kOnce, of vectors: the L2 cache may drop them first.
  template <bool kVectors, bool kOnce = false>
  TC_DEVICE void load(const Storage* from, int count) {
    if constexpr (kVectors) {
#pragma unroll
      for (int i = 0; i < kWords / 4; ++i) {
        uint4 own = make_uint4(0, 0, 0, 0);
        const uint4* at = reinterpret_cast<const uint4*>(from) + i;
        if (count > 0) own = kOnce ? load_once(at) : *at;
        words[4 * i] = own.x, words[4 * i + 1] = own.y;
        words[4 * i + 2] = own.z, words[4 * i + 3] = own.w;
      }
    } else {
      constexpr int kInWord = 4 / sizeof(Storage);
#pragma unroll
      for (int i = 0; i < kWords; ++i) {
        words[i] = 0;
#pragma unroll
        for (int j = 0; j < kInWord; ++j) {
          const int own = i * kInWord + j;
          if (own < count) words[i] |= bits_of(from[own]) << (16 * j);
        }
      }
    }
  }

  TC_DEVICE float element(int i) const {
    if constexpr (kType == DType::float32) return __uint_as_float(words[i]);
    return Traits::load(static_cast<u16>(words[i / 2] >> (i % 2 * 16)));
  }

  TC_DEVICE void unpack(float (&x)[kEight]) const {
#pragma unroll
    for (int i = 0; i < kEight; ++i) x[i] = element(i);
  }

  TC_DEVICE void drop_infinities() {
#pragma unroll
    for (u32& word : words) word = without_infinities<kType>(word);
  }

  // Each with the larger magnitude of it and the other's.
  TC_DEVICE void keep_larger(const Eight& other) {
#pragma unroll
    for (int i = 0; i < kWords; ++i) words[i] = larger<kType>(words[i], other.words[i]);
  }

  // The largest magnitude, 0 of NaN alone.
  TC_DEVICE float largest() const {
    u32 most = words[0];
#pragma unroll
    for (int i = 1; i < kWords; ++i) most = larger<kType>(most, words[i]);
    if constexpr (kType == DType::float32) return fmaxf(fabsf(__uint_as_float(most)), 0.0f);
    const float low = Traits::load(static_cast<u16>(most));
    return fmaxf(fmaxf(fabsf(low), fabsf(Traits::load(static_cast<u16>(most >> 16)))), 0.0f);
  }

 private:
  static TC_DEVICE u32 bits_of(float x) { return __float_as_uint(x); }
  static TC_DEVICE u32 bits_of(u16 x) { return x; }
};

// Over a block of 256 threads; `shared` has 8 floats.
TC_DEVICE float largest_of_block(float most, float* shared) {
  most = largest_of_lanes<32>(most);
  if (threadIdx.x % 32 == 0) shared[threadIdx.x / 32] = most;
  __syncthreads();
  return largest_of_lanes<8>(shared[threadIdx.x % 8]);
}

TC_DEVICE u32 pack_two(float low, float high, bool e5m2) {
  u16 out;
  if (e5m2) {
    asm("cvt.rn.satfinite.e5m2x2.f32 %0, %1, %2;" : "=h"(out) : "f"(high), "f"(low));
  } else {
    out = pack_e4m3(low, high);
  }
  return out;
}

TC_DEVICE uint2 pack_eight(const float (&x)[kEight], bool e5m2) {
  u32 words[2];
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    words[i] = pack_two(x[4 * i], x[4 * i + 1], e5m2) | pack_two(x[4 * i + 2], x[4 * i + 3], e5m2)
                                                            << 16;
  }
  return make_uint2(words[0], words[1]);
}

// Eight elements times their scales' inverses.
template <DType kType>
TC_DEVICE uint2 quantized(const Eight<kType>& own, const float (&inverse)[kEight], bool e5m2) {
  float x[kEight];
  own.unpack(x);
#pragma unroll
  for (int i = 0; i < kEight; ++i) x[i] *= inverse[i];
  return pack_eight(x, e5m2);
}

// The first `count` of eight bytes. If `vectors`, `to` is aligned to 8 bytes, and `count` is at
// most 0 or at least 8.
TC_DEVICE void store_eight(unsigned char* to, uint2 bytes, int count, bool vectors) {
  if (vectors) {
    if (count > 0) *reinterpret_cast<uint2*>(to) = bytes;
    return;
  }
#pragma unroll
  for (int i = 0; i < kEight; ++i) {
    const u32 word = i < 4 ? bytes.x : bytes.y;
    if (i < count) to[i] = static_cast<unsigned char>(word >> (i % 4 * 8));
  }
}

}  // namespace torch_cubin
