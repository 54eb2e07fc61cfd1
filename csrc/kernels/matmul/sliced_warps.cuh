// What a warp does of a float32 tile whose warps share K out: it copies slices of 16 values of K of
// the tile's rows and columns through a ring of stages of its own that cp.async fills, and
// multiplies them; a thread owns 8x8 outputs, or 8x12. An operand that is contiguous along K lies
// so in shared memory, too: a thread reads four values of K of each of its rows or columns at once.
//
// Roles: all threads copy and multiply. Requires sm_80 only.
//
// NOTE: without `#pragma once`: the build compiles several kernels of a source together, and this
// file once in the namespace of each.

#include "common/mma.cuh"
#include "tile.cuh"

namespace torch_cubin::TC_KERNEL {

struct Config {
  static constexpr Layout kLayout = Layout::TC_LAYOUT;
  static constexpr int kTileM = TC_TILE_M, kTileN = TC_TILE_N, kTileK = TC_TILE_K;
  static constexpr int kStages = TC_STAGES, kThreads = TC_THREADS, kMinBlocks = TC_MIN_BLOCKS;
  static constexpr int kDynamicShared = TC_DYNAMIC_SHARED;
};

constexpr int kTileM = Config::kTileM, kTileN = Config::kTileN, kTileK = Config::kTileK;
constexpr int kStages = Config::kStages;
constexpr Layout kLayout = Config::kLayout;
static_assert(kLayout == Layout::nn || kLayout == Layout::nt, "A is contiguous along K");
constexpr bool kBAlongK = kLayout == Layout::nt;

constexpr int kSlices = Config::kThreads / 32;
constexpr int kSliceK = 16;
static_assert(kTileM == 64 && (kTileN == 32 || kTileN == 48), "what a warp's lanes have");
constexpr int kSumsN = kTileN / 4;  // of a thread

// One operand's slices: rows of 64 bytes along K, or, of B contiguous along N, of kExtent columns.
template <int kExtent, bool kAlongK>
struct Slices {
  static constexpr int kBytes = kExtent * kSliceK * 4;
  static constexpr int kRowBytes = kAlongK ? kSliceK * 4 : kExtent * 4;
  static constexpr int kVectors = kRowBytes % 128 == 64 && kRowBytes > 64 ? 3 : 1;  // of a lane
  static constexpr int kLanes = kRowBytes / 16 / kVectors;  // that copy a row
  static constexpr int kRows = 32 / kLanes;                 // that a warp copies at a time
  static constexpr int kCopies = kBytes / 512 / kVectors;

  const char* from;     // this lane's first vector of the next slice
  tc_int64 step, next;  // bytes: to the next rows; from behind a slice's rows to the next slice
  u32 to;               // the lane's place in a stage
  int row, left;        // its first row; what exists of the operand's own dim from there on

  TC_DEVICE Slices(const void* base, tc_int64 offset, tc_int64 stride_mn, tc_int64 stride_k,
                   tc_int64 rest, int warp, int of_warp = 1, int to_next = kSlices) {
    const int lane = threadIdx.x % 32, vector = lane % kLanes;
    row = lane / kLanes;
    const int own = static_cast<int>(min(rest, static_cast<tc_int64>(kExtent)));
    left = own - (kAlongK ? row : vector * 4);
    const tc_int64 row_bytes = (kAlongK ? stride_mn : stride_k) * 4;
    const tc_int64 slice_bytes = kSliceK * stride_k * 4;
    from = static_cast<const char*>(base) + offset * 4 + warp * of_warp * slice_bytes +
           row * row_bytes + vector * 16;
    step = kRows * row_bytes;
    next = to_next * slice_bytes - kCopies * step;
    to = kVectors == 1 ? lane * 16 : row * kRowBytes + vector * 16;
    if (kAlongK) to ^= turn_of(row);
  }

  // An XOR of a row's vectors, with which 8 rows' vectors of the same k lie in different banks.
  TC_DEVICE static int turn_of(int row) { return (row / 2 & 3) << 4; }

  // Copies the next slice, of which `k` values of K exist: with kWhole all, and all of its rows.
  template <bool kWhole>
  TC_DEVICE void copy(u32 stage, int k) {
#pragma unroll
    for (int c = 0; c < kCopies; ++c) {
#pragma unroll
      for (int v = 0; v < kVectors; ++v) {
        const u32 at = stage + to + c * (kRows * kRowBytes) + v * (kLanes * 16);
        const char* vector_from = from + v * (kLanes * 16);
        if constexpr (kWhole) {
          cp_async<16>(at, vector_from, true);
        } else {
          const int vector = threadIdx.x % 32 % kLanes;
          const int count = kAlongK ? (left > c * kRows ? k - vector * 4 : 0)
                                    : (row + c * kRows < k ? left - v * (kLanes * 4) : 0);
          cp_async_bytes(at, vector_from, 4 * max(min(count, 4), 0));
        }
      }
      from = advance(from, step);
    }
    from += next;
  }
};

using SlicesA = Slices<kTileM, true>;
using SlicesB = Slices<kTileN, kBAlongK>;
constexpr int kStageBytes = SlicesA::kBytes + SlicesB::kBytes;
constexpr int kRingsBytes = kSlices * kStages * kStageBytes;

// A thread's sums.
struct Sums {
  static constexpr int kSteps = kSliceK / 4;  // of 4 values of K
  struct Fragments {
    float a[8][4], b[kSumsN][4];  // by k
  };
  float sum[8][kSumsN] = {};
  int m, n;  // of 8 lanes along M, 4 along N
  u32 from_a, from_b;

  TC_DEVICE Sums() {
    // A quarter of a warp reads 4 places of A and 2 of B, and neighbours the same ones.
    const int lane = threadIdx.x % 32;
    m = lane / 2 % 8;
    n = lane % 2 + lane / 16 * 2;
    from_a = m * 64 + SlicesA::turn_of(m);
    from_b = SlicesA::kBytes + (kBAlongK ? n * 64 + SlicesB::turn_of(n) : n * 16);
  }

  TC_DEVICE int row(int i) const { return m + 8 * i; }
  TC_DEVICE int column(int j) const { return kBAlongK ? n + 4 * j : n * 4 + j % 4 + j / 4 * 16; }

  TC_DEVICE void read(Fragments& f, u32 stage, int step) const {
#pragma unroll
    for (int i = 0; i < 8; ++i) load_shared(f.a[i], stage + (from_a ^ (step << 4)) + i * 512);
    if constexpr (kBAlongK) {
#pragma unroll
      for (int j = 0; j < kSumsN; ++j) {  // column n + 4 has another turn than n
        load_shared(f.b[j], stage + (from_b ^ ((step ^ (j & 1) << 1) << 4)) + j * 256);
      }
    } else {
#pragma unroll
      for (int k = 0; k < 4; ++k) {
#pragma unroll
        for (int run = 0; run < kSumsN / 4; ++run) {
          float values[4];
          load_shared(values, stage + from_b + (step * 4 + k) * SlicesB::kRowBytes + run * 64);
#pragma unroll
          for (int j = 0; j < 4; ++j) f.b[4 * run + j][k] = values[j];
        }
      }
    }
  }

  // Row by row: few registers then hold A. Columns back and forth: fewer FMAs then read two
  // registers of one bank (benchmarks/NOTES.md).
  TC_DEVICE void multiply(const Fragments& f) {
#pragma unroll
    for (int i = 0; i < 8; ++i) {
#pragma unroll
      for (int k = 0; k < 4; ++k) {
#pragma unroll
        for (int jj = 0; jj < kSumsN; ++jj) {
          const int j = i % 2 == 0 ? jj : kSumsN - 1 - jj;
          sum[i][j] = fmaf(f.a[i][k], f.b[j][k], sum[i][j]);
        }
      }
    }
  }
};

// Stores columns `column` to `column` + 3 of row `row` of the tile, to C or as they are.
TC_DEVICE void store_vector(const MatmulParams& p, const TileCoordinates& t, int row, int column,
                            const float (&sum)[4]) {
  const tc_int64 columns = p.n - t.n0 - column;
  float value[4];
#pragma unroll
  for (int j = 0; j < 4; ++j) {
    const bool biased = p.bias != nullptr && p.partial == nullptr && j < columns;
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

}  // namespace torch_cubin::TC_KERNEL
