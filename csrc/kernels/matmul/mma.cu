// Matmul with tensor cores on all architectures: float16, bfloat16, float32 as tf32, float64.
// mma_tile.cuh says how a block computes its tiles.
//
// The large 16-bit tiles are not built for sm_90a: beside the kernels of sm90.cu an H200 would use
// them in 2 of 23,279 launches (tools/kernel_use.py). Only products of four batch dims that do not
// merge, one more than a tensor map holds, would always use them; they use smaller tiles (206 to
// 273 TFLOP/s, 1.15 to 2.1 times the speed of torch.matmul, which copies; benchmarks/NOTES.md).
//
// float64: with fragments in turn (kRotates) a few registers are in local memory; 5% are gained.
#include "mma_tile.cuh"

namespace torch_cubin::TC_KERNEL {

extern "C" __global__ void __launch_bounds__(Config::kThreads, Config::kMinBlocks)
    TC_KERNEL(const __grid_constant__ MatmulParams p) {
  wait_for_previous_kernel();
  compute_tile(p, tile_index<Config::kTileM>(p), false);
}

}  // namespace torch_cubin::TC_KERNEL

/* torch_cubin kernels
{"defaults": {
  "name": "mma_matmul_{d.short}_{layout}_{t.tile.0}x{t.tile.1}x{t.tile.2}", "kind": "mma",
  "layout": "{layout}", "tile": "{t.tile}", "block": ["{t.threads}", 1, 1], "stages": "{t.stages}",
  "dynamic_shared": "{t.shared}",
  "defines": {"TC_DTYPE": "{d.dtype}", "TC_LAYOUT": "{layout}", "TC_WARP_M": "{t.wm}",
              "TC_WARP_N": "{t.wn}", "TC_FRAGMENTS": "{t.fragments}", "TC_MIN_BLOCKS": "{t.blocks}",
              "TC_PERSISTENT": 0}},
 "kernels": [
  {"kind": "persistent", "archs": "{t.archs}",
   "cost": {"k_tile": "{t.k_tile}", "fixed": "{t.fixed}"}, "defines": {"TC_PERSISTENT": 1},
   "for": {
    "d": "f16 bf16", "layout": ["nn", "nt", "tn", "tt"],
    "t": [
     ["tile", "wm", "wn", "fragments", "stages", "shared", "threads", "blocks", "k_tile", "fixed",
      "archs"],
     [[128, 256, 64], 64, 64, 2, 4, 196608, 256, 1, 1780, 7000, ["sm_100a"]],
     [[128, 256, 32], 64, 64, 2, 4,  98304, 256, 1,  900, 7000,
      ["sm_80", "sm_86", "sm_89", "sm_120a"]]]}},
  {"archs": ["sm_80", "sm_86", "sm_89", "sm_100a", "sm_120a"],
   "cost": {"k_tile": "{t.k_tile}", "fixed": "{t.fixed}"},
   "for": {
    "d": "f16 bf16", "layout": ["nn", "nt", "tn", "tt"],
    "t": [
     ["tile", "wm", "wn", "fragments", "stages", "shared", "threads", "blocks", "k_tile", "fixed"],
     [[128, 128, 64], 64, 64, 2, 3, 98304, 128, 2, 1880, 7000],
     [[64, 128, 64],  32, 64, 2, 4, 98304, 128, 2, 1160, 5500]]}},
  {"cost": {"k_tile": "{t.k_tile}", "fixed": "{t.fixed}", "lone": "{t.lone}"},
   "for": {
    "d": "f16 bf16", "layout": ["nn", "nt", "tn", "tt"],
    "t": [
     ["tile", "wm", "wn", "fragments", "stages", "shared", "threads", "blocks", "k_tile", "fixed",
      "lone"],
     [[64, 64, 64],  32, 32, 2, 4, 65536, 128, 3, 1500, 3500,  0.4],
     [[16, 128, 64], 16, 32, 2, 5, 92160, 128, 2, 1300, 2800, null]]}},
  {"alignment": 2, "cost": {"k_tile": "{t.k_tile}", "fixed": "{t.fixed}"},
   "for": {
    "d": "f16 bf16", "layout": ["any"],
    "t": [
     ["tile", "wm", "wn", "fragments", "stages", "shared", "threads", "blocks", "k_tile", "fixed"],
     [[128, 128, 32], 64, 32, 1, 2, 32768, 256, 1, 2300, 7000],
     [[64, 64, 64],   32, 16, 1, 2, 32768, 256, 1, 2100, 3700]]}},
  {"name": "mma_matmul_tf32_{layout}_{t.tile.0}x{t.tile.1}x{t.tile.2}",
   "cost": {"k_tile": "{t.k_tile}", "fixed": "{t.fixed}", "lone_fixed": "{t.lone_fixed}"},
   "for": {
    "d": "tf32", "layout": ["nn", "nt", "tn", "tt"],
    "t": [
     ["tile", "wm", "wn", "fragments", "stages", "shared", "threads", "blocks", "k_tile", "fixed",
      "lone_fixed"],
     [[128, 128, 32], 64, 64, 2, 3, 98304, 128, 2, 2000, 8000, null],
     [[64, 64, 32],   32, 32, 2, 4, 65536, 128, 3, 1200, 6000,  0.5]]}},
  {"name": "mma_matmul_tf32_{layout}_{t.tile.0}x{t.tile.1}x{t.tile.2}",
   "alignment": 4, "cost": {"k_tile": "{t.k_tile}", "fixed": "{t.fixed}"},
   "for": {
    "d": "tf32", "layout": ["any"],
    "t": [
     ["tile", "wm", "wn", "fragments", "stages", "shared", "threads", "blocks", "k_tile", "fixed",
      "archs"],
     [[128, 128, 16], 64, 32, 1, 4, 65536, 256, 1, 1350, 8000, null],
     [[64, 64, 32],   32, 16, 1, 4, 65536, 256, 2, 2600, 4300, ["sm_90a"]]]}},
  {"name": "mma_matmul_f64_{layout}_{t.tile.0}x{t.tile.1}x{t.tile.2}",
   "alignment": "{t.alignment}", "accepted_spill": {"sm_90a": 60, "sm_100a": 100, "sm_120a": 60},
   "cost": {"k_tile": "{t.k_tile}", "fixed": "{t.fixed}", "lone": "{t.lone}"},
   "for": {
    "d": "f64", "layout": ["nn", "nt", "tn", "tt"],
    "t": [
     ["tile", "wm", "wn", "fragments", "stages", "shared", "threads", "blocks", "alignment",
      "k_tile", "fixed", "lone"],
     [[64, 64, 16], 32, 32, 3, 3, 49152, 128, 3, 16, 1650, 6000, 0.72]]}},
  {"name": "mma_matmul_f64_{layout}_{t.tile.0}x{t.tile.1}x{t.tile.2}",
   "archs": ["sm_90a"], "accepted_spill": {"sm_90a": 250},
   "cost": {"k_tile": "{t.k_tile}", "fixed": "{t.fixed}"},
   "for": {
    "d": "f64", "layout": ["nn", "nt", "tn", "tt"],
    "t": [
     ["tile", "wm", "wn", "fragments", "stages", "shared", "threads", "blocks", "k_tile", "fixed"],
     [[128, 64, 16], 64, 32, 3, 4, 98304, 128, 2, 2150, 6000]]}},
  {"name": "mma_matmul_f64_{layout}_{t.tile.0}x{t.tile.1}x{t.tile.2}",
   "alignment": 8, "cost": {"k_tile": "{t.k_tile}", "fixed": "{t.fixed}"},
   "for": {
    "d": "f64", "layout": ["any"],
    "t": [
     ["tile", "wm", "wn", "fragments", "stages", "shared", "threads", "blocks", "k_tile", "fixed"],
     [[64, 64, 16], 32, 32, 1, 3, 49152, 128, 2, 1550, 6000]]}}]}
*/
