// A boolean mask as bits, in the order in which the kernels of the backward use them: a step's thread takes
// a bit for each of its scores with one load, where bytes would be as many loads. And what each step is to
// the mask, so that steps of which it hides nothing cost nothing, and those of which it hides all are left
// out.
//
// A block has the mask of one tile of queries and one block of keys; thread t writes what thread t of the
// warpgroups of keys reads: bit 4j + 2h + c is of query 8j + lane % 4 * 2 + c and key
// 16 (t / 32) + lane / 4 + 8h.
#include "common/ptx.cuh"
#include "sm90_backward_params.h"

namespace torch_cubin::TC_KERNEL {

constexpr int kMostRows = 96, kMostKeys = 128, kPitch = kMostKeys + 4;

// 16 bytes of a row from key `key` on; those past the end are 0.
TC_DEVICE uint4 load_bytes(const Sm90BackwardParams& p, const unsigned char* row, int key) {
  const unsigned char* from = row + key * p.mask_stride[3];
  if (p.mask_stride[3] == 1 && key + 16 <= p.lengths.seqlen_k &&
      reinterpret_cast<u64>(from) % 16 == 0) {
    return __ldg(reinterpret_cast<const uint4*>(from));
  }
  u32 words[4];
#pragma unroll
  for (int word = 0; word < 4; ++word) {
    words[word] = 0;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      int at = 4 * word + i;
      if (key + at < p.lengths.seqlen_k) {
        words[word] |= static_cast<u32>(__ldg(from + at * p.mask_stride[3])) << (8 * i);
      }
    }
  }
  return make_uint4(words[0], words[1], words[2], words[3]);
}

extern "C" __global__ void __launch_bounds__(TC_THREADS)
    TC_KERNEL(const __grid_constant__ Sm90BackwardParams p) {
  __shared__ __align__(16) unsigned char bytes[kMostRows * kPitch];
  wait_for_previous_kernel();
  u32 index = blockIdx.x;
  int key_tile = static_cast<int>(index % p.key_tiles);
  index /= p.key_tiles;
  int tile = static_cast<int>(index % p.bits.tiles), pair = static_cast<int>(index / p.bits.tiles);
  auto mask = static_cast<const unsigned char*>(p.mask) + pair / p.bits.heads * p.mask_stride[0] +
              pair % p.bits.heads * p.mask_stride[1];
  int key = key_tile * p.tile_keys, query = tile * p.tile_rows, pieces = p.tile_keys / 16;
  for (int i = threadIdx.x; i < p.tile_rows * pieces; i += TC_THREADS) {
    int row = i / pieces, column = i % pieces * 16;
    int from = min(query + row, p.lengths.seqlen_q - 1);
    uint4 found = load_bytes(p, mask + from * p.mask_stride[2], key + column);
    auto to = reinterpret_cast<u32*>(bytes + row * kPitch + column);
    to[0] = found.x;
    to[1] = found.y;
    to[2] = found.z;
    to[3] = found.w;
  }
  __syncthreads();
  // Without a row of its own for each query, what is seen by one is seen by all.
  int rows = p.bits.tiles == 1 ? p.tile_rows : min(p.lengths.seqlen_q - query, p.tile_rows);
  int thread = threadIdx.x, lane = thread % 32, words = (p.tile_rows / 2 + 31) / 32;
  int own_key = thread / 32 * 16 + lane / 4, own_row = lane % 4 * 2;
  bool hides = false, sees = false;
  if (thread < 2 * p.tile_keys) {
    unsigned* out =
        p.bits.words + (static_cast<tc_int64>(blockIdx.x) * (2 * p.tile_keys) + thread) * words;
    for (int word = 0; word < words; ++word) {
      int count = min(p.tile_rows / 2 - 32 * word, 32);
      u32 bits = 0;
      for (int i = 0; i < count; ++i) {
        int at = 32 * word + i, row = own_row + at / 4 * 8 + at % 2,
            column = own_key + at / 2 % 2 * 8;
        bool seen = bytes[row * kPitch + column] != 0;
        bits |= static_cast<u32>(seen) << i;
        if (row < rows && key + column < p.lengths.seqlen_k) {
          hides |= !seen;
          sees |= seen;
        }
      }
      out[word] = bits;
    }
  }
  bool first = __syncthreads_or(hides && thread < 128) != 0;
  bool second = __syncthreads_or(hides && thread >= 128) != 0, any = __syncthreads_or(sees) != 0;
  if (thread != 0) return;
  tc_int64 at = static_cast<tc_int64>(pair);
  p.bits.classes[(at * p.key_tiles + key_tile) * p.bits.tiles + tile] =
      any ? first * kStepHidesInFirst + second * kStepHidesInSecond : kStepHidesAll;
  unsigned char* seen = p.bits.seen + (at * p.bits.tiles + tile) * p.bits.seen_pitch;
  seen[key_tile] = any;
  // Words are read as far as the pitch.
  if (key_tile == p.key_tiles - 1) {
    for (int i = p.key_tiles; i < p.bits.seen_pitch; ++i) seen[i] = 0;
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
