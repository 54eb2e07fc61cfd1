#include "runtime/tensor_map.h"

#include <cstring>
#include <string>

#include "cubin/error.h"
#include "runtime/device.h"

namespace torch_cubin {

void encode_tensor_map(const TensorMapSpec& map, uint8_t* out) {
  static_assert(sizeof(CUtensorMap) == kTensorMapBytes, "the size that kernels take");
  const ContextGuard guard(device(map.device));  // a thread may never have touched CUDA
  // The driver wants 64 bytes, newer headers say 128; a launch copies from anywhere.
  alignas(64) alignas(CUtensorMap) CUtensorMap encoded;
  check(driver().cuTensorMapEncodeTiled(&encoded, static_cast<CUtensorMapDataType>(map.data_type),
                                        map.rank, map.address, map.dims, map.strides, map.box,
                                        map.element_strides,
                                        static_cast<CUtensorMapInterleave>(map.interleave),
                                        static_cast<CUtensorMapSwizzle>(map.swizzle),
                                        static_cast<CUtensorMapL2promotion>(map.l2_promotion),
                                        static_cast<CUtensorMapFloatOOBfill>(map.oob_fill)),
        "input", "cuTensorMapEncodeTiled of a tensor of " + counted(map.rank, "dim"));
  std::memcpy(out, &encoded, sizeof(encoded));
}

static_assert(static_cast<uint32_t>(MapType::kFloat16) == CU_TENSOR_MAP_DATA_TYPE_FLOAT16 &&
                  static_cast<uint32_t>(MapType::kFloat32) == CU_TENSOR_MAP_DATA_TYPE_FLOAT32 &&
                  static_cast<uint32_t>(MapType::kFloat64) == CU_TENSOR_MAP_DATA_TYPE_FLOAT64 &&
                  static_cast<uint32_t>(MapType::kBFloat16) == CU_TENSOR_MAP_DATA_TYPE_BFLOAT16 &&
                  static_cast<uint32_t>(MapType::kTFloat32) == CU_TENSOR_MAP_DATA_TYPE_TFLOAT32 &&
                  static_cast<uint32_t>(MapType::kUInt8) == CU_TENSOR_MAP_DATA_TYPE_UINT8 &&
                  static_cast<uint32_t>(MapSwizzle::k128Bytes) == CU_TENSOR_MAP_SWIZZLE_128B &&
                  static_cast<uint32_t>(MapL2Promotion::k256Bytes) ==
                      CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
              "the driver's numbers");

void encode_tiled_map(void* out, const void* address, MapType type, MapSwizzle swizzle,
                      std::initializer_list<MapDim> dims, int device_index,
                      MapL2Promotion promotion) {
  if (dims.size() < 1 || dims.size() > kTensorMapDims) {
    fail({"internal", "a tensor map", "has a wrong number of dims", "1 to 5",
          std::to_string(dims.size()), ""});
  }
  TensorMapSpec map{};
  map.data_type = static_cast<uint32_t>(type);
  map.swizzle = static_cast<uint32_t>(swizzle);
  map.l2_promotion = static_cast<uint32_t>(promotion);
  map.device = device_index;
  map.address = const_cast<void*>(address);
  for (const MapDim& dim : dims) {
    const uint32_t i = map.rank++;
    map.dims[i] = dim.size;
    if (i > 0) map.strides[i - 1] = dim.stride;
    map.box[i] = dim.box;
    map.element_strides[i] = 1;
  }
  encode_tensor_map(map, static_cast<uint8_t*>(out));
}

}  // namespace torch_cubin
