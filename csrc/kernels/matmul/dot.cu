// Matmul with at most 4 rows of A, as dot products: for B whose K is contiguous, read 16 bytes at a
// time, and (layout `any`) for B of any strides, read by elements. Bound by the bandwidth of
// reading B.
//
// kLanes threads share a group of 4 outputs: each thread multiplies its chunk of every k tile of
// 4 columns of B with the same chunk of A's rows, so that 4 to 8 loads are in flight. The group's
// sums are then added in a fixed order. 128 lanes suit a long K, 8 lanes a short one. A may have
// any strides; rows that cannot be read 16 bytes at a time are staged in shared memory.
//
// Roles: all threads load and multiply; one thread per output stores it.
#include "dot_common.cuh"

namespace torch_cubin::TC_KERNEL {

struct Config {
  static constexpr DType kDType = DType::TC_DTYPE;
  static constexpr Layout kLayout = Layout::TC_LAYOUT;
  static constexpr int kTileM = TC_TILE_M, kTileN = TC_TILE_N, kTileK = TC_TILE_K;
  static constexpr int kLanes = TC_LANES;
  static constexpr int kStages = TC_STAGES, kThreads = TC_THREADS, kMinBlocks = TC_MIN_BLOCKS;
  static constexpr int kDynamicShared = TC_DYNAMIC_SHARED;
};

constexpr DType kDType = Config::kDType;
constexpr bool kVector = Config::kLayout != Layout::any;
constexpr int kLanes = Config::kLanes;
constexpr int kGroups = Config::kThreads / kLanes;
constexpr int kOutputs = 4;  // per group
constexpr int kMaxRows = Config::kTileM;

using B16 = Chunk<kDType>;
using Storage = B16::Storage;
using Accumulator = B16::Accumulator;
constexpr int kTileK = kLanes * B16::kSize;

constexpr bool kShort = kLanes < 32;  // a group's sums need no shared memory

static_assert(Config::kTileK == kTileK && Config::kTileN == kGroups * kOutputs,
              "the table's tile is wrong");
static_assert(kMaxRows == 4 && Config::kStages == 1 && Config::kDynamicShared == 0,
              "the table is wrong");

struct Shared {
  __align__(16) Storage a[kMaxRows * kTileK];
  Accumulator sums[Config::kThreads / 32][kMaxRows * kOutputs];
};

// The operands of one thread.
struct Sources {
  const Storage* a;            // row 0 of A at the split's first k
  const Storage* b[kOutputs];  // the group's columns of B at this thread's first k
  tc_int64 step;               // between a chunk's elements of B
  tc_int64 advance;            // from a k tile of B to the next
  tc_int64 rest;               // remaining k of this split
  int first;                   // this thread's first k in a tile
};

// The number of elements of this thread's chunk that exist, with `rest` elements of K left.
TC_DEVICE int chunk_count(tc_int64 rest, int first) {
  if (kVector) {
    tc_int64 count = rest - first;
    return static_cast<int>(max(min(count, static_cast<tc_int64>(B16::kSize)), tc_int64(0)));
  }
  tc_int64 count = (rest - first + kLanes - 1) / kLanes;  // read by elements, a stride of kLanes
  return rest <= first ? 0 : static_cast<int>(min(count, static_cast<tc_int64>(B16::kSize)));
}

TC_DEVICE B16 load_b(const Storage* from, tc_int64 step, int count) {
  if (kVector && count == B16::kSize) return B16::load_streaming(from);
  if (kShort && kVector && count == 0) return {};  // with a short K some lanes are idle
  return B16::load_elements(from, step, count);
}

TC_DEVICE B16 load_a(const Storage* from, int count) {
  if (count == B16::kSize) return B16::load(from);
  if (kShort && count == 0) return {};
  return B16::load_elements(from, 1, count);
}

// Copies a k tile of A's rows to shared memory, with zeros past the ends.
TC_DEVICE void stage_a(const MatmulParams& p, const Storage* a, tc_int64 rest, Storage* to) {
  bool by_row = p.a_stride_m < p.a_stride_k;  // consecutive threads take the denser dimension
  for (int index = threadIdx.x; index < kMaxRows * kTileK; index += Config::kThreads) {
    int row = by_row ? index % kMaxRows : index / kTileK;
    int k = by_row ? index / kMaxRows : index % kTileK;
    bool exists = row < p.m && k < rest;
    to[row * kTileK + k] = exists ? __ldg(a + row * p.a_stride_m + k * p.a_stride_k) : Storage(0);
  }
}

TC_DEVICE Accumulator staged_element(const Storage* a, int row, int first, int j) {
  return DTypeTraits<kDType>::load(a[row * kTileK + first + j * kLanes]);
}

// Accumulates kUnroll k tiles, for kRows rows of A and the first kUsed columns of the group.
template <int kRows, int kUsed, int kUnroll, bool kStaged>
TC_DEVICE void multiply(const MatmulParams& p, Sources& s, Shared& shared,
                        Accumulator (&sum)[kMaxRows][kOutputs], bool whole) {
  B16 b[kUnroll][kUsed];
#pragma unroll
  for (int u = 0; u < kUnroll; ++u) {
    int count = whole ? B16::kSize : chunk_count(s.rest, s.first);
#pragma unroll
    for (int i = 0; i < kUsed; ++i) b[u][i] = load_b(s.b[i] + u * s.advance, s.step, count);
  }
#pragma unroll
  for (int u = 0; u < kUnroll; ++u) {
    if constexpr (kStaged) {
      __syncthreads();
      stage_a(p, s.a, s.rest, shared.a);
      __syncthreads();
    }
#pragma unroll
    for (int row = 0; row < kRows; ++row) {
      Accumulator a[B16::kSize];
      if constexpr (kStaged && !kVector) {
#pragma unroll
        for (int j = 0; j < B16::kSize; ++j) a[j] = staged_element(shared.a, row, s.first, j);
      } else {
        // Three rows run as four: the last row repeats, and its sums are not stored.
        tc_int64 source_row = kRows < kMaxRows ? row : min(static_cast<tc_int64>(row), p.m - 1);
        const Storage* from = s.a + source_row * p.a_stride_m + s.first;
        B16 chunk = kStaged ? B16::load_shared(shared.a + row * kTileK + s.first)
                            : load_a(from, whole ? B16::kSize : chunk_count(s.rest, s.first));
#pragma unroll
        for (int j = 0; j < B16::kSize; ++j) a[j] = chunk[j];
      }
#pragma unroll
      for (int i = 0; i < kUsed; ++i) {
#pragma unroll
        for (int j = 0; j < B16::kSize; ++j) {
          sum[row][i] = multiply_add(a[j], b[u][i][j], sum[row][i]);
        }
      }
    }
    s.a += kTileK * p.a_stride_k;
    s.rest -= kTileK;
  }
#pragma unroll
  for (int i = 0; i < kOutputs; ++i) s.b[i] += kUnroll * s.advance;
}

template <int kRows, int kUsed, int kUnroll, bool kStaged>
TC_DEVICE void multiply_all(const MatmulParams& p, Sources s, Shared& shared,
                            Accumulator (&sum)[kMaxRows][kOutputs]) {
  while (s.rest >= kUnroll * kTileK) {
    multiply<kRows, kUsed, kUnroll, kStaged>(p, s, shared, sum, true);
  }
  while (s.rest > 0) {
    multiply<kRows, kUsed, 1, kStaged>(p, s, shared, sum, s.rest >= kTileK);
  }
}

// Adds the group's sums in a fixed order and stores them. `column`: the group's first column in the
// tile.
TC_DEVICE void store_group(const MatmulParams& p, const TileCoordinates& t, int column,
                           Accumulator (&sum)[kMaxRows][kOutputs], Shared& shared) {
  constexpr int kSums = kMaxRows * kOutputs, kHeld = kShort ? kSums / kLanes : 1;
  int lane = threadIdx.x % kLanes;
  Accumulator held[kHeld] = {};  // the sums that this thread stores: lane, lane + kLanes, ...
#pragma unroll
  for (int number = 0; number < kSums; ++number) {
    if (number / kOutputs >= p.m) break;
    Accumulator total = sum[number / kOutputs][number % kOutputs];
#pragma unroll
    for (int distance = (kShort ? kLanes : 32) / 2; distance > 0; distance /= 2) {
      total += __shfl_xor_sync(0xffffffff, total, distance);
    }
    if (kShort) {
      if (lane == number % kLanes) held[number / kLanes] = total;
    } else if (threadIdx.x % 32 == 0) {
      shared.sums[threadIdx.x / 32][number] = total;
    }
  }
  if (!kShort) {
    __syncthreads();
    if (lane >= kSums) return;
#pragma unroll
    for (int part = 0; part < kLanes / 32; ++part) {
      held[0] += shared.sums[threadIdx.x / kLanes * (kLanes / 32) + part][lane];
    }
  }
#pragma unroll
  for (int i = 0; i < kHeld; ++i) {
    int number = i * kLanes + lane;
    store_sum<kDType>(p, t, number / kOutputs, column + number % kOutputs, held[i]);
  }
}

extern "C" __global__ void __launch_bounds__(Config::kThreads, Config::kMinBlocks)
    TC_KERNEL(const __grid_constant__ MatmulParams p) {
  wait_for_previous_kernel();
  __shared__ Shared shared;
  TileCoordinates t = tile_coordinates<kMaxRows, Config::kTileN, kTileK>(p);
  int lane = threadIdx.x % kLanes;
  int first_column = threadIdx.x / kLanes * kOutputs;

  Sources s;
  s.first = kVector ? lane * B16::kSize : lane;
  s.step = (kVector ? 1 : kLanes) * p.b_stride_k;
  s.advance = kTileK * p.b_stride_k;
  s.rest = t.k_end - t.k_begin;
  s.a = static_cast<const Storage*>(p.a) + t.a;
#pragma unroll
  for (int i = 0; i < kOutputs; ++i) {
    // Columns past the end repeat the last one, which needs no branch; they are not stored.
    tc_int64 column = min(static_cast<tc_int64>(first_column + i), p.n - t.n0 - 1);
    s.b[i] =
        static_cast<const Storage*>(p.b) + t.b + column * p.b_stride_n + s.first * p.b_stride_k;
  }

  Accumulator sum[kMaxRows][kOutputs] = {};
  u64 a_bits = reinterpret_cast<u64>(s.a) | p.a_stride_m * sizeof(Storage) * (p.m > 1);
  bool a_by_chunks = p.a_stride_k == 1 && a_bits % 16 == 0;
  if constexpr (!kVector) {
    if (p.m == 1) {
      multiply_all<1, kOutputs, 1, true>(p, s, shared, sum);
    } else {
      multiply_all<kMaxRows, kOutputs, 1, true>(p, s, shared, sum);
    }
  } else if (!a_by_chunks) {
    multiply_all<kMaxRows, kOutputs, 1, true>(p, s, shared, sum);
  } else if (p.m == 1 && p.n == 1) {
    multiply_all<1, 1, 8, false>(p, s, shared, sum);
  } else if (p.m == 1) {
    multiply_all<1, kOutputs, 2, false>(p, s, shared, sum);
  } else if (p.m == 2) {
    multiply_all<2, kOutputs, 2, false>(p, s, shared, sum);
  } else {
    multiply_all<kMaxRows, kOutputs, 1, false>(p, s, shared, sum);
  }
  store_group(p, t, first_column, sum, shared);
}

}  // namespace torch_cubin::TC_KERNEL

/* torch_cubin kernels
{"kernels": [
  {"name": "dot_matmul_{d.name}_{v.layout}_4x{v.n}", "kind": "dot", "math": "{d.dtype}",
   "layout": "{v.layout}", "alignment": "{v.alignment}", "tile": [4, "{v.n}", "{d.k{v.lanes}}"],
   "block": [128, 1, 1], "cost": {"k_tile": "{v.k_tile}", "fixed": "{v.fixed}", "lone": "{v.lone}"},
   "defines": {"TC_DTYPE": "{d.dtype}", "TC_LAYOUT": "{v.layout}", "TC_LANES": "{v.lanes}",
               "TC_MIN_BLOCKS": "{v.blocks}"},
   "for": {
    "d": [
     ["name", "dtype", "bytes", "k128", "k8", "any"],
     ["f16",  "float16",  2, 1024, 64, 6000],
     ["bf16", "bfloat16", 2, 1024, 64, 6000],
     ["f32",  "float32",  4,  512, 32, 3000],
     ["f64",  "float64",  8,  256, 16, 1500]],
    "v": [
     ["layout", "lanes", "n", "alignment", "blocks", "k_tile", "fixed", "lone"],
     ["nt",  128,  4, 16,          5, 800,       2500, 0.6],
     ["nt",    8, 64, 16,          4, 760,       5500, 0.8],
     ["any", 128,  4, "{d.bytes}", 4, "{d.any}", 3000, 0.5]]}}]}
*/
