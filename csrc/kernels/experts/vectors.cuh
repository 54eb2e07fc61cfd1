// Elements of rows as float32: 16 bytes of them at a time, or one.
#pragma once

#include "common/dtype.cuh"

namespace torch_cubin {

template <DType kDType>
struct RowElements {
  using Traits = DTypeTraits<kDType>;
  using Storage = typename Traits::Storage;

  static constexpr int kVector = 16 / sizeof(Storage);

  template <int kElements>
  static TC_DEVICE void load(const void* from, tc_int64 at, float (&x)[kElements]) {
    static_assert(kElements == 1 || kElements == kVector);
    const Storage* const source = static_cast<const Storage*>(from) + at;
    if constexpr (kElements == 1) {
      x[0] = Traits::load(*source);
    } else if constexpr (sizeof(Storage) == 4) {
      const float4 own = *reinterpret_cast<const float4*>(source);
      x[0] = own.x;
      x[1] = own.y;
      x[2] = own.z;
      x[3] = own.w;
    } else {
      const uint4 own = *reinterpret_cast<const uint4*>(source);
      const u32 words[4] = {own.x, own.y, own.z, own.w};
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        x[2 * i] = Traits::load(static_cast<u16>(words[i]));
        x[2 * i + 1] = Traits::load(static_cast<u16>(words[i] >> 16));
      }
    }
  }

  template <int kElements>
  static TC_DEVICE void store(void* to, tc_int64 at, const float (&x)[kElements]) {
    Storage* const target = static_cast<Storage*>(to) + at;
    if constexpr (kElements == 1) {
      *target = Traits::round(x[0]);
    } else if constexpr (sizeof(Storage) == 4) {
      *reinterpret_cast<float4*>(target) = make_float4(x[0], x[1], x[2], x[3]);
    } else {
      *reinterpret_cast<uint4*>(target) =
          make_uint4(Traits::pack(x[0], x[1]), Traits::pack(x[2], x[3]), Traits::pack(x[4], x[5]),
                     Traits::pack(x[6], x[7]));
    }
  }
};

}  // namespace torch_cubin
