// Matmul with at most 4 rows of A, for B whose N is contiguous: C's rows are sums of B's rows, each
// scaled by an element of A (BLAS calls the step axpy). Bound by the bandwidth of reading B.
//
// A block owns kTileN outputs. A team of kLanes consecutive threads covers them, 128 bytes or more
// of each row of B; the block's kThreads / kLanes teams take one row each, with kUnroll rows per
// thread in flight. The teams' sums are then added in a fixed order. Alignment 16 reads B 16 bytes
// at a time; layout `any` reads single elements at any strides. A may have any strides.
//
// Roles: all threads load and multiply; after one barrier one thread per output stores it.
#include "dot_common.cuh"

namespace torch_cubin::TC_KERNEL {

struct Config {
  static constexpr DType kDType = DType::TC_DTYPE;
  static constexpr int kTileM = TC_TILE_M, kTileN = TC_TILE_N, kTileK = TC_TILE_K;
  static constexpr int kLanes = TC_LANES, kUnroll = TC_UNROLL, kAlignment = TC_ALIGNMENT;
  static constexpr int kStages = TC_STAGES, kThreads = TC_THREADS, kMinBlocks = TC_MIN_BLOCKS;
  static constexpr int kDynamicShared = TC_DYNAMIC_SHARED;
};

constexpr DType kDType = Config::kDType;
constexpr bool kVector = Config::kAlignment == 16;
constexpr int kLanes = Config::kLanes, kTeams = Config::kThreads / Config::kLanes;
constexpr int kTileN = Config::kTileN, kTileK = Config::kTileK;
constexpr int kColumns = kTileN / kLanes;  // per thread: contiguous, or kLanes apart
constexpr int kUnroll = Config::kUnroll;
constexpr int kMaxRows = Config::kTileM;

using B16 = Chunk<kDType>;
using Storage = B16::Storage;
using Accumulator = B16::Accumulator;

static_assert(kTileK == kTeams * kUnroll, "the table's tile is wrong");
static_assert(!kVector || kColumns == B16::kSize, "a thread reads 16 bytes");
static_assert(kMaxRows == 4 && Config::kStages == 1 && Config::kDynamicShared == 0,
              "the table is wrong");

// The elements of one row of B that a thread reads.
struct Row {
  B16 chunk;
  Storage element[kVector ? 1 : kColumns];

  TC_DEVICE void load(const Storage* from, tc_int64 stride, int count) {
    if constexpr (kVector) {
      chunk = count == kColumns ? B16::load_streaming(from) : B16::load_elements(from, 1, count);
    } else {
#pragma unroll
      for (int j = 0; j < kColumns; ++j) {
        element[j] = j < count ? __ldg(from + j * kLanes * stride) : Storage(0);
      }
    }
  }

  TC_DEVICE Accumulator operator[](int j) const {
    if constexpr (kVector) return chunk[j];
    return DTypeTraits<kDType>::load(element[j]);
  }
};

// Adds `rest` rows of k. Called by all threads of the block.
//
// With one row of A, its elements (the scales) are read from global memory as needed. More rows are
// staged in shared memory, [k][row], one k tile at a time (with 4 rows 1.05 to 1.15 times as fast;
// with 1 row the barrier costs up to a tenth).
template <int kRows>
TC_DEVICE void multiply_all(const MatmulParams& p, const Storage* a, const Storage* b, int count,
                            tc_int64 rest, Accumulator* shared,
                            Accumulator (&sum)[kMaxRows][kColumns]) {
  constexpr bool kStaged = kRows > 1;
  const int team = threadIdx.x / kLanes;
  for (int stage = 0; rest > 0; rest -= kTileK, stage ^= 1) {
    Row row_of_b[kUnroll];
    const bool whole = rest >= kTileK;
    if (whole && count == kColumns) {
#pragma unroll
      for (int u = 0; u < kUnroll; ++u) {
        row_of_b[u].load(b + u * kTeams * p.b_stride_k, p.b_stride_n, kColumns);
      }
    } else {
#pragma unroll
      for (int u = 0; u < kUnroll; ++u) {
        bool exists = team + u * kTeams < rest;
        row_of_b[u].load(b + u * kTeams * p.b_stride_k, p.b_stride_n, exists ? count : 0);
      }
    }
    // Two stages: a thread that rewrites a stage has passed the barrier after its last reads.
    Accumulator* scales = shared + stage * kTileK * kRows;
    Storage scale_bits[kUnroll];
    if constexpr (kStaged) {
#pragma unroll
      for (int index = threadIdx.x; index < kTileK * kRows; index += Config::kThreads) {
        int row = index / kTileK, k = index % kTileK;
        bool exists = row < p.m && k < rest;
        Storage bits = exists ? __ldg(a + row * p.a_stride_m + k * p.a_stride_k) : Storage(0);
        scales[k * kRows + row] = DTypeTraits<kDType>::load(bits);
      }
      __syncthreads();
    } else {
#pragma unroll
      for (int u = 0; u < kUnroll; ++u) {
        int k = team + u * kTeams;
        scale_bits[u] = whole || k < rest ? __ldg(a + k * p.a_stride_k) : Storage(0);
      }
    }
    // float32 and float64 sum each k tile separately. In one chain a team of the kernel that reads
    // elements adds 512 terms if a K of 4096 is not split, and float64 had 2.6 times cuBLAS's error
    // (H100).
    constexpr bool kApart = sizeof(Storage) >= sizeof(float);
    Accumulator tile[kApart ? kRows : 1][kColumns];
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) {
      Accumulator scale[kRows];
#pragma unroll
      for (int row = 0; row < kRows; ++row) {
        scale[row] = kStaged ? scales[(team + u * kTeams) * kRows + row]
                             : DTypeTraits<kDType>::load(scale_bits[u]);
      }
#pragma unroll
      for (int j = 0; j < kColumns; ++j) {
        Accumulator value = row_of_b[u][j];
#pragma unroll
        for (int row = 0; row < kRows; ++row) {
          if constexpr (kApart) {
            Accumulator before = u == 0 ? Accumulator(0) : tile[row][j];
            tile[row][j] = multiply_add(scale[row], value, before);
          } else {
            sum[row][j] = multiply_add(scale[row], value, sum[row][j]);
          }
        }
      }
    }
    if constexpr (kApart) {
#pragma unroll
      for (int j = 0; j < kColumns; ++j) {
#pragma unroll
        for (int row = 0; row < kRows; ++row) sum[row][j] += tile[row][j];
      }
    }
    a += kTileK * p.a_stride_k;
    b += kTileK * p.b_stride_k;
  }
  __syncthreads();  // the caller reuses `shared`
}

extern "C" __global__ void __launch_bounds__(Config::kThreads, Config::kMinBlocks)
    TC_KERNEL(const __grid_constant__ MatmulParams p) {
  wait_for_previous_kernel();
  constexpr int kWarps = Config::kThreads / 32;
  __shared__ union {
    Accumulator sums[kWarps][kMaxRows][kTileN];
    __align__(16) Accumulator scales[2][kTileK][kMaxRows];
  } shared;
  TileCoordinates t = tile_coordinates<kMaxRows, kTileN, kTileK>(p);
  int team = threadIdx.x / kLanes, lane = threadIdx.x % kLanes;

  int first = kVector ? lane * kColumns : lane;
  tc_int64 columns = p.n - t.n0 - first;  // from this thread's first column to the end
  if (!kVector) columns = columns > 0 ? (columns + kLanes - 1) / kLanes : 0;
  int count = static_cast<int>(max(min(columns, tc_int64(kColumns)), tc_int64(0)));
  tc_int64 rest = t.k_end - t.k_begin;
  auto a = static_cast<const Storage*>(p.a) + t.a;
  auto b = static_cast<const Storage*>(p.b) + t.b + first * p.b_stride_n + team * p.b_stride_k;

  Accumulator sum[kMaxRows][kColumns] = {};
  Accumulator* scales = &shared.scales[0][0][0];
  if (p.m == 1) {
    multiply_all<1>(p, a, b, count, rest, scales, sum);
  } else if (p.m == 2) {
    multiply_all<2>(p, a, b, count, rest, scales, sum);
  } else {
    multiply_all<kMaxRows>(p, a, b, count, rest, scales, sum);
  }

#pragma unroll
  for (int row = 0; row < kMaxRows; ++row) {
    if (row >= p.m) break;
#pragma unroll
    for (int j = 0; j < kColumns; ++j) {
#pragma unroll
      for (int distance = 16; distance >= kLanes; distance /= 2) {
        sum[row][j] += __shfl_xor_sync(0xffffffff, sum[row][j], distance);
      }
      if (threadIdx.x % 32 < kLanes) {
        shared.sums[threadIdx.x / 32][row][kVector ? first + j : first + j * kLanes] = sum[row][j];
      }
    }
  }
  __syncthreads();
  for (int index = threadIdx.x; index < kMaxRows * kTileN; index += Config::kThreads) {
    int row = index / kTileN, column = index % kTileN;
    if (row >= p.m) break;
    Accumulator total = 0;
#pragma unroll
    for (int warp = 0; warp < kWarps; ++warp) total += shared.sums[warp][row][column];
    store_sum<kDType>(p, t, row, column, total);
  }
}

}  // namespace torch_cubin::TC_KERNEL

/* torch_cubin kernels
{"defaults": {
  "kind": "dot", "math": "{d.dtype}", "layout": "nn", "block": [256, 1, 1],
  "defines": {"TC_DTYPE": "{d.dtype}", "TC_UNROLL": 8}},
 "kernels": [
  {"name": "axpy_matmul_{d.name}_nn_4x{d.n}", "tile": [4, "{d.n}", 256],
   "cost": {"k_tile": 1800, "fixed": 4500, "lone": 0.85},
   "defines": {"TC_ALIGNMENT": 16, "TC_LANES": 8, "TC_MIN_BLOCKS": 2},
   "for": {
    "d": [
     ["name", "dtype", "n"],
     ["f16",  "float16",  64],
     ["bf16", "bfloat16", 64],
     ["f32",  "float32",  32],
     ["f64",  "float64",  16]]}},
  {"name": "axpy_matmul_{d.name}_nn_elements_4x64", "alignment": "{d.bytes}", "tile": [4, 64, 64],
   "cost": {"k_tile": 1150, "fixed": 5000, "lone": 1},
   "defines": {"TC_ALIGNMENT": "{d.bytes}", "TC_LANES": 32, "TC_MIN_BLOCKS": "{d.blocks}"},
   "for": {
    "d": [
     ["name", "dtype", "bytes", "blocks"],
     ["f16",  "float16",  2, 3],
     ["bf16", "bfloat16", 2, 3],
     ["f32",  "float32",  4, 3],
     ["f64",  "float64",  8, 2]]}}]}
*/
