// A product of groups as the backends launch it, on any dtype.
#pragma once

#include "kernels/matmul/activation_params.h"
#include "ops/common/launch.h"
#include "pytorch/tensor.h"

namespace torch_cubin {

constexpr int64_t kGroupedRaster = 8;  // rows of tiles that follow one another

// How columns of B become a gate: activation(gate) * up. Gates are the first half of columns, ups
// the second; or they alternate.
struct Gating {
  Activation activation = kActivationNone;  // none: no gate
  bool interleaved = false;
};

// Operands and outputs as the kernels read and write them. Sizes are positive, strides in elements.
struct GroupedCall {
  ScalarType dtype = ScalarType::BFloat16;
  bool contraction = false;  // else rows
  bool zero_rest = false;
  int64_t m = 0, n = 0, k = 0, groups = 0;
  bool without_k = false;  // operands of zeros stand for those of a product without K
  // Contiguous along K, or along M or N (mn_major). Of 16-bit types, addresses and strides are
  // multiples of 16 bytes.
  const char* a = nullptr;
  const char* b = nullptr;
  bool b_mn_major = false;  // in contraction both are
  int64_t a_stride = 0, b_stride = 0, b_group_stride = 0;
  char* out = nullptr;  // contiguous
  const void* ends = nullptr;
  bool wide_ends = false;  // int64
  // Options of rows, where has_row_options(); kernels/matmul/sm90_grouped_params.h defines them.
  // With `rows` A has a_height rows; with a gate B has 2 * n columns.
  const int* rows = nullptr;
  int64_t a_height = 0;
  const int* out_rows = nullptr;
  const float* scale = nullptr;
  const void* bias = nullptr;  // contiguous
  Gating gating;

  // Where the last group may end.
  int64_t limit() const { return !contraction ? m : without_k ? 0 : k; }
  bool is_gated() const { return gating.activation != kActivationNone; }
  bool has_options() const {
    return rows != nullptr || out_rows != nullptr || scale != nullptr || bias != nullptr ||
           is_gated();
  }
};

// Whether the kernels of a dtype have the options of rows.
inline bool has_row_options(ScalarType dtype) { return element_size(dtype) == 2; }

// Throws [no_kernel] or [arch] where the device has no such kernel.
void run_grouped(const Device& device, const GroupedCall& call);

}  // namespace torch_cubin
