// Tensor maps: descriptors of a tensor for the tensor memory accelerator (TMA). The driver encodes
// one on the host into 128 bytes, which a kernel takes by value.
#pragma once

#include <cstdint>
#include <initializer_list>

namespace torch_cubin {

constexpr int kTensorMapBytes = 128;
constexpr int kTensorMapDims = 5;

// Dims are innermost first, and enums have the driver's numbers. Specs are compared byte by byte,
// so the struct has no padding, and dims beyond the rank should be zero.
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
  uint64_t strides[kTensorMapDims];  // bytes, starting with the second dim
  uint32_t box[kTensorMapDims];
  uint32_t element_strides[kTensorMapDims];
};

// Encodes `map` into `out`, which may have any alignment. Throws [input] if the driver refuses.
// Each thread caches its recent maps. A map depends only on its spec, so it stays valid for memory
// that was freed and reallocated.
void encode_tensor_map(const TensorMapSpec& map, uint8_t* out);

// The driver's numbers (CUtensorMapDataType and so on), for host code that must not include cuda.h.
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
  uint64_t stride;  // bytes, a multiple of 16; ignored for the first dim, which is contiguous
  uint32_t box;     // elements per copy, 1 to 256
};

// A map of 1 to 5 dims, innermost first, with out-of-bounds elements read as zero. `out` has 128
// bytes and may have any alignment.
void encode_tiled_map(void* out, const void* address, MapType type, MapSwizzle swizzle,
                      std::initializer_list<MapDim> dims, int device_index,
                      MapL2Promotion promotion = MapL2Promotion::k256Bytes);

}  // namespace torch_cubin
