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
{"virtual_arch": [80, 90],
 "defaults": {
  "kind": "mma", "layout": "{layout}", "tile": "{t.tile}", "stages": "{t.stages}",
  "block": ["{t.threads}", 1, 1], "dynamic_shared": "{t.shared}", "cost": "{t.cost}",
  "defines": {"TC_DTYPE": "{d.dtype}", "TC_LAYOUT": "{layout}", "TC_WARP_M": "{t.wm}",
              "TC_WARP_N": "{t.wn}", "TC_FRAGMENTS": "{t.fragments}", "TC_MIN_BLOCKS": "{t.blocks}",
              "TC_PERSISTENT": 0}},
 "kernels": [
  {"name": "mma_matmul_{d.short}_{layout}_{t.name}", "dtype": "{d.dtype}", "math": "{d.dtype}",
   "alignment": 16, "archs": "{t.archs}", "kind": "persistent",
   "defines": {"TC_DTYPE": "{d.dtype}", "TC_LAYOUT": "{layout}", "TC_WARP_M": "{t.wm}",
               "TC_WARP_N": "{t.wn}", "TC_FRAGMENTS": "{t.fragments}", "TC_MIN_BLOCKS": "{t.blocks}",
               "TC_PERSISTENT": 1},
   "for": {
    "d": [{"short": "f16", "dtype": "float16"}, {"short": "bf16", "dtype": "bfloat16"}],
    "layout": ["nn", "nt", "tn", "tt"],
    "t": [
     {"name": "128x256x64", "tile": [128, 256, 64], "wm": 64, "wn": 64, "fragments": 2, "stages": 4,
      "shared": 196608, "threads": 256, "blocks": 1,
      "archs": ["sm_100a"],
      "cost": {"k_tile": 1780, "fixed": 7000}},
     {"name": "128x256x32", "tile": [128, 256, 32], "wm": 64, "wn": 64, "fragments": 2, "stages": 4,
      "shared": 98304, "threads": 256, "blocks": 1,
      "archs": ["sm_80", "sm_86", "sm_89", "sm_120a"],
      "cost": {"k_tile": 900, "fixed": 7000}}]}},
  {"name": "mma_matmul_{d.short}_{layout}_{t.name}", "dtype": "{d.dtype}", "math": "{d.dtype}",
   "alignment": 16, "archs": ["sm_80", "sm_86", "sm_89", "sm_100a", "sm_120a"],
   "for": {
    "d": [{"short": "f16", "dtype": "float16"}, {"short": "bf16", "dtype": "bfloat16"}],
    "layout": ["nn", "nt", "tn", "tt"],
    "t": [
     {"name": "128x128x64", "tile": [128, 128, 64], "wm": 64, "wn": 64, "fragments": 2, "stages": 3,
      "shared": 98304, "threads": 128, "blocks": 2,
      "cost": {"k_tile": 1880, "fixed": 7000}},
     {"name": "64x128x64", "tile": [64, 128, 64], "wm": 32, "wn": 64, "fragments": 2, "stages": 4,
      "shared": 98304, "threads": 128, "blocks": 2,
      "cost": {"k_tile": 1160, "fixed": 5500}}]}},
  {"name": "mma_matmul_{d.short}_{layout}_{t.name}", "dtype": "{d.dtype}", "math": "{d.dtype}",
   "alignment": 16,
   "for": {
    "d": [{"short": "f16", "dtype": "float16"}, {"short": "bf16", "dtype": "bfloat16"}],
    "layout": ["nn", "nt", "tn", "tt"],
    "t": [
     {"name": "64x64x64", "tile": [64, 64, 64], "wm": 32, "wn": 32, "fragments": 2, "stages": 4,
      "shared": 65536, "threads": 128, "blocks": 3,
      "cost": {"k_tile": 1500, "fixed": 3500, "lone": 0.4}},
     {"name": "16x128x64", "tile": [16, 128, 64], "wm": 16, "wn": 32, "fragments": 2, "stages": 5,
      "shared": 92160, "threads": 128, "blocks": 2,
      "cost": {"k_tile": 1300, "fixed": 2800}}]}},
  {"name": "mma_matmul_{d.short}_{layout}_{t.name}", "dtype": "{d.dtype}", "math": "{d.dtype}",
   "alignment": 2,
   "for": {
    "d": [{"short": "f16", "dtype": "float16"}, {"short": "bf16", "dtype": "bfloat16"}],
    "layout": ["any"],
    "t": [
     {"name": "128x128x32", "tile": [128, 128, 32], "wm": 64, "wn": 32, "fragments": 1, "stages": 2,
      "shared": 32768, "threads": 256, "blocks": 1,
      "cost": {"k_tile": 2300, "fixed": 7000}},
     {"name": "64x64x64", "tile": [64, 64, 64], "wm": 32, "wn": 16, "fragments": 1, "stages": 2,
      "shared": 32768, "threads": 256, "blocks": 1,
      "cost": {"k_tile": 2100, "fixed": 3700}}]}},
  {"name": "mma_matmul_tf32_{layout}_{t.name}", "dtype": "float32", "math": "tf32", "alignment": 16,
   "for": {
    "d": [{"dtype": "float32"}],
    "layout": ["nn", "nt", "tn", "tt"],
    "t": [
     {"name": "128x128x32", "tile": [128, 128, 32], "wm": 64, "wn": 64, "fragments": 2, "stages": 3,
      "shared": 98304, "threads": 128, "blocks": 2,
      "cost": {"k_tile": 2000, "fixed": 8000}},
     {"name": "64x64x32", "tile": [64, 64, 32], "wm": 32, "wn": 32, "fragments": 2, "stages": 4,
      "shared": 65536, "threads": 128, "blocks": 3,
      "cost": {"k_tile": 1200, "fixed": 6000, "lone_fixed": 0.5}}]}},
  {"name": "mma_matmul_tf32_{layout}_{t.name}", "dtype": "float32", "math": "tf32", "alignment": 4,
   "for": {
    "d": [{"dtype": "float32"}],
    "layout": ["any"],
    "t": [
     {"name": "128x128x16", "tile": [128, 128, 16], "wm": 64, "wn": 32, "fragments": 1, "stages": 4,
      "shared": 65536, "threads": 256, "blocks": 1,
      "cost": {"k_tile": 1350, "fixed": 8000}},
     {"name": "64x64x32", "tile": [64, 64, 32], "wm": 32, "wn": 16, "fragments": 1, "stages": 4,
      "shared": 65536, "threads": 256, "blocks": 2, "archs": ["sm_90a"],
      "cost": {"k_tile": 2600, "fixed": 4300}}]}},
  {"name": "mma_matmul_f64_{layout}_{t.name}", "dtype": "float64", "math": "float64",
   "alignment": "{t.alignment}",
   "accepted_spill": {"sm_90a": 60, "sm_100a": 100, "sm_120a": 60},
   "for": {
    "d": [{"dtype": "float64"}],
    "layout": ["nn", "nt", "tn", "tt"],
    "t": [
     {"name": "64x64x16", "tile": [64, 64, 16], "wm": 32, "wn": 32, "fragments": 3, "stages": 3,
      "shared": 49152, "threads": 128, "blocks": 3,
      "alignment": 16, "cost": {"k_tile": 1650, "fixed": 6000, "lone": 0.72}}]}},
  {"name": "mma_matmul_f64_{layout}_{t.name}", "dtype": "{d.dtype}", "math": "{d.dtype}",
   "alignment": 16, "archs": ["sm_90a"], "accepted_spill": {"sm_90a": 250},
   "for": {
    "d": [{"dtype": "float64"}],
    "layout": ["nn", "nt", "tn", "tt"],
    "t": [
     {"name": "128x64x16", "tile": [128, 64, 16], "wm": 64, "wn": 32, "fragments": 3, "stages": 4,
      "shared": 98304, "threads": 128, "blocks": 2,
      "cost": {"k_tile": 2150, "fixed": 6000}}]}},
  {"name": "mma_matmul_f64_{layout}_{t.name}", "dtype": "float64", "math": "float64", "alignment": 8,
   "for": {
    "d": [{"dtype": "float64"}],
    "layout": ["any"],
    "t": [
     {"name": "64x64x16", "tile": [64, 64, 16], "wm": 32, "wn": 32, "fragments": 1, "stages": 3,
      "shared": 49152, "threads": 128, "blocks": 2,
      "cost": {"k_tile": 1550, "fixed": 6000}}]}}]}
*/
