// The kernels of csrc/kernels/matmul/sm90_scaled.cu: products of 8-bit floats with scales.
#pragma once

#include "ops/common/launch.h"
#include "ops/scaled/group_rows.h"
#include "pytorch/tensor.h"

namespace torch_cubin {

// The scales of an operand's rows (of the transpose's, for B), strides in elements.
struct OperandScales {
  const float* data = nullptr;
  int64_t stride = 0;    // from row to row, 0 if all have one; of blocks from 128 rows to the next
  int64_t stride_k = 0;  // of blocks: from 128 of K to the next
  bool of_128_rows = false;
};

// Operands and outputs as the kernels read and write them. Sizes are positive, strides in elements.
struct ScaledCall {
  ScalarType a_dtype, b_dtype, out_dtype;
  int64_t m = 0, n = 0, k = 0;
  // Contiguous along K; addresses and strides are multiples of 16 bytes.
  const char* a = nullptr;
  const char* b = nullptr;
  int64_t a_stride = 0, b_stride = 0;
  bool blocks = false;  // whether scales belong to blocks of K
  bool fast = false;    // whether the tensor cores may add all of K
  OperandScales a_scales, b_scales;
  const void* bias = nullptr;  // null: none
  ScalarType bias_dtype = ScalarType::Float;
  int64_t bias_stride = 0;
  char* out = nullptr;     // rows are contiguous
  int64_t out_stride = 0;  // 0: rows follow one another
  // Whether out is e4m3 of silu(gate) * up with the scales below, of rows, N gates and N ups of B,
  // which are rounded to out_dtype before (kernels/matmul/sm90_scaled_params.h).
  bool gated = false;
  // Of gated calls: the ups of B, with the scales' layout of b_scales. The gates are `b`.
  const char* b_up = nullptr;
  int64_t b_up_stride = 0;
  const float* b_up_scales = nullptr;
  float* gate_scales = nullptr;
  bool gate_power_of_two = false;  // whether those scales are rounded up to powers of two
  int64_t gate_stride = 0, gate_stride_k = 0;
  // Groups of rows have a matrix B each, groups of K an output; without groups there is one of
  // both.
  Groups groups;
  int64_t b_group_stride = 0, b_scales_group_stride = 0;
};

// Whether a gated kernel computes the call, whose operands may be missing, and more quickly than
// the product without a gate, or with `of_two` that of the gates and that of the ups, and the
// quantisation after it.
bool is_gated_quicker(const Device& device, const ScaledCall& call, bool of_two);

// Throws [no_kernel] or [arch] where the device has no such kernel.
void run_sm90_scaled(const Device& device, const ScaledCall& call);

}  // namespace torch_cubin
