// Products of groups in float32 without tensor cores: a tile of simt_tile.cuh a block.
// grouped_params.h says what it computes.
#include "grouped_tile.cuh"
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
{"virtual_arch": [80, 90],
 "kernels": [
  {"name": "grouped_simt_matmul_f32_{t.name}", "family": "grouped",
   "kind": "grouped_simt", "dtype": "float32", "math": "float32", "layout": "any",
   "alignment": 4, "tile": "{t.tile}", "stages": 2, "block": ["{t.threads}", 1, 1],
   "dynamic_shared": 0, "cost": "{t.cost}",
   "defines": {"TC_LAYOUT": "any", "TC_MIN_BLOCKS": "{t.blocks}"},
   "for": {
    "t": [
     {"name": "128x128x8", "tile": [128, 128, 8], "threads": 128, "blocks": 2,
      "cost": {"k_tile": 2950, "fixed": 4000}},
     {"name": "64x64x8", "tile": [64, 64, 8], "threads": 64, "blocks": 4,
      "cost": {"k_tile": 1750, "fixed": 3500}}]}}]}
*/
