// The tensor maps of attention's kernels for Hopper: operands of 16-bit types, as (batch, head, row,
// column), in boxes of 64 columns and some rows under the 128-byte swizzle.
#pragma once

#include <cstdint>

#include "kernels/attention/attention_params.h"
#include "kernels/attention/sm90_params.h"
#include "ops/attention/portable.h"

namespace torch_cubin {

// `stride`: batch, head, row; in elements, whole 16 bytes each.
void encode_sm90_map(Sm90AttentionMap& out, const AttentionRow& kernel, const void* data,
                     const tc_int64 (&stride)[3], int64_t columns, int64_t rows, int64_t heads,
                     int64_t batch, int64_t box_rows, const Device& device);

}  // namespace torch_cubin
