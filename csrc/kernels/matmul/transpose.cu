// Transposes float32 matrices: for Hopper's wgmma, which requires K-major TF32 operands, rounded to
// TF32, since wgmma would truncate them; and for simt.cu, which is quickest where neither operand
// is K-major. Bound by memory bandwidth.
//
// Roles: all threads are alike. A block transposes one tile of 64 x 64 elements through shared
// memory: a thread reads four vectors of a row and writes four of a column. The padding after a row
// of `to`, up to a whole vector, is written too.
#include "common/ptx.cuh"
#include "transpose_params.h"

namespace torch_cubin::TC_KERNEL {

constexpr int kTile = TC_TILE_N;
constexpr int kVector = 4, kVectors = kTile / kVector;  // elements; per row of a tile
constexpr int kPitch = kTile + 1;                       // puts columns into different banks
constexpr int kStep = TC_THREADS / kVectors;            // rows that a block reads at a time
static_assert(TC_TILE_M == kTile && TC_TILE_K == kVector && kTile % kStep == 0,
              "the table is wrong");

TC_DEVICE float round_to_tf32(float x) {
  u32 bits;
  asm("cvt.rna.tf32.f32 %0, %1;" : "=r"(bits) : "f"(x));
  return __uint_as_float(bits);
}

TC_DEVICE void read_tile(const TransposeJob& job, const float* from, int row, int column,
                         bool rounds, float (&tile)[kTile][kPitch]) {
  int at = threadIdx.x % kVectors * kVector;
  float x[kTile / kStep][kVector];
#pragma unroll
  for (int i = 0; i < kTile / kStep; ++i) {
    int r = threadIdx.x / kVectors + i * kStep;
    auto source = from + (row + r) * job.row_stride + column + at;
    if (row + r < job.rows && column + at + kVector <= job.columns && job.vectors) {
      float4 four = *reinterpret_cast<const float4*>(source);
      x[i][0] = four.x, x[i][1] = four.y, x[i][2] = four.z, x[i][3] = four.w;
    } else {
#pragma unroll
      for (int j = 0; j < kVector; ++j) {
        x[i][j] = row + r < job.rows && column + at + j < job.columns ? source[j] : 0.0f;
      }
    }
  }
#pragma unroll
  for (int i = 0; i < kTile / kStep; ++i) {
#pragma unroll
    for (int j = 0; j < kVector; ++j) {
      const float value = rounds ? round_to_tf32(x[i][j]) : x[i][j];
      tile[at + j][threadIdx.x / kVectors + i * kStep] = value;
    }
  }
}

TC_DEVICE void write_tile(const TransposeJob& job, float* to, int row, int column,
                          const float (&tile)[kTile][kPitch]) {
  int at = threadIdx.x % kVectors * kVector;
  if (row + at >= job.rows) return;
#pragma unroll
  for (int i = 0; i < kTile / kStep; ++i) {
    int c = threadIdx.x / kVectors + i * kStep;
    if (column + c >= job.columns) break;
    const float* x = &tile[c][at];
    *reinterpret_cast<float4*>(to + (column + c) * job.to_row_stride + row + at) =
        make_float4(x[0], x[1], x[2], x[3]);
  }
}

extern "C" __global__ void __launch_bounds__(TC_THREADS)
    TC_KERNEL(const __grid_constant__ TransposeParams p) {
  __shared__ float tile[kTile][kPitch];
  wait_for_previous_kernel();
  const bool second = blockIdx.x >= p.first_blocks;
  const TransposeJob& job = p.jobs[second];
  u32 number = blockIdx.x - (second ? p.first_blocks : 0);
  u32 above = number / job.tiles_columns, column = number - above * job.tiles_columns;
  u32 batch = above / job.tiles_rows, row = above - batch * job.tiles_rows;
  auto from = static_cast<const float*>(job.from) + batch * job.batch_stride;
  auto to = static_cast<float*>(job.to) + batch * job.to_batch_stride;
  read_tile(job, from, row * kTile, column * kTile, p.rounds, tile);
  __syncthreads();
  write_tile(job, to, row * kTile, column * kTile, tile);
}

}  // namespace torch_cubin::TC_KERNEL

/* torch_cubin kernels
{"virtual_arch": ["90a"],
 "kernels": [
  {"name": "transpose_matmul_4_bytes", "kind": "transpose", "dtype": "float32", "math": "tf32",
   "alignment": 4, "tile": [64, 64, 4], "block": [256, 1, 1],
   "cost": {"share": 0.75, "fixed": 2000, "elements": 4000}}]}
*/
