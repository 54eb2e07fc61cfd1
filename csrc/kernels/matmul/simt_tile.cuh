// A tile of a float32 product without tensor cores: every product and sum is a float32 FMA, no
// TF32.
//
// A thread owns 8x16 (8x8 in the small tile) outputs, in runs of 4. Both operands pass through
// shared memory as [k][m] and [k][n], in two stages, while the previous k tile is multiplied: by
// cp.async where both are contiguous along m and n, else held in registers (benchmarks/NOTES.md).
// Each step's numbers are read from shared memory during the step before. Instructions that are no
// FMA limit the speed (93% of the loop are), so that the loop over whole k tiles has no bounds
// tests. Layouts nn, nt, tn, tt read 16 bytes at a time; `any` reads single elements at any
// strides.
//
// Roles: all threads load, multiply and store. Requires sm_80 only. Layout `any` holds an address
// for each element that a thread reads: on sm_120a six of them are in local memory.
//
// NOTE: without `#pragma once`: the build compiles several kernels of a source together, and this
// file once in the namespace of each.

#include "common/ptx.cuh"
#include "tile.cuh"

namespace torch_cubin::TC_KERNEL {

struct Config {
  static constexpr Layout kLayout = Layout::TC_LAYOUT;
  static constexpr int kTileM = TC_TILE_M, kTileN = TC_TILE_N, kTileK = TC_TILE_K;
  static constexpr int kStages = TC_STAGES, kThreads = TC_THREADS, kMinBlocks = TC_MIN_BLOCKS;
  static constexpr int kDynamicShared = TC_DYNAMIC_SHARED;
};

constexpr int kTileM = Config::kTileM, kTileN = Config::kTileN, kTileK = Config::kTileK;
constexpr int kThreads = Config::kThreads;
constexpr Layout kLayout = Config::kLayout;

constexpr int kThreadM = 8, kThreadN = kTileM * kTileN / kThreads / kThreadM;
constexpr int kRunsM = kThreadM / 4, kRunsN = kThreadN / 4;
constexpr int kWarpsM = kTileM / (4 * kThreadM), kWarpsN = kTileN / (8 * kThreadN);
static_assert(kWarpsM * kWarpsN * 32 == kThreads, "a warp has 4 lanes along m, 8 along n");
static_assert(Config::kStages == 2, "two stages of static shared memory");

enum class Access { along_k, along_mn, elements };
constexpr bool kAny = kLayout == Layout::any;
constexpr Access kAccessA = kAny                                             ? Access::elements
                            : kLayout == Layout::nn || kLayout == Layout::nt ? Access::along_k
                                                                             : Access::along_mn;
constexpr Access kAccessB = kAny                                             ? Access::elements
                            : kLayout == Layout::nt || kLayout == Layout::tt ? Access::along_k
                                                                             : Access::along_mn;

constexpr bool kCopies = kAccessA == Access::along_mn && kAccessB == Access::along_mn;  // cp.async

// This thread's part of one operand's k tiles: chunks of 4 elements along k or along mn, the
// operand's other dimension, or single elements. Elements past the end of k are zero. Rows past the
// operand's end repeat its last row or vector; their outputs are never stored.
template <int kExtent, Access kAccess>
struct Operand {
  static constexpr bool kByK = kAccess != Access::along_mn;
  static constexpr int kWidth = kAccess == Access::elements ? 1 : 4;
  static constexpr int kChunks = kExtent * kTileK / kThreads / kWidth;
  static constexpr int kAlongK = kTileK / kWidth, kAlongMn = kExtent / kWidth;
  static_assert(kThreads % (kByK ? kAlongK : kAlongMn) == 0, "see place()");

  const float* from[kChunks];  // of the next k tile
  tc_int64 next;               // from one k tile to the next
  int columns;                 // of the first chunk's vector, that exist; more than 4 if all do
  float held[kCopies ? 1 : kChunks][kWidth];

  TC_DEVICE Operand(const void* base, tc_int64 offset, tc_int64 stride_mn, tc_int64 stride_k,
                    tc_int64 rest) {
    int mn, k;
    int last = static_cast<int>(min(rest, static_cast<tc_int64>(kExtent))) - 1;
#pragma unroll
    for (int chunk = 0; chunk < kChunks; ++chunk) {
      place(chunk, mn, k);
      mn = min(mn, kByK ? last : last / 4 * 4);
      from[chunk] = static_cast<const float*>(base) + offset +
                    mn * (kAccess == Access::along_mn ? 1 : stride_mn) +
                    k * (kAccess == Access::along_k ? 1 : stride_k);
    }
    columns = last + 1 - mn;
    next = kTileK * (kAccess == Access::along_k ? 1 : stride_k);
  }

  // With kByK, consecutive threads run along k, and all chunks of a thread have the same k; else
  // all have the same mn.
  TC_DEVICE static void place(int chunk, int& mn, int& k) {
    int index = threadIdx.x + chunk * kThreads;
    mn = kByK ? index / kAlongK : threadIdx.x % kAlongMn * kWidth;
    k = kByK ? threadIdx.x % kAlongK * kWidth : index / kAlongMn;
  }

  // An XOR of row k's columns that avoids bank conflicts of a warp's stores. It is a multiple of 4
  // below 32, so that runs of 4 columns stay contiguous and aligned.
  TC_DEVICE static constexpr int shift(int k) {
    return kAccess == Access::along_mn  ? 0
           : kAccess == Access::along_k ? k / 4 * (128 / kTileK)
                                        : k * (32 / kTileK);
  }

  // Whether no vector of whole k tiles straddles the operand's end.
  TC_DEVICE static bool ends_with_vector(tc_int64 rest) {
    return kByK || rest >= kExtent || rest % 4 == 0;
  }

  // Reads the next k tile, of which the first `rows` values of k exist: of kWhole all, and
  // ends_with_vector(). They go to `stage`, at the latest with store().
  template <bool kWhole>
  TC_DEVICE void fetch(float* stage, int rows) {
#pragma unroll
    for (int chunk = 0; chunk < kChunks; ++chunk) {
      int mn, k;
      place(chunk, mn, k);
      const float* at = from[chunk];
      const int count = kWhole ? kWidth : kByK ? rows - k : (k < rows ? columns : 0);
      if constexpr (kCopies) {
        const u32 to = shared_address(stage + k * kExtent + mn);
        if constexpr (kWhole) {
          cp_async<16>(to, at, true);
        } else {
          cp_async_bytes(to, at, 4 * max(min(count, 4), 0));
        }
      } else if constexpr (kAccess == Access::elements) {
        held[chunk][0] = count > 0 ? __ldg(at) : 0.0f;
      } else if (count >= 4) {
        const float4 value = __ldg(reinterpret_cast<const float4*>(at));
        held[chunk][0] = value.x;
        held[chunk][1] = value.y;
        held[chunk][2] = value.z;
        held[chunk][3] = value.w;
      } else {
#pragma unroll
        for (int j = 0; j < 4; ++j) held[chunk][j] = j < count ? __ldg(at + j) : 0.0f;
      }
      from[chunk] += next;
    }
  }

  TC_DEVICE void store(float* stage) const {
#pragma unroll
    for (int chunk = 0; chunk < kChunks; ++chunk) {
      int mn, k;
      place(chunk, mn, k);
      float* to = stage + k * kExtent + (mn ^ shift(k));
      if constexpr (kByK) {
#pragma unroll
        for (int j = 0; j < kWidth; ++j) to[j * kExtent] = held[chunk][j];
      } else {
        *reinterpret_cast<float4*>(to) =
            make_float4(held[chunk][0], held[chunk][1], held[chunk][2], held[chunk][3]);
      }
    }
  }

  // The thread's elements of row k: runs of 4, spread evenly over the tile.
  template <int kRuns>
  TC_DEVICE static void read(float (&out)[4 * kRuns], const float* stage, int first, int k) {
    const float* row = stage + k * kExtent + (first ^ shift(k));
#pragma unroll
    for (int run = 0; run < kRuns; ++run) {
      *reinterpret_cast<float4*>(&out[4 * run]) =
          *reinterpret_cast<const float4*>(row + run * (kExtent / kRuns));
    }
  }
};

using OperandA = Operand<kTileM, kAccessA>;
using OperandB = Operand<kTileN, kAccessB>;

// Stores columns `column` to `column` + 3 of row `row` of the tile.
TC_DEVICE void store_row(const MatmulParams& p, const TileCoordinates& t, int row, int column,
                         const float (&sum)[4]) {
  tc_int64 columns = p.n - t.n0 - column;
  float value[4];
#pragma unroll
  for (int j = 0; j < 4; ++j) {
    bool biased = p.bias != nullptr && p.partial == nullptr && j < columns;
    value[j] = sum[j] + (biased ? load_bias<DType::float32>(p, t.n0 + column + j) : 0.0f);
  }
  float* to = p.partial != nullptr ? static_cast<float*>(p.partial) + t.partial + row * p.n + column
                                   : static_cast<float*>(p.c) + t.c + row * p.c_stride_m + column;
  if (columns >= 4 && reinterpret_cast<u64>(to) % 16 == 0) {
    *reinterpret_cast<float4*>(to) = make_float4(value[0], value[1], value[2], value[3]);
  } else {
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      if (j < columns) to[j] = value[j];
    }
  }
}

// Small tiles serve products with few outputs and a long K, where cuBLAS splits K finely: one chain
// of thousands of additions had twice its error (16 x 6144 x 4096, H200). So a thread moves its
// sums to shared memory every TC_CHAIN terms. So do large tiles of batch_invariant(), in memory
// that Hopper has; others are not used for such shapes.
constexpr int kChainTiles = TC_CHAIN / kTileK;
enum class Totals { none, small, large };
constexpr Totals kTotals = kTileM == 64                 ? Totals::small
                           : Config::kDynamicShared > 0 ? Totals::large
                                                        : Totals::none;

template <Totals>
struct LongSum {
  TC_DEVICE void move(float (&)[kThreadM][kThreadN]) {}
  TC_DEVICE void finish(float (&)[kThreadM][kThreadN]) {}
};

template <>
struct LongSum<Totals::large> {
  static_assert(kTotals != Totals::large || Config::kDynamicShared == kTileM * kTileN * 4);
  bool used = false;

  // By single sums: vectors of them would tie the loop's accumulators to four registers each.
  template <class Body>
  TC_DEVICE static void for_each(Body&& body) {
    extern __shared__ __align__(1024) unsigned char shared_memory[];
    const u32 own = shared_address(shared_memory) + threadIdx.x * 4;
#pragma unroll
    for (int i = 0; i < kThreadM; ++i) {
#pragma unroll
      for (int j = 0; j < kThreadN; ++j) body(i, j, own + (i * kThreadN + j) * (kThreads * 4));
    }
  }

  TC_DEVICE void move(float (&sum)[kThreadM][kThreadN]) {
    if (used) finish(sum);
    for_each([&](int i, int j, u32 at) {
      store_shared(at, sum[i][j]);
      sum[i][j] = 0;
    });
    used = true;
  }

  TC_DEVICE void finish(float (&sum)[kThreadM][kThreadN]) {
    if (!used) return;
    for_each([&](int i, int j, u32 at) {
      u32 total;
      load_shared(total, at);
      sum[i][j] += __uint_as_float(total);
    });
  }
};

template <>
struct LongSum<Totals::small> {
  bool used = false;

  TC_DEVICE static float& slot(int i, int j) {  // private to the thread: needs no barrier
    __shared__ float totals[kThreadM * kThreadN][Config::kThreads];
    return totals[i * kThreadN + j][threadIdx.x];
  }

  TC_DEVICE void move(float (&sum)[kThreadM][kThreadN]) {
#pragma unroll
    for (int i = 0; i < kThreadM; ++i) {
#pragma unroll
      for (int j = 0; j < kThreadN; ++j) {
        slot(i, j) = used ? slot(i, j) + sum[i][j] : sum[i][j];
        sum[i][j] = 0;
      }
    }
    used = true;
  }

  TC_DEVICE void finish(float (&sum)[kThreadM][kThreadN]) {
    if (!used) return;
#pragma unroll
    for (int i = 0; i < kThreadM; ++i) {
#pragma unroll
      for (int j = 0; j < kThreadN; ++j) sum[i][j] += slot(i, j);
    }
  }
};

// Computes a tile of a product and stores it; with `is_wrong` all its outputs are NaN.
TC_DEVICE void compute_tile(const MatmulParams& p, const TileCoordinates& t, bool is_wrong) {
  __shared__ __align__(16) float shared_a[2][kTileK * kTileM];
  __shared__ __align__(16) float shared_b[2][kTileK * kTileN];

  OperandA a(p.a, t.a, p.a_stride_m, p.a_stride_k, p.m - t.m0);
  OperandB b(p.b, t.b, p.b_stride_n, p.b_stride_k, p.n - t.n0);

  // In each quarter of a warp, 2 lanes lie along m and 4 along n.
  int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  int first_m = warp % kWarpsM * 16 + (lane % 2 + lane / 16 * 2) * 4;
  int first_n = warp / kWarpsM * 32 + lane / 2 % 8 * 4;

  float sum[kThreadM][kThreadN] = {};
  LongSum<kTotals> long_sum;
  float row[2][kThreadM], column[2][kThreadN];  // of this step and the next one
  auto read = [&](int stage, int step) {
    OperandA::read<kRunsM>(row[step % 2], shared_a[stage], first_m, step);
    OperandB::read<kRunsN>(column[step % 2], shared_b[stage], first_n, step);
  };
  tc_int64 left = t.k_end - t.k_begin;  // behind the k tile that is multiplied
  auto fetch = [&](auto whole, int stage) {
    int rows = static_cast<int>(min(left, static_cast<tc_int64>(kTileK)));
    a.template fetch<decltype(whole)::value>(shared_a[stage], rows);
    b.template fetch<decltype(whole)::value>(shared_b[stage], rows);
    if constexpr (kCopies) cp_async_commit();
    left -= kTileK;
  };
  auto store = [&](int stage) {
    if constexpr (kCopies) {
      cp_async_wait<0>();
    } else {
      a.store(shared_a[stage]);
      b.store(shared_b[stage]);
    }
    __syncthreads();
    read(stage, 0);
  };
  if (t.k_tiles > 0) {
    fetch(Constant<0>{}, 0);
    store(0);
  }
  // Multiplies the k tile of a stage. kWhole: there is another one, and it is whole.
  int tile = 0;
  auto multiply = [&](auto whole, int stage) {
    bool more = decltype(whole)::value || tile + 1 < t.k_tiles;
    // Nobody reads the other stage: all threads had its last step before the last barrier.
    if (more) fetch(whole, 1 - stage);
#pragma unroll
    for (int step = 0; step < kTileK; ++step) {
      if (step + 1 < kTileK) {
        read(stage, step + 1);
      } else if (more) {
        store(1 - stage);
      }
#pragma unroll
      for (int i = 0; i < kThreadM; ++i) {
#pragma unroll
        for (int j = 0; j < kThreadN; ++j) {
          sum[i][j] = fmaf(row[step % 2][i], column[step % 2][j], sum[i][j]);
        }
      }
    }
    ++tile;
    // (Of large tiles, the loop over pairs does it, below.)
    const bool moves = kTotals == Totals::small || !decltype(whole)::value;
    if (moves && more && tile % kChainTiles == 0) long_sum.move(sum);
  };
  // Pairs of tiles, so that the addresses of the stages are constants.
  if (OperandA::ends_with_vector(p.m - t.m0) && OperandB::ends_with_vector(p.n - t.n0)) {
    int whole = static_cast<int>((t.k_end - t.k_begin) / kTileK) - 1;
    const auto pairs_before = [&](int end) {
#pragma unroll 1
      while (tile + 1 < end) {
        multiply(Constant<1>{}, 0);
        multiply(Constant<1>{}, 1);
      }
    };
    if constexpr (kTotals == Totals::large) {
#pragma unroll 1
      while (tile + 1 < whole) {
        pairs_before(min(tile + kChainTiles, whole));
        if (tile % kChainTiles == 0) long_sum.move(sum);
      }
    } else {
      pairs_before(whole);
    }
  }
#pragma unroll 1
  while (tile < t.k_tiles) multiply(Constant<0>{}, tile % 2);
  long_sum.finish(sum);

#pragma unroll
  for (int i = 0; i < kThreadM; ++i) {
    int row = first_m + i % 4 + i / 4 * (kTileM / kRunsM);
    if (t.m0 + row >= p.m) continue;
#pragma unroll
    for (int run = 0; run < kRunsN; ++run) {
      int column = first_n + run * (kTileN / kRunsN);
      if (t.n0 + column >= p.n) continue;
      float values[4];
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        values[j] = is_wrong ? __int_as_float(0x7fc00000) : sum[i][run * 4 + j];
      }
      store_row(p, t, row, column, values);
    }
  }
}

}  // namespace torch_cubin::TC_KERNEL
