// A boolean mask as bits, in the order in which the `general` kernels of sm90_backward.cu use them: a step's
// thread takes a bit for each of its elements with one load, where bytes would be as many loads.
//
// A block has the mask of one tile of queries and one block of keys; thread t writes what thread t of the
// warpgroups of keys reads: bit 4j + 2h + c is of query 8j + lane % 4 * 2 + c and key
// 16 (t / 32) + lane / 4 + 8h.
#include "common/hopper.cuh"
#include "sm90_backward_params.h"

namespace torch_cubin::TC_KERNEL {

using namespace sm90;

constexpr int kMostRows = 96, kKeys = 128, kPitch = kKeys + 4;

extern "C" __global__ void __launch_bounds__(TC_THREADS)
    TC_KERNEL(const __grid_constant__ Sm90BackwardParams p) {
  __shared__ __align__(16) unsigned char seen[kMostRows * kPitch];
  wait_for_previous_grid();
  launch_next_grid();
  u32 index = blockIdx.x;
  int key_tile = static_cast<int>(index % p.key_tiles);
  index /= p.key_tiles;
  int tile = static_cast<int>(index % p.mask_tiles);
  index /= p.mask_tiles;
  int head = static_cast<int>(index % p.mask_heads), batch = static_cast<int>(index / p.mask_heads);
  auto mask = static_cast<const unsigned char*>(p.mask) + batch * p.mask_stride[0] +
              head * p.mask_stride[1];
  int key = key_tile * kKeys + threadIdx.x % 8 * 16;
  for (int row = threadIdx.x / 8; row < p.tile_rows; row += TC_THREADS / 8) {
    int query = min(tile * p.tile_rows + row, p.lengths.seqlen_q - 1);
    const unsigned char* from = mask + query * p.mask_stride[2] + key * p.mask_stride[3];
    auto to = reinterpret_cast<u32*>(seen + row * kPitch + threadIdx.x % 8 * 16);
    if (p.mask_stride[3] == 1 && key + 16 <= p.lengths.seqlen_k &&
        reinterpret_cast<u64>(from) % 16 == 0) {
      uint4 bytes = __ldg(reinterpret_cast<const uint4*>(from));
      to[0] = bytes.x;
      to[1] = bytes.y;
      to[2] = bytes.z;
      to[3] = bytes.w;
      continue;
    }
#pragma unroll 1
    for (int word = 0; word < 4; ++word) {
      u32 bytes = 0;
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        int at = 4 * word + i;
        if (key + at < p.lengths.seqlen_k) bytes |= u32(from[at * p.mask_stride[3]]) << (8 * i);
      }
      to[word] = bytes;
    }
  }
  __syncthreads();
  int lane = threadIdx.x % 32, words = (p.tile_rows / 2 + 31) / 32;
  const unsigned char* own = seen + threadIdx.x / 32 * 16 + lane / 4 + lane % 4 * 2 * kPitch;
  unsigned* out =
      p.mask_words + (static_cast<tc_int64>(blockIdx.x) * TC_THREADS + threadIdx.x) * words;
  for (int word = 0; word < words; ++word) {
    int count = min(p.tile_rows / 2 - 32 * word, 32);
    u32 bits = 0;
    for (int i = 0; i < count; ++i) {
      int at = 32 * word + i;
      bool sees = own[(at / 4 * 8 + at % 2) * kPitch + (at / 2 % 2) * 8] != 0;
      bits |= static_cast<u32>(sees) << i;
    }
    out[word] = bits;
  }
}

}  // namespace torch_cubin::TC_KERNEL
/* torch_cubin kernels
{"virtual_arch": ["90a"],
 "kernels": [
  {"name": "sm90_backward_mask_attention", "archs": ["sm_90a"], "kind": "sm90_backward_mask",
   "dtype": "any", "math": "any", "layout": "any", "alignment": 1, "tile": [96, 128, 1], "stages": 1,
   "block": [256, 1, 1], "dynamic_shared": 0, "cost": {"k_tile": 0, "fixed": 0}}]}
*/
