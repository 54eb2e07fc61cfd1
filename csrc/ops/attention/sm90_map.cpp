#include "ops/attention/sm90_map.h"

#include "runtime/tensor_map.h"

namespace torch_cubin {
namespace {

constexpr uint32_t kPanel = 64;  // columns of a box: 128 bytes, the swizzle's

}  // namespace

void encode_sm90_map(Sm90AttentionMap& out, const AttentionRow& kernel, const void* data,
                     const tc_int64 (&stride)[3], int64_t columns, int64_t rows, int64_t heads,
                     int64_t batch, int64_t box_rows, const Device& device) {
  const MapType type = kernel.dtype == kAttendFloat16 ? MapType::kFloat16 : MapType::kBFloat16;
  const auto dim = [](int64_t size, int64_t stride, int64_t box) {
    // The stride of a single index is any.
    return MapDim{static_cast<uint64_t>(size), static_cast<uint64_t>(size == 1 ? 16 : stride * 2),
                  static_cast<uint32_t>(box)};
  };
  encode_tiled_map(&out, data, type, MapSwizzle::k128Bytes,
                   {dim(columns, 1, kPanel), dim(rows, stride[2], box_rows),
                    dim(heads, stride[1], 1), dim(batch, stride[0], 1)},
                   device.index);
}

}  // namespace torch_cubin
