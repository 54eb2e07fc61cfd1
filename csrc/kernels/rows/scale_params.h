// The parameter of the kernel that scales a tensor, shared by host and device code.
//
// scale   x *= factor, which is one element on the device; x is dense. With `vectors`, `count` is a
//         multiple of eight, and x begins at a multiple of 16 bytes.
#pragma once

namespace torch_cubin {

typedef long long tc_int64;  // device code includes no <cstdint>

struct ScaleParams {
  void* x;
  const void* factor;
  tc_int64 count;
  int x_dtype, factor_dtype;
  int vectors;
};

}  // namespace torch_cubin
