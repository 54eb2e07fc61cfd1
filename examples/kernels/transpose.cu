// out = x.t() of float32: in each block the Tensor Memory Accelerator fetches a tile of 32 x 32,
// which is written with rows and columns swapped. Elements outside x are fetched as zeros.
//
//   nvcc -cubin -arch=sm_90a transpose.cu -o transpose.sm_90a.cubin
#include <cstdint>

struct alignas(64) TensorMap {  // CUtensorMap, without <cuda.h>
  char bytes[128];
};

constexpr int kTile = 32;

extern "C" __global__ void transpose(const __grid_constant__ TensorMap x, float* out, int rows,
                                     int columns) {
  __shared__ alignas(128) float tile[kTile][kTile];
  __shared__ alignas(8) uint64_t arrived;
  // NOTE: the innermost coordinate must fall on 16 bytes, or the GPU raises an illegal instruction.
  const int column = blockIdx.x * kTile, row = blockIdx.y * kTile;
  const auto tile_at = static_cast<uint32_t>(__cvta_generic_to_shared(tile));
  const auto arrived_at = static_cast<uint32_t>(__cvta_generic_to_shared(&arrived));
  if (threadIdx.x == 0) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" ::"r"(arrived_at) : "memory");
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(arrived_at),
                 "r"(static_cast<int>(sizeof(tile)))
                 : "memory");
    asm volatile(
        "cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes "
        "[%0], [%1, {%2, %3}], [%4];" ::"r"(tile_at),
        "l"(&x), "r"(column), "r"(row), "r"(arrived_at)
        : "memory");
  }
  __syncthreads();  // the barrier exists
  asm volatile(
      "{\n"
      ".reg .pred done;\n"
      "AGAIN:\n"
      "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], 0;\n"
      "@!done bra AGAIN;\n"
      "}\n" ::"r"(arrived_at)
      : "memory");
  for (int i = threadIdx.x; i < kTile * kTile; i += blockDim.x) {
    const int across = i % kTile, down = i / kTile;  // of the output's tile
    if (row + across < rows && column + down < columns) {
      out[static_cast<int64_t>(column + down) * rows + row + across] = tile[across][down];
    }
  }
}
