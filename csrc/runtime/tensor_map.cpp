#include "runtime/tensor_map.h"

#include <cstring>
#include <string>

#include "cubin/error.h"
#include "runtime/device.h"

namespace torch_cubin {

void encode_tensor_map(const torch_cubin_tensor_map& map, uint8_t* out) {
  static_assert(sizeof(CUtensorMap) == kTensorMapBytes, "the size that kernels take");
  const ContextGuard guard(device(map.device));  // a thread may never have touched CUDA
  alignas(64) CUtensorMap encoded;  // the driver wants 64 bytes, a launch copies from anywhere
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

}  // namespace torch_cubin
