// C = A B with tensor cores: A (M, K) and B (K, N) in fp16, C (M, N) in fp32, all row-major; sizes
// are multiples of 64. One warp a 16 x 16 tile of C, 16 warps a block.
//   nvcc -cubin -arch=sm_90a matmul.cu -o matmul.sm_90a.cubin
#include <mma.h>

using namespace nvcuda;

extern "C" __global__ void __launch_bounds__(512)
    matmul_fp16(const half* a, const half* b, float* c, int m, int n, int k) {
  const int warp = threadIdx.x / 32;
  const int row = blockIdx.y * 64 + warp / 4 * 16, column = blockIdx.x * 64 + warp % 4 * 16;
  if (row >= m || column >= n) return;
  wmma::fragment<wmma::accumulator, 16, 16, 16, float> sum;
  wmma::fill_fragment(sum, 0.0f);
  for (int i = 0; i < k; i += 16) {
    wmma::fragment<wmma::matrix_a, 16, 16, 16, half, wmma::row_major> left;
    wmma::fragment<wmma::matrix_b, 16, 16, 16, half, wmma::row_major> right;
    wmma::load_matrix_sync(left, a + row * k + i, k);
    wmma::load_matrix_sync(right, b + i * n + column, n);
    wmma::mma_sync(sum, left, right, sum);
  }
  wmma::store_matrix_sync(c + row * n + column, sum, n, wmma::mem_row_major);
}
