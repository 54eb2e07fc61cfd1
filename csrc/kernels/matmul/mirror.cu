// Copies the lower triangle of square matrices to the upper one, transposed: after a product that
// another kernel computed in full. Bound by memory bandwidth.
//
// Roles: all threads are alike. A block copies one tile of 64 x 64 elements through shared memory;
// blocks of tiles above the diagonal have nothing to do.
#include "common/ptx.cuh"
#include "mirror_params.h"

namespace torch_cubin::TC_KERNEL {

constexpr int kTile = TC_TILE_N;
constexpr int kRows = TC_THREADS / kTile;  // that a block reads at a time
static_assert(TC_TILE_M == kTile && kTile % kRows == 0, "the table is wrong");

extern "C" __global__ void __launch_bounds__(TC_THREADS)
    TC_KERNEL(const __grid_constant__ MirrorParams p) {
  __shared__ TC_ELEMENT tile[kTile][kTile + 1];  // columns are in different banks
  wait_for_previous_kernel();
  const u32 above = blockIdx.x / p.tiles, column = (blockIdx.x - above * p.tiles) * kTile;
  const u32 matrix = above / p.tiles, row = (above - matrix * p.tiles) * kTile;
  if (column > row) return;
  const long long n = p.n;
  auto data = static_cast<TC_ELEMENT*>(p.data) + matrix * n * n;
  const int x = threadIdx.x % kTile, y = threadIdx.x / kTile;
#pragma unroll
  for (int i = 0; i < kTile; i += kRows) {
    const long long m = row + y + i;
    if (m < n && column + x < n) tile[y + i][x] = data[m * n + column + x];
  }
  __syncthreads();
#pragma unroll
  for (int i = 0; i < kTile; i += kRows) {
    const long long to = column + y + i, from = row + x;  // the row and column that are written
    if (to < from && from < n) data[to * n + from] = tile[x][y + i];
  }
}

}  // namespace torch_cubin::TC_KERNEL

/* torch_cubin kernels
{"kernels": [
  {"name": "mirror_matmul_{e.bytes}_bytes", "family": "mirror", "kind": "mirror",
   "dtype": "{e.dtype}", "math": "{e.dtype}", "alignment": "{e.bytes}",
   "tile": [64, 64, "{e.bytes}"], "block": [256, 1, 1], "cost": {"share": 0.15, "fixed": 5300},
   "defines": {"TC_ELEMENT": "{e.element}"},
   "for": {
    "e": [
     ["bytes", "dtype", "element"],
     [2, "float16", "u16"],
     [4, "float32", "u32"],
     [8, "float64", "u64"]]}}]}
*/
