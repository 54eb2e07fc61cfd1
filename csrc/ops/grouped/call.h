// A product of groups as the backends launch it, on any dtype.
#pragma once

#include "kernels/matmul/activation_params.h"
#include "ops/common/launch.h"
#include "pytorch/tensor.h"

namespace torch_cubin {

// Operands and outputs as the kernels read and write them. Sizes are positive, strides in elements.
struct GroupedCall {
  ScalarType dtype = ScalarType::BFloat16;
  bool contraction = false;  // else rows
  bool zero_rest = false;
  int64_t m = 0, n = 0, k = 0, groups = 0;
  // Contiguous along K, or along M or N (mn_major). Of 16-bit types, addresses and strides are
  // multiples of 16 bytes.
  const char* a = nullptr;
  const char* b = nullptr;
  bool b_mn_major = false;  // in contraction both are
  int64_t a_stride = 0, b_stride = 0, b_group_stride = 0;
  char* out = nullptr;  // contiguous
  const void* ends = nullptr;
  bool wide_ends = false;  // int64
  // Options of rows, where has_row_options(). With `rows`, int32 on the device, row m of the
  // product is of A's row rows[m]; A has a_height rows. With an activation B has 2 * n columns, of
  // gates and of ups.
  const void* rows = nullptr;
  int64_t a_height = 0;
  Activation activation = kActivationNone;
};

// Whether the kernels of a dtype gather rows and apply gates.
inline bool has_row_options(ScalarType dtype) { return element_size(dtype) == 2; }

// Throws [no_kernel] or [arch] where the device has no such kernel.
void run_grouped(const Device& device, const GroupedCall& call);

}  // namespace torch_cubin
