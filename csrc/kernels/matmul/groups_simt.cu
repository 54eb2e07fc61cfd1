// Products of groups in float32 without tensor cores: a tile of simt_tile.cuh a block.
// groups_params.h says what it computes.
//
// One tile, because a row's bits depend on no other group: the sums of others have another order.
#include "groups_tile.cuh"
#include "simt_tile.cuh"

namespace torch_cubin::TC_KERNEL {

extern "C" __global__ void __launch_bounds__(Config::kThreads, Config::kMinBlocks)
    TC_KERNEL(const __grid_constant__ GroupedMatmulParams p) {
  wait_for_previous_kernel();
  compute_tile_of_group<DType::float32, kTileM, kTileN>(
      p, [](const MatmulParams& product, const TileIndex& index, bool is_wrong) {
        compute_tile(product, tile_coordinates<kTileM, kTileN, kTileK>(product, index), is_wrong);
      });
}

}  // namespace torch_cubin::TC_KERNEL

/* torch_cubin kernels
{"kernels": [
  {"name": "groups_simt_matmul_f32_64x64x8", "family": "grouped", "kind": "groups_simt",
   "dtype": "float32", "math": "float32", "alignment": 4, "tile": [64, 64, 8], "block": [64, 1, 1],
   "stages": 2, "cost": {}, "defines": {"TC_LAYOUT": "any", "TC_MIN_BLOCKS": 4, "TC_CHAIN": 32}}]}
*/
