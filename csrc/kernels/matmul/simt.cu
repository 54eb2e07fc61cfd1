// float32 matmul without tensor cores. simt_tile.cuh says how a block computes its tile.
#include "simt_tile.cuh"

namespace torch_cubin::TC_KERNEL {

extern "C" __global__ void __launch_bounds__(Config::kThreads, Config::kMinBlocks)
    TC_KERNEL(const __grid_constant__ MatmulParams p) {
  wait_for_previous_kernel();
  compute_tile(p, tile_coordinates<kTileM, kTileN, kTileK>(p), false);
}

}  // namespace torch_cubin::TC_KERNEL

/* torch_cubin kernels
{"virtual_arch": [80, 90],
 "kernels": [
  {"name": "simt_matmul_f32_{layout}_{t.name}",
   "kind": "simt", "dtype": "float32", "math": "float32", "layout": "{layout}",
   "alignment": "{alignment.{layout}}", "tile": "{t.tile}", "stages": 2,
   "block": ["{t.threads}", 1, 1], "dynamic_shared": 0, "cost": "{t.{cost.{layout}}}",
   "accepted_spill": "{t.spill}",
   "defines": {"TC_LAYOUT": "{layout}", "TC_MIN_BLOCKS": "{t.blocks}", "TC_CHAIN": 256},
   "for": {
    "layout": ["nn", "nt", "tn", "tt", "any"],
    "alignment": [{"nn": 16, "nt": 16, "tn": 16, "tt": 16, "any": 4}],
    "cost": [
     {"nn": "vectors", "nt": "vectors", "tn": "copies", "tt": "vectors", "any": "elements"}],
    "t": [
     {"name": "128x128x8", "tile": [128, 128, 8], "threads": 128, "blocks": 2,
      "spill": {"sm_120a": 48}, "vectors": {"k_tile": 2780, "fixed": 4000, "lone": 0.58},
      "copies": {"k_tile": 2530, "fixed": 4000, "lone": 0.58},
      "elements": {"k_tile": 2950, "fixed": 4000, "lone": 0.58}},
     {"name": "64x64x8", "tile": [64, 64, 8], "threads": 64, "blocks": 4,
      "spill": {}, "vectors": {"k_tile": 2075, "fixed": 3500, "lone": 0.85},
      "copies": {"k_tile": 2200, "fixed": 3500, "lone": 0.85},
      "elements": {"k_tile": 1750, "fixed": 3500, "lone": 0.85}}]}}]}
*/
