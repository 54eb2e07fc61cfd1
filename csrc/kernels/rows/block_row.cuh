// A row of 16-bit elements by vectors that the threads of a block hold in registers: kVectors each,
// of kTensors tensors, but for the last threads. By plain loads (access.cuh).
//
// A block has as many threads as the row needs, in whole warps.
#pragma once

#include "rows.cuh"

namespace torch_cubin {

// Blocks have at most kBlock threads. kSums: calls of sum().
template <int kDtype, int kBlock, int kVectors_, int kTensors, int kSums>
struct BlockRow {
  using Access = Vectors<kDtype>;
  using Raw = typename Access::Raw;
  static constexpr int kVectors = kVectors_;
  struct Shared {
    float of_warps[kSums][kBlock / 32];
  };
  Shared& shared;
  const int columns;
  Raw held[kTensors][kVectors];

  TC_DEVICE BlockRow(Shared& shared, int columns) : shared(shared), columns(columns) {}

  TC_DEVICE void load(int tensor, const void* data, tc_int64 stride) {
    const RowOf row(data, blockIdx.x * stride, kDtype);
    for_each([&](int i, int column) { Access::load_raw(held[tensor][i], row, column); });
  }
  TC_DEVICE void get(Raw& raw, int tensor, int i) const { raw = held[tensor][i]; }
  TC_DEVICE void put(const Raw& raw, int tensor, int i) { held[tensor][i] = raw; }

  // Calls body(i, column) for the thread's vectors. Those of its first half are there: the host
  // chooses as few warps as hold the row.
  template <class Body>
  TC_DEVICE void for_each(Body&& body) const {
#pragma unroll
    for (int i = 0; i < kVectors; ++i) {
      const int column = static_cast<int>(threadIdx.x + i * blockDim.x) * kRowVector;
      if (i < kVectors / 2 || column < columns) body(i, column);
    }
  }

  // The sum over the block's threads. Each call has a number of its own.
  TC_DEVICE float sum(float x, int call) const {
    x = sum_of_warp(x);
    const int lane = static_cast<int>(threadIdx.x) % 32;
    auto& of_warps = shared.of_warps[call];
    if (lane == 0) of_warps[threadIdx.x / 32] = x;
    __syncthreads();
    return sum_of_warp(lane < static_cast<int>(blockDim.x) / 32 ? of_warps[lane] : 0.0f);
  }

  TC_DEVICE RowOf result(void* tensor, int columns, int dtype) const {
    return RowOf(tensor, static_cast<tc_int64>(blockIdx.x) * columns, dtype);
  }
};

}  // namespace torch_cubin
