// The parameter of the kernels of sm90/e4m3.cu, shared by host and device code.
//
//   out[b, h, i, :] = v_descale sum_j P[i, j] v[b, h / group, j, :]
//   P = softmax_j(scale * q_descale * k_descale * q_i . k_j)
//
// q, k and v are e4m3, out is bfloat16, the factors are those of (batch or sequence, head of the
// keys). sm90/forward_params.h applies except for the maps, whose elements are bytes, and the
// values, which sm90/e4m3_values.cu has transposed to (batch, head, column, key) in the order of
// sm90/e4m3_values_params.h. Boxes, with panels of 128 columns, or of 64 if a head has no more, and
// of 128 keys, or of 64 if tile N is no multiple of 128, with the swizzle of a panel's bytes:
//   q: {panel, 64, 1, 1, 1}    k: {panel, tile N, 1, 1, 1}    v: {panel of keys, head_dim, 1, 1, 1}
//
// `unit` of Sm90AttentionParams is scale * log2(e), any number; has_rule, score and mask are not
// used.
#pragma once

#include "forward_params.h"

namespace torch_cubin {

// A float for each batch, or sequence, and head of the keys; null: 1.
struct Sm90Descale {
  const float* data;
  tc_int64 stride[2];
};

struct Sm90E4m3Params : Sm90AttentionParams {
  Sm90Descale q_descale, k_descale, v_descale;
};

}  // namespace torch_cubin
