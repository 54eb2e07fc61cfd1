// Two neighbouring results of a thread, as anywhere.cu and unaligned.cu add and round them.
#pragma once

#include "common/dtype.cuh"

namespace torch_cubin {

// Loads two floats from this block's shared memory, or from any block's of the cluster, which takes
// longer.
template <bool kOfCluster>
TC_DEVICE void load_pair(float (&out)[2], u32 shared) {
  if constexpr (kOfCluster) {
    asm volatile("ld.shared::cluster.v2.f32 {%0, %1}, [%2];"
                 : "=f"(out[0]), "=f"(out[1])
                 : "r"(shared)
                 : "memory");
  } else {
    asm volatile("ld.shared.v2.f32 {%0, %1}, [%2];"
                 : "=f"(out[0]), "=f"(out[1])
                 : "r"(shared)
                 : "memory");
  }
}

// A pair of 16 bits rounded to one word; of float32, the word of the first alone.
template <DType kOf>
TC_DEVICE u32 packed(float x, float y) {
  if constexpr (kOf == DType::float32) {
    return __float_as_uint(x);
  } else {
    return DTypeTraits<kOf>::pack(x, y);
  }
}

}  // namespace torch_cubin
