// Tensor maps: what the hardware's tensor memory accelerator (TMA) reads of a tensor, encoded by the
// driver on the host into 128 bytes that a kernel takes by value.
#pragma once

#include <cstdint>
#include <initializer_list>

namespace torch_cubin {

constexpr int kTensorMapBytes = 128;
constexpr int kTensorMapDims = 5;

// Dims innermost first, as the driver wants them; enums by the driver's numbers. Specs are compared byte
// by byte, so every byte is some member's, and what lies beyond the rank should be zero.
struct TensorMapSpec {
  uint32_t rank;
  uint32_t data_type;
  uint32_t interleave;
  uint32_t swizzle;
  uint32_t l2_promotion;
  uint32_t oob_fill;
  int64_t device;  // of the tensor
  void* address;
  uint64_t dims[kTensorMapDims];
  uint64_t strides[kTensorMapDims];  // bytes, from the second dim on
  uint32_t box[kTensorMapDims];
  uint32_t element_strides[kTensorMapDims];
};

// Encodes `map` into `out`, at any alignment. Throws [input] where the driver refuses. Each thread keeps
// what it encoded lately: a map depends on nothing but its spec, so one for memory that was freed and
// given out again is right as it is.
void encode_tensor_map(const TensorMapSpec& map, uint8_t* out);

// The driver's numbers (CUtensorMapDataType and so on), for host code that may not name it.
enum class MapType : uint32_t {
  kUInt8 = 0,
  kFloat16 = 6,
  kFloat32 = 7,
  kFloat64 = 8,
  kBFloat16 = 9,
  kTFloat32 = 11
};
enum class MapSwizzle : uint32_t { kNone = 0, k32Bytes = 1, k64Bytes = 2, k128Bytes = 3 };
enum class MapL2Promotion : uint32_t { kNone = 0, k64Bytes = 1, k128Bytes = 2, k256Bytes = 3 };

struct MapDim {
  uint64_t size;    // elements
  uint64_t stride;  // bytes, a multiple of 16; of no meaning in the first dim, which is contiguous
  uint32_t box;     // elements that one copy moves; 1 to 256
};

// A map of 1 to 5 dims, innermost first, that fills what is out of bounds with zeros. `out` has 128
// bytes at any alignment.
void encode_tiled_map(void* out, const void* address, MapType type, MapSwizzle swizzle,
                      std::initializer_list<MapDim> dims, int device_index,
                      MapL2Promotion promotion = MapL2Promotion::k256Bytes);

}  // namespace torch_cubin
