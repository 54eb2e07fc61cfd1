// Copies rows of any alignment to rows of 16-byte chunks, zero-padded at the end, so that kernels
// can read them 16 bytes at a time and tensor maps can describe them. Bound by memory bandwidth: a
// thread makes each chunk from two aligned loads and a shift; the second load is the next thread's
// first and hits L1. On an H200 it moves 4.1 to 4.2 TB/s (read and written); PyTorch's copy of the
// same rows moves 1.8.
//
// Roles: all threads are alike; each makes kUnroll chunks, TC_THREADS apart.
#include "common/ptx.cuh"
#include "pad_params.h"

namespace torch_cubin::TC_KERNEL {

using Element = TC_ELEMENT;
constexpr int kSize = 16 / sizeof(Element);  // elements per chunk
constexpr int kUnroll = TC_TILE_N / TC_THREADS;
static_assert(TC_TILE_N == TC_THREADS * kUnroll && TC_TILE_K == kSize, "the table is wrong");

struct Pieces {
  uint4* to;  // null: nothing to do
  uint4 low, high;
  u32 shift;  // bytes of `low` before the chunk
};

TC_DEVICE Pieces load_pieces(const PadJob& job, u32 chunk) {
  Pieces pieces;
  pieces.to = nullptr;
  if (chunk >= job.total) return pieces;
  u32 row = chunk / job.chunks, column = (chunk - row * job.chunks) * kSize;
  u32 batch = row / job.rows;
  row -= batch * job.rows;
  auto from = static_cast<const Element*>(job.from) + batch * job.batch_stride +
              row * job.row_stride + column;
  pieces.to = static_cast<uint4*>(job.to) + batch * job.to_batch_stride + row * job.to_row_stride +
              column / kSize;
  auto aligned = reinterpret_cast<tc_int64>(from) & ~tc_int64(15);
  pieces.shift = static_cast<u32>(reinterpret_cast<tc_int64>(from) & 15);
  if (column + kSize <= job.columns && aligned >= job.low && aligned + 32 <= job.high) {
    auto source = reinterpret_cast<const uint4*>(aligned);
    pieces.low = __ldg(source);
    pieces.high = __ldg(source + 1);
  } else {
    // A row's end, and the operand's first and last chunks, whose vectors would be partly outside.
    alignas(16) Element element[kSize];
#pragma unroll
    for (int i = 0; i < kSize; ++i) element[i] = column + i < job.columns ? from[i] : Element(0);
    pieces.low = *reinterpret_cast<const uint4*>(element);
    pieces.shift = 0;
  }
  return pieces;
}

TC_DEVICE void store_shifted(const Pieces& pieces) {
  if (pieces.to == nullptr) return;
  u32 w[8] = {pieces.low.x,  pieces.low.y,  pieces.low.z,  pieces.low.w,
              pieces.high.x, pieces.high.y, pieces.high.z, pieces.high.w};
  if (pieces.shift & 8) {
#pragma unroll
    for (int i = 0; i < 6; ++i) w[i] = w[i + 2];
  }
  if (pieces.shift & 4) {
#pragma unroll
    for (int i = 0; i < 5; ++i) w[i] = w[i + 1];
  }
  if (sizeof(Element) == 2) {
    u32 bits = (pieces.shift & 2) * 8;
#pragma unroll
    for (int i = 0; i < 4; ++i) w[i] = __funnelshift_r(w[i], w[i + 1], bits);
  }
  *pieces.to = make_uint4(w[0], w[1], w[2], w[3]);
}

extern "C" __global__ void __launch_bounds__(TC_THREADS)
    TC_KERNEL(const __grid_constant__ PadParams p) {
  wait_for_previous_kernel();
  const bool second = blockIdx.x >= p.first_blocks;
  const PadJob& job = p.jobs[second];
  const u32 first =
      (blockIdx.x - (second ? p.first_blocks : 0)) * (TC_THREADS * kUnroll) + threadIdx.x;
  Pieces pieces[kUnroll];
#pragma unroll
  for (int i = 0; i < kUnroll; ++i) pieces[i] = load_pieces(job, first + i * TC_THREADS);
#pragma unroll
  for (int i = 0; i < kUnroll; ++i) store_shifted(pieces[i]);
}

}  // namespace torch_cubin::TC_KERNEL

/* torch_cubin kernels
{"kernels": [
  {"name": "pad_matmul_{e.bytes}_bytes", "kind": "pad", "dtype": "{e.dtype}", "math": "{e.dtype}",
   "alignment": "{e.bytes}", "tile": [1, 1024, "{e.chunk}"], "block": [256, 1, 1],
   "cost": {"share": 0.85, "fixed": 6000, "second": 2000}, "defines": {"TC_ELEMENT": "{e.element}"},
   "for": {
    "e": [
     ["bytes", "dtype", "element", "chunk"],
     [2, "float16", "u16", 8],
     [4, "float32", "u32", 4]]}}]}
*/
