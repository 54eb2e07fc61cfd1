// A boolean mask as bits, for the `general` kernels of sm90.cu: they read each word once for each head,
// where bytes would be 32 loads. A lane makes a word; a warp has neighbouring words.
#include "common/ptx.cuh"
#include "sm90_mask_params.h"

namespace torch_cubin::TC_KERNEL {

// A bit for each byte that is not 0.
TC_DEVICE u32 bits_of(u32 bytes) {
  u32 any = (((bytes & 0x7f7f7f7fu) + 0x7f7f7f7fu) | bytes) >> 7 & 0x01010101u;
  return (any | any >> 7 | any >> 14 | any >> 21) & 15;
}

extern "C" __global__ void __launch_bounds__(TC_THREADS)
    TC_KERNEL(const __grid_constant__ Sm90MaskParams p) {
  wait_for_previous_kernel();
  tc_int64 index = static_cast<tc_int64>(blockIdx.x) * TC_THREADS + threadIdx.x;
  tc_int64 line = index / p.words_of_row;
  if (line >= p.all_rows) return;
  int column = static_cast<int>(index - line * p.words_of_row) * 32;
  tc_int64 pair = line / p.rows, row = line - pair * p.rows, batch = pair / p.heads;
  const unsigned char* from = p.mask + batch * p.stride[0] +
                              (pair - batch * p.heads) * p.stride[1] + row * p.stride[2] +
                              column * p.stride[3];
  u32 word = 0;
  if (p.stride[3] == 1 && column + 32 <= p.columns && reinterpret_cast<u64>(from) % 16 == 0) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      uint4 bytes = __ldg(reinterpret_cast<const uint4*>(from) + half);
      u32 bits =
          bits_of(bytes.x) | bits_of(bytes.y) << 4 | bits_of(bytes.z) << 8 | bits_of(bytes.w) << 12;
      word |= bits << (16 * half);
    }
  } else {
    int count = min(32, p.columns - column);
    for (int i = 0; i < count; ++i) word |= static_cast<u32>(from[i * p.stride[3]] != 0) << i;
  }
  p.words[index] = word;
}

}  // namespace torch_cubin::TC_KERNEL
/* torch_cubin kernels
{"virtual_arch": ["90a"],
 "kernels": [
  {"name": "sm90_mask_attention", "archs": ["sm_90a"], "kind": "sm90_mask",
   "dtype": "any", "math": "any", "layout": "any", "alignment": 1, "tile": [1, 32, 1], "stages": 1,
   "block": [256, 1, 1], "dynamic_shared": 0, "cost": {"k_tile": 0, "fixed": 0}}]}
*/
