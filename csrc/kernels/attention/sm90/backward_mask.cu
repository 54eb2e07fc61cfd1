// A boolean mask as bits, in the order in which the backward kernels use them: a thread loads one
// bit for each of its scores with one load, where bytes would need one load each. Also classifies
// each step, so that steps of which the mask hides nothing cost nothing, and those that it hides
// entirely are skipped.
//
// A block has kMaskChunk keys of one tile of queries: bytes become bits of rows, these, transposed
// 32 by 32, bits of keys, and each thread makes a word of two keys' bits. In a step, thread t's
// word is for thread t of the warpgroups of keys: bit 4j + 2h + c is query 8j + lane % 4 * 2 + c
// and key 16 (t / 32) + lane / 4 + 8h.
//
// The kernel mostly waits for memory: with a load for one key tile at a time, and a byte at a time
// from shared memory, the mask of 8 x 2,048 x 2,048 scores took 60 us on an H100.
#include "backward_params.h"
#include "mask_bits.cuh"

namespace torch_cubin::TC_KERNEL {

using namespace sm90;

constexpr int kMostRows = 96, kRowGroups = kMostRows / 32;
constexpr int kPieces = kMaskChunk / 16, kKeyGroups = kMaskChunk / 32;
constexpr int kWarps = TC_THREADS / 32;
constexpr int kTogether = 4;  // rows whose keys a warp requests at once

enum Found { kSees = 1, kHides = 2 };

// Bit i of lane j becomes bit j of lane i.
TC_DEVICE u32 transpose_32x32(u32 x) {
  u32 lane = threadIdx.x % 32;
#pragma unroll
  for (int i = 16; i > 0; i /= 2) {
    u32 low = i == 16  ? 0x0000ffffu
              : i == 8 ? 0x00ff00ffu
              : i == 4 ? 0x0f0f0f0fu
              : i == 2 ? 0x33333333u
                       : 0x55555555u;
    u32 other = __shfl_xor_sync(~0u, x, i);
    x = (lane & i) == 0 ? (x & low) | (other & low) << i : (x & ~low) | (other & ~low) >> i;
  }
  return x;
}

// From 32 queries' bits of two keys, those of two adjacent queries in each 8.
TC_DEVICE u32 bits_of_thread(u32 key, u32 next_key, int first) {
  u32 bits = (key >> first & 0x03030303u) | (next_key >> first & 0x03030303u) << 2;
  bits = (bits | bits >> 4) & 0x00ff00ffu;
  return (bits | bits >> 8) & 0xffffu;
}

extern "C" __global__ void __launch_bounds__(TC_THREADS, 6)
    TC_KERNEL(const __grid_constant__ Sm90BackwardParams p) {
  // Two more, so that adjacent rows' words are in different banks.
  __shared__ __align__(4) u16 row_bits[kMostRows][kPieces + 2];
  __shared__ u32 key_bits[kRowGroups][kMaskChunk];
  __shared__ u32 found[kMaskChunk / 64];  // of 64 keys: Found
  wait_for_previous_kernel();
  int chunks = (p.lengths.seqlen_k + kMaskChunk - 1) / kMaskChunk, chunk = blockIdx.x % chunks;
  u32 line = blockIdx.x / chunks;
  int tile = static_cast<int>(line % p.bits.tiles);
  int plane = static_cast<int>(line / p.bits.tiles);  // each head of a batch has a plane
  int first_row = tile * p.tile_rows, first_key = chunk * kMaskChunk;
  // Without a row for each query, a key visible to one is visible to all.
  bool alike = p.mask_stride[2] == 0;
  int rows = alike ? p.tile_rows : min(p.lengths.seqlen_q - first_row, p.tile_rows);
  if (threadIdx.x < kMaskChunk / 64) found[threadIdx.x] = 0;
  int warp = threadIdx.x / 32, lane = threadIdx.x % 32, own_key = first_key + 16 * lane;
  static_assert(kPieces == 32);  // a lane has one of each row
  read_rows<kWarps, kTogether>(
      static_cast<const unsigned char*>(p.mask) + plane / p.bits.heads * p.mask_stride[0] +
          plane % p.bits.heads * p.mask_stride[1] + first_row * p.mask_stride[2] +
          own_key * p.mask_stride[3],
      p.mask_stride[2], p.mask_stride[3], alike ? 1 : rows, p.lengths.seqlen_k - own_key, row_bits);
  __syncthreads();
  int row_groups = (p.tile_rows + 31) / 32;
  for (int i = warp; i < row_groups * kKeyGroups; i += kWarps) {
    int rows_of = i / kKeyGroups, keys_of = i % kKeyGroups, row = 32 * rows_of + lane;
    u32 bits = row < rows ? reinterpret_cast<const u32*>(row_bits[alike ? 0 : row])[keys_of] : 0;
    // The queries, and the keys, of these 32 that exist.
    u32 queries = __ballot_sync(~0u, row < rows);
    u32 keys = __ballot_sync(~0u, first_key + 32 * keys_of + lane < p.lengths.seqlen_k);
    bool sees = __any_sync(~0u, (bits & keys) != 0);
    bool hides = __any_sync(~0u, row < rows && (~bits & keys) != 0);
    if (sees && hides) {
      bits = transpose_32x32(bits);
    } else {
      bits = sees && (keys >> lane & 1) != 0 ? queries : 0;
    }
    key_bits[rows_of][32 * keys_of + lane] = bits;
    if (lane == 0) {
      atomicOr(&found[keys_of / 2], (sees ? kSees : 0u) | (hides ? kHides : 0u));
    }
  }
  __syncthreads();
  int words = (p.tile_rows / 2 + 31) / 32, threads = 2 * p.tile_keys;
  int shift = p.tile_keys > 64 ? 8 : 7;  // of a division by `threads`
  for (int i = threadIdx.x; i < 2 * kMaskChunk; i += TC_THREADS) {
    int of_chunk = i >> shift, thread = i & (threads - 1), key = of_chunk * p.tile_keys;
    int key_tile = first_key / p.tile_keys + of_chunk;
    if (key_tile >= p.key_tiles) break;
    u32 first = found[key / 64], second = p.tile_keys > 64 ? found[key / 64 + 1] : 0;
    bool any = ((first | second) & kSees) != 0;
    u32 what = (first & kHides) / kHides * kStepHidesInFirst +
               (second & kHides) / kHides * kStepHidesInSecond;
    if (thread == 0) {
      p.bits.steps[(static_cast<tc_int64>(plane) * p.key_tiles + key_tile) * p.bits.tiles + tile] =
          any ? what : static_cast<u32>(kStepHidesAll);
    }
    if (!any || what == kStepHidesNone) continue;
    key += thread / 32 * 16 + lane / 4;
    u32 word[(kRowGroups + 1) / 2] = {};
#pragma unroll
    for (int g = 0; g < kRowGroups; ++g) {
      if (g < row_groups) {
        u32 bits = bits_of_thread(key_bits[g][key], key_bits[g][key + 8], lane % 4 * 2);
        word[g / 2] |= bits << (16 * (g % 2));
      }
    }
    unsigned* out =
        p.bits.words +
        ((static_cast<tc_int64>(line) * p.key_tiles + key_tile) * threads + thread) * words;
    out[0] = word[0];
    if (words > 1) out[1] = word[1];
  }
}

}  // namespace torch_cubin::TC_KERNEL
/* torch_cubin kernels
{"virtual_arch": ["90a"],
 "kernels": [
  {"name": "sm90_backward_mask_attention", "kind": "mask", "dtype": "any", "math": "any",
   "alignment": 1, "takes": ["bool_mask"], "tile": [96, 128, 1], "block": [256, 1, 1],
   "cost": {"k_tile": 0, "fixed": 0}}]}
*/
