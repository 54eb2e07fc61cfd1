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
{"kernels": [
  {"name": "groups_mma_matmul_{d.short}_{d.tile.0}x{d.tile.1}x{d.tile.2}", "family": "grouped",
   "kind": "groups_mma", "alignment": "{d.alignment}", "tile": "{d.tile}",
   "block": ["{d.threads}", 1, 1], "stages": "{d.stages}", "dynamic_shared": "{d.shared}",
   "cost": {},
   "defines": {"TC_DTYPE": "{d.dtype}", "TC_LAYOUT": "any", "TC_WARP_M": "{d.wm}", "TC_WARP_N": 32,
               "TC_FRAGMENTS": 1, "TC_MIN_BLOCKS": "{d.blocks}", "TC_PERSISTENT": 0},
   "for": {
    "d": [
     ["short", "dtype", "math", "alignment", "tile", "wm", "stages", "shared", "threads", "blocks"],
     ["tf32", "float32", "tf32",    4, [128, 128, 16], 64, 4, 65536, 256, 1],
     ["f64",  "float64", "float64", 8, [64, 64, 16],   32, 3, 49152, 128, 2]]}}]}
*/
