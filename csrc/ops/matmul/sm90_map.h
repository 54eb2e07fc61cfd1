// Tensor maps of operands and outputs, as the kernels of sm90.cu and sm90_symmetric.cu take them.
#pragma once

#include "kernels/matmul/sm90_params.h"
#include "ops/matmul/problem.h"
#include "runtime/device.h"
#include "runtime/tensor_map.h"

namespace torch_cubin {

constexpr int kSm90BatchDims = 3;  // a tensor map has 5 dims

// A matrix of up to 5 dims, innermost first, as the TMA sees it.
struct Sm90Matrix {
  const char* data;
  MapType type;
  int64_t element_bytes;
  int64_t dims[2];
  int64_t stride;               // of the second dim; elements, as those of the batch
  const int64_t* batch_stride;  // null: no batch
  const int64_t* batch_size;
  int batch_dims;
  int64_t box[2];
  MapSwizzle swizzle;
};

// The type of operands' elements.
MapType sm90_map_type(Math math);

void encode_sm90_map(const Sm90Matrix& x, const Device& device, Sm90TensorMap& out);

}  // namespace torch_cubin
