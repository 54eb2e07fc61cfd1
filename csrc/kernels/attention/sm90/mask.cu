// Before the `masked` and `general` kernels of sm90/forward.cu: a boolean mask as bits in the order
// of a lane's scores, and a class for each tile of queries and block of keys: all, none or some
// hidden.
//
// A block of threads converts a tile of queries by four blocks of keys: first 16 keys of a row at a
// time become bits in shared memory, then each thread makes the words of a row's block of keys from
// them. A tile's line of classes is followed by those of its warpgroups' 64 queries each.
#include "mask_bits.cuh"
#include "mask_classes.cuh"
#include "mask_params.h"

namespace torch_cubin::TC_KERNEL {

using namespace sm90;

constexpr int kMostPieces = kMaskTileBlocks * kMaskTileColumns / 16;  // of 16 keys, of a row
constexpr int kWarps = TC_THREADS / 32;
constexpr int kTogether = 8;  // rows whose keys a thread requests at once

extern "C" __global__ void __launch_bounds__(TC_THREADS, 4)
    TC_KERNEL(const __grid_constant__ Sm90MaskParams p) {
  // Two words more, so that threads of adjacent rows use different banks.
  __shared__ u16 bits[kMaskTileRows][kMostPieces + 2];
  // Two bits for each block of keys: some key is visible to 64 queries, some key is hidden.
  __shared__ u32 found[kMaskTileRows / 64];
  wait_for_previous_kernel();
  int chunk = blockIdx.x % p.chunks;
  tc_int64 line = blockIdx.x / p.chunks;
  int tile = static_cast<int>(line % p.tiles);
  tc_int64 plane = line / p.tiles, batch = plane / p.heads;  // each head of a batch has a plane
  int first_row = tile * p.tile_rows, rows = min(p.tile_rows, p.rows - first_row);
  int block_pieces = p.tile_columns / 16, pieces = kMaskTileBlocks * block_pieces;
  int first_column = chunk * kMaskTileBlocks * p.tile_columns;
  const unsigned char* from = p.mask + batch * p.stride[0] +
                              (plane - batch * p.heads) * p.stride[1] + first_row * p.stride[2];
  if (blockIdx.x == 0 && threadIdx.x == 0) *p.next = 0;
  if (threadIdx.x < kMaskTileRows / 64) found[threadIdx.x] = 0;
  static_assert(kMostPieces == 32);  // a lane has one of each row
  int piece = threadIdx.x % 32, column = first_column + 16 * piece;
  if (piece < pieces) {
    read_rows<kWarps, kTogether>(from + column * p.stride[3], p.stride[2], p.stride[3], rows,
                                 p.columns - column, bits);
  }
  __syncthreads();
  // A multiple of the warp's size, because all of its lanes vote.
  for (int i = threadIdx.x; i < p.tile_rows * kMaskTileBlocks; i += TC_THREADS) {
    int row = i / kMaskTileBlocks, of_chunk = i % kMaskTileBlocks;
    int block = chunk * kMaskTileBlocks + of_chunk;
    u32 classes = 0;
    if (row < rows && block < p.blocks) {
      u32 word[4] = {0, 0, 0, 0};
      int visible = 0, count = min(p.columns - block * p.tile_columns, p.tile_columns);
#pragma unroll 1
      for (int piece = 0; piece < block_pieces; piece += 2) {
        const u16* two = &bits[row][of_chunk * block_pieces + piece];
        u32 keys = two[0] | (piece + 1 < block_pieces ? static_cast<u32>(two[1]) << 16 : 0);
        visible += __popc(keys);
        // Two bits of each byte are adjacent: the product has them in its last byte.
#pragma unroll
        for (int t = 0; t < 4; ++t) {
          word[t] |= (keys >> 2 * t & 0x03030303u) * 0x01041040u >> 24 << 4 * piece;
        }
      }
      auto to =
          reinterpret_cast<uint4*>(p.words) + (plane * p.rows + first_row + row) * p.blocks + block;
      *to = make_uint4(word[0], word[1], word[2], word[3]);
      classes = ((visible != 0 ? 1u : 0u) | (visible != count ? 2u : 0u)) << 2 * of_chunk;
    }
    classes = __reduce_or_sync(~0u, classes);
    if (threadIdx.x % 32 == 0) atomicOr(&found[row / 64], classes);  // a warp's rows are 8
  }
  __syncthreads();
  // The tile's line, and those of its warpgroups. A row for all queries is every warpgroup's.
  int groups = p.tile_rows / 64, of_line = static_cast<int>(threadIdx.x);
  if (of_line > groups) return;
  u32 classes = found[p.rows == 1 ? 0 : max(of_line - 1, 0)];
  if (of_line == 0) {
    for (int g = 1; g < groups; ++g) classes |= found[g];
  }
  store_classes(p, line * (groups + 1) + of_line, chunk, classes);
}

}  // namespace torch_cubin::TC_KERNEL
/* torch_cubin kernels
{"virtual_arch": ["90a"],
 "kernels": [
  {"name": "sm90_mask_attention", "kind": "mask", "dtype": "any", "math": "any", "alignment": 1,
   "takes": ["bool_mask"], "tile": [128, 128, 1], "block": [256, 1, 1],
   "cost": {"k_tile": 0, "fixed": 0}}]}
*/
