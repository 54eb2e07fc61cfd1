// Products of groups with tensor cores, of float32 as tf32 and of float64: a tile of mma_tile.cuh a
// block. groups_params.h says what it computes.
#include "groups_tile.cuh"
#include "mma_tile.cuh"

namespace torch_cubin::TC_KERNEL {

extern "C" __global__ void __launch_bounds__(Config::kThreads, Config::kMinBlocks)
    TC_KERNEL(const __grid_constant__ GroupedMatmulParams p) {
  wait_for_previous_kernel();
  compute_tile_of_group<kDType, Config::kTileM, Config::kTileN>(
      p, [](const MatmulParams& product, const TileIndex& index, bool is_wrong) {
        compute_tile(product, index, is_wrong);
      });
}

}  // namespace torch_cubin::TC_KERNEL

/* torch_cubin kernels
{"virtual_arch": [80, 90],
 "kernels": [
  {"name": "groups_mma_matmul_{d.short}_{d.name}", "family": "grouped", "kind": "groups_mma",
   "dtype": "{d.dtype}", "math": "{d.math}", "layout": "any", "alignment": "{d.alignment}",
   "tile": "{d.tile}", "stages": "{d.stages}", "block": ["{d.threads}", 1, 1],
   "dynamic_shared": "{d.shared}", "cost": {},
   "defines": {"TC_DTYPE": "{d.dtype}", "TC_LAYOUT": "any", "TC_WARP_M": "{d.wm}",
               "TC_WARP_N": "{d.wn}", "TC_FRAGMENTS": 1, "TC_MIN_BLOCKS": "{d.blocks}",
               "TC_PERSISTENT": 0},
   "for": {
    "d": [
     {"short": "tf32", "dtype": "float32", "math": "tf32", "alignment": 4, "name": "128x128x16",
      "tile": [128, 128, 16], "wm": 64, "wn": 32, "stages": 4, "shared": 65536, "threads": 256,
      "blocks": 1},
     {"short": "f64", "dtype": "float64", "math": "float64", "alignment": 8, "name": "64x64x16",
      "tile": [64, 64, 16], "wm": 32, "wn": 32, "stages": 3, "shared": 49152, "threads": 128,
      "blocks": 2}]}}]}
*/
