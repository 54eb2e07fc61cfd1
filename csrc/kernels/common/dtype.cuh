// The element types of tensors: their storage type, their accumulator type, and the conversions.
#pragma once

#include "ptx.cuh"

namespace torch_cubin {

// torch's names: the kernel table's "dtype" is pasted after `::`.
enum class DType { float16, bfloat16, float32, float64 };

template <DType kDType>
struct DTypeTraits {  // 16-bit types; Storage holds the bits
  using Storage = u16;
  using Accumulator = float;

  static TC_DEVICE float load(u16 bits) {
    return kDType == DType::float16 ? f16_to_float(bits) : bf16_to_float(bits);
  }
  static TC_DEVICE u32 pack(float low, float high) {
    return kDType == DType::float16 ? pack_f16(low, high) : pack_bf16(low, high);
  }
  static TC_DEVICE u16 round(float value) { return static_cast<u16>(pack(value, 0.0f)); }
};

template <>
struct DTypeTraits<DType::float32> {
  using Storage = float;
  using Accumulator = float;
  static TC_DEVICE float load(float value) { return value; }
  static TC_DEVICE float round(float value) { return value; }
};

template <>
struct DTypeTraits<DType::float64> {
  using Storage = double;
  using Accumulator = double;
  static TC_DEVICE double load(double value) { return value; }
  static TC_DEVICE double round(double value) { return value; }
};

}  // namespace torch_cubin
