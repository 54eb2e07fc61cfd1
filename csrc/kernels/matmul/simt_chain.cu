// float32 products in chains of 256 terms, without tensor cores: of few rows, of few tiles, and of
// batch_invariant(). simt_chain_tile.cuh says how a block computes its tile.
#include "simt_chain_tile.cuh"

namespace torch_cubin::TC_KERNEL {

extern "C" __global__ void __launch_bounds__(Config::kThreads, Config::kMinBlocks)
    TC_KERNEL(const __grid_constant__ MatmulParams p) {
  wait_for_previous_kernel();
  compute_tile(p, tile_coordinates<kTileM, kTileN, kTileK>(p));
}

}  // namespace torch_cubin::TC_KERNEL

// `chain`: terms that a kernel adds from zero, and then to those before.
/* torch_cubin kernels
{"defaults": {
  "name": "simt_matmul_f32_{layout}_{t.tile.0}x{t.tile.1}x{t.tile.2}", "kind": "simt",
  "dtype": "float32", "math": "float32", "layout": "{layout}", "archs": ["sm_90a"],
  "tile": "{t.tile}", "block": [128, 1, 1], "stages": "{t.stages}",
  "dynamic_shared": "{t.shared}", "chain": 256,
  "cost": {"k_tile": "{t.k_tile}", "fixed": 4000, "lone": "{t.lone}"},
  "defines": {
   "TC_LAYOUT": "{layout}", "TC_MIN_BLOCKS": "{t.blocks}", "TC_WARPS_M": "{t.warps}",
   "TC_STEP_K": "{t.step}", "TC_AHEAD": "{t.ahead}", "TC_CHAIN": 256}},
 "kernels": [
  {"for": {
    "layout": ["nn", "nt"],
    "t": [
     ["tile", "stages", "shared", "blocks", "warps", "step", "k_tile", "lone", "ahead"],
     [[128, 64, 16], 6, 73728, 2, 2, 2, 2750, 0.6, 2],
     [[64, 48, 64],  3, 86016, 2, 2, 4, 4700, 0.515, 2],
     [[64, 32, 64],  4, 98304, 2, 2, 4, 3300, 0.53, 2],
     [[32, 32, 64],  6, 98304, 2, 1, 4, 2100, 0.56, 2],
     [[16, 32, 64],  8, 98304, 2, 1, 4, 1400, 0.58, 2]]}},
  {"for": {
    "layout": ["tn"],
    "t": [
     ["tile", "stages", "shared", "blocks", "warps", "step", "k_tile", "lone", "ahead"],
     [[128, 64, 16], 6, 73728, 2, 2, 1, 2770, 0.545, 2],
     [[96, 96, 16],  6, 73728, 2, 2, 1, 3020, 0.55, 1]]}},
  {"alignment": 4,
   "for": {
    "layout": ["any"],
    "t": [
     ["tile", "stages", "shared", "blocks", "warps", "step", "k_tile", "lone", "ahead"],
     [[16, 32, 64],  8, 98304, 2, 1, 4, 2450, 0.56, 2]]}}]}
*/
