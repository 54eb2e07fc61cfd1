#include "ops/matmul/sm90_map.h"

#include "ops/matmul/backend.h"

namespace torch_cubin {

MapType sm90_map_type(Math math) {
  return math == kMathTF32      ? MapType::kTFloat32
         : math == kMathFloat16 ? MapType::kFloat16
                                : MapType::kBFloat16;
}

void encode_sm90_map(const Sm90Matrix& x, const Device& device, Sm90TensorMap& out) {
  const auto dim = [](int64_t size, int64_t bytes, int64_t box) {
    return MapDim{static_cast<uint64_t>(size), static_cast<uint64_t>(bytes),
                  static_cast<uint32_t>(box)};
  };
  const auto batch = [&](int i) {
    if (i >= x.batch_dims) return dim(1, 0, 1);
    return dim(x.batch_size[i], x.batch_stride[i] * x.element_bytes, 1);
  };
  // The stride of a single row is any; problems say 0.
  const int64_t step = x.dims[1] == 1 ? kVectorBytes : x.stride * x.element_bytes;
  const MapDim columns = dim(x.dims[0], 0, x.box[0]), rows = dim(x.dims[1], step, x.box[1]);
  // Rows that begin within a line of the L2 cache end within one, too: promoted, each of a box's
  // rows reads up to 512 bytes for 128 (5328x664x6808 NT by 128x224, H200: 76.6 us, and 69.8
  // without).
  const auto at = reinterpret_cast<uintptr_t>(x.data);
  const MapL2Promotion promotion =
      (at | rows.stride) % kLineBytes == 0 ? MapL2Promotion::k256Bytes : MapL2Promotion::kNone;
  if (x.batch_stride == nullptr) {
    encode_tiled_map(&out, x.data, x.type, x.swizzle, {columns, rows}, device.index, promotion);
  } else {
    static_assert(kSm90BatchDims == 3);
    encode_tiled_map(&out, x.data, x.type, x.swizzle, {columns, rows, batch(0), batch(1), batch(2)},
                     device.index, promotion);
  }
}

}  // namespace torch_cubin
