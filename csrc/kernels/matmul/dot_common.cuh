// Shared by the kernels for few rows: chunks of 16 bytes, and stores to C.
//
// A is the small operand (m <= 4 rows), B the large one (n outputs). If the caller's N is small,
// the host swaps the operands, sets kFlagSwapped, and describes C by c_stride_m = 1, c_stride_n =
// m.
#pragma once

#include "tile.cuh"

namespace torch_cubin {

// 16 bytes of a tensor.
template <DType kDType>
struct Chunk {
  using Traits = DTypeTraits<kDType>;
  using Storage = typename Traits::Storage;
  using Accumulator = typename Traits::Accumulator;
  static constexpr int kSize = 16 / sizeof(Storage);

  uint4 bits;

  // For data that is used once: not cached in L1, where it would evict the small operand.
  TC_DEVICE static Chunk load_streaming(const Storage* from) {
    Chunk chunk;
    asm("ld.global.nc.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
        : "=r"(chunk.bits.x), "=r"(chunk.bits.y), "=r"(chunk.bits.z), "=r"(chunk.bits.w)
        : "l"(from));
    return chunk;
  }

  TC_DEVICE static Chunk load(const Storage* from) {
    return {__ldg(reinterpret_cast<const uint4*>(from))};
  }

  TC_DEVICE static Chunk load_shared(const Storage* from) {
    return {*reinterpret_cast<const uint4*>(from)};
  }

  // The `count` elements from[0], from[step], ..., then zeros.
  TC_DEVICE static Chunk load_elements(const Storage* from, tc_int64 step, int count) {
    Storage element[kSize];
#pragma unroll
    for (int j = 0; j < kSize; ++j) element[j] = j < count ? __ldg(from + j * step) : Storage(0);
    Chunk chunk;
    if constexpr (sizeof(Storage) == 2) {
      chunk.bits.x = element[0] | static_cast<u32>(element[1]) << 16;
      chunk.bits.y = element[2] | static_cast<u32>(element[3]) << 16;
      chunk.bits.z = element[4] | static_cast<u32>(element[5]) << 16;
      chunk.bits.w = element[6] | static_cast<u32>(element[7]) << 16;
    } else if constexpr (sizeof(Storage) == 4) {
      chunk.bits = make_uint4(__float_as_uint(element[0]), __float_as_uint(element[1]),
                              __float_as_uint(element[2]), __float_as_uint(element[3]));
    } else {
      chunk.bits = make_uint4(__double2loint(element[0]), __double2hiint(element[0]),
                              __double2loint(element[1]), __double2hiint(element[1]));
    }
    return chunk;
  }

  // j is a compile-time constant if the caller's loop is unrolled.
  TC_DEVICE Accumulator operator[](int j) const {
    const u32 words[4] = {bits.x, bits.y, bits.z, bits.w};
    if constexpr (sizeof(Storage) == 2) {
      u32 word = words[j / 2];
      return Traits::load(static_cast<u16>(j % 2 == 0 ? word & 0xffff : word >> 16));
    } else if constexpr (sizeof(Storage) == 4) {
      return __uint_as_float(words[j]);
    } else {
      return __hiloint2double(words[2 * j + 1], words[2 * j]);
    }
  }
};

TC_DEVICE float multiply_add(float a, float b, float c) { return fmaf(a, b, c); }
TC_DEVICE double multiply_add(double a, double b, double c) { return fma(a, b, c); }

// Adds the bias, rounds and writes element (m, n) of the batch that begins `batch_offset` elements
// into C.
template <DType kDType>
TC_DEVICE void store_output(const MatmulParams& p, tc_int64 batch_offset, tc_int64 m, tc_int64 n,
                            typename DTypeTraits<kDType>::Accumulator value) {
  using Traits = DTypeTraits<kDType>;
  if (p.bias != nullptr) value += load_bias<kDType>(p, p.flags & kFlagSwapped ? m : n);
  auto c = static_cast<typename Traits::Storage*>(p.c);
  c[batch_offset + m * p.c_stride_m + n * p.c_stride_n] = Traits::round(value);
}

// Stores one block's sum for (row, t.n0 + column) to C, or to this split's partial sums.
template <DType kDType>
TC_DEVICE void store_sum(const MatmulParams& p, const TileCoordinates& t, int row, int column,
                         typename DTypeTraits<kDType>::Accumulator value) {
  if (row >= p.m || t.n0 + column >= p.n) return;
  if (p.partial != nullptr) {
    auto partial = static_cast<typename DTypeTraits<kDType>::Accumulator*>(p.partial);
    partial[t.partial + row * p.n + column] = value;
  } else {
    store_output<kDType>(p, t.c - t.n0 * p.c_stride_n, row, t.n0 + column, value);
  }
}

}  // namespace torch_cubin
