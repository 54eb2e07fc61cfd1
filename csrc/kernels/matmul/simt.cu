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
{"kernels": [
  {"name": "simt_matmul_f32_{layout}_{t.tile.0}x{t.tile.1}x{t.tile.2}", "kind": "simt",
   "dtype": "float32", "math": "float32", "layout": "{layout}", "alignment": "{alignment.{layout}}",
   "tile": "{t.tile}", "block": ["{t.threads}", 1, 1], "stages": 2, "accepted_spill": "{t.spill}",
   "chain": "{t.chain}",
   "cost": {"k_tile": "{t.{k_tile.{layout}}}", "fixed": "{t.fixed}", "lone": "{t.lone}"},
   "defines": {"TC_LAYOUT": "{layout}", "TC_MIN_BLOCKS": "{t.blocks}", "TC_CHAIN": 256},
   "for": {
    "layout": ["nn", "nt", "tn", "tt", "any"],
    "alignment": [{"nn": 16, "nt": 16, "tn": 16, "tt": 16, "any": 4}],
    "k_tile": [
     {"nn": "vectors", "nt": "vectors", "tn": "copies", "tt": "vectors", "any": "elements"}],
    "t": [
     ["tile", "threads", "blocks", "spill", "vectors", "copies", "elements", "fixed", "lone", "chain"],
     [[128, 128, 8], 128, 2, {"sm_120a": 48}, 2780, 2530, 2950, 4000, 0.58, null],
     [[64, 64, 8],    64, 4, {},              2075, 2200, 1750, 3500, 0.85, 256]]}},
  {"name": "simt_matmul_f32_{layout}_chains_128x128x8", "kind": "simt", "archs": ["sm_90a"],
   "dtype": "float32", "math": "float32", "layout": "{layout}", "alignment": 16,
   "tile": [128, 128, 8], "block": [128, 1, 1], "stages": 2, "dynamic_shared": 65536, "chain": 256,
   "invariant_alone": 1,
   "cost": {"k_tile": 2500, "fixed": 4500, "lone": 0.8},
   "defines": {"TC_LAYOUT": "{layout}", "TC_MIN_BLOCKS": 2, "TC_CHAIN": 256},
   "for": {"layout": ["tn"]}}]}
*/
