// A tile of a float32 product without tensor cores whose sums are chains of TC_CHAIN float32 FMAs,
// each from zero, added in their order: the bits of simt_tile.cuh's small tiles, whatever the tile.
//
// A thread has the totals of its chains in registers, too. Few outputs leave it few sums, and a
// multiprocessor few warps: it reads values of its rows and columns TC_AHEAD steps before it
// multiplies them, two or four of K at once if an operand is contiguous along K, through a ring of
// stages that cp.async fills. Such an operand lies so in shared memory, too; so does any operand of
// layout `any`, copied by single elements.
//
// Roles: all threads copy, multiply and store. Requires sm_80 only.
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
constexpr int kStages = Config::kStages, kThreads = Config::kThreads;
constexpr Layout kLayout = Config::kLayout;
constexpr bool kAny = kLayout == Layout::any;
static_assert(kLayout != Layout::tt, "not needed so far");
constexpr bool kAAlongK = kLayout != Layout::tn, kBAlongK = kAny || kLayout == Layout::nt;

// Values of K that a thread reads of a row or column at once, and steps before they are multiplied.
constexpr int kStepK = TC_STEP_K, kAhead = TC_AHEAD;
constexpr int kSteps = kTileK / kStepK, kBuffers = kAhead == 1 ? 2 : 4;
static_assert(kStepK == 1 ? !kAAlongK && !kBAlongK : kStepK == 2 || kStepK == 4);
constexpr int kChainTiles = TC_CHAIN / kTileK;
static_assert(kChainTiles * kTileK == TC_CHAIN);
constexpr int kRowBytes = kTileK * 4;
// Results have the bits of tiles whose k tile is this: zeros behind the end of K make +0 of -0.
constexpr int kPaddedK = 8;
static_assert(kSteps % kBuffers == 0 && kPaddedK % (2 * kStepK) == 0);

// A warp has 8 lanes along M and 4 along N.
constexpr int kPlacesM = 8 * TC_WARPS_M, kPlacesN = kThreads / kPlacesM;
static_assert(kThreads == 128);

// An XOR of the vectors of a row along K, with which eight rows' vectors of the same k lie in
// different banks. It is the same for rows that are eight apart.
constexpr int kVectorsAlongK = kTileK / 4;
TC_DEVICE constexpr int turn_of(int row) { return kVectorsAlongK >= 8 ? row & 7 : row / 2 & 3; }

// An operand's k tiles: rows along K, whose vectors are turned by that XOR, or rows for each k,
// contiguous along the own dim.
template <int kExtent, bool kAlongK>
struct Copies {
  static constexpr int kBytes = kExtent * kTileK * 4;
  // Lanes that copy a row, and the vectors of each.
  static constexpr int kLanes = kAlongK ? kTileK / 4 : kExtent % 32 == 0 ? 8 : 4;
  static constexpr int kVectors = kAlongK ? 1 : kExtent / 4 / kLanes;
  static constexpr int kRows = kThreads / kLanes;  // at a time
  static constexpr int kTurns = (kAlongK ? kExtent : kTileK) / kRows;
  static constexpr int kCount = kTurns * kVectors;
  static_assert(kVectors * kLanes * 4 == (kAlongK ? kTileK : kExtent));

  const char* from;     // this thread's first vector of the next k tile
  tc_int64 step, next;  // bytes: to the next rows; from behind a k tile's rows to the next k tile
  u32 to;
  int row, vector, left;  // left: what exists of the operand's own dim from the thread's place on

  TC_DEVICE Copies(const void* base, tc_int64 offset, tc_int64 stride_mn, tc_int64 stride_k,
                   tc_int64 rest) {
    const int thread = static_cast<int>(threadIdx.x);
    row = thread / kLanes;
    vector = thread % kLanes;
    const int own = static_cast<int>(min(rest, static_cast<tc_int64>(kExtent)));
    left = own - (kAlongK ? row : vector * 4);
    const tc_int64 row_bytes = (kAlongK ? stride_mn : stride_k) * 4;
    from = static_cast<const char*>(base) + offset * 4 + row * row_bytes + vector * 16;
    step = kRows * row_bytes;
    next = kTileK * stride_k * 4 - kTurns * step;
    to = row * (kAlongK ? kRowBytes : kExtent * 4) +
         (kAlongK ? (vector ^ turn_of(row)) << 4 : vector << 4);
  }

  // Bytes that exist of the next `count` elements, from `first` on.
  TC_DEVICE static int exist(int count, int first) { return 4 * max(min(count - first, 4), 0); }

  // Part `i` of kCount of the next k tile, which has `k` values of K; with kWhole all or none.
  template <bool kWhole>
  TC_DEVICE void copy(u32 stage, int i, int k) {
    const int turn = i / kVectors, v = i % kVectors;
    int bytes;
    if constexpr (kAlongK) {
      bytes = left > turn * kRows && k > 0 ? kWhole ? 16 : exist(k, vector * 4) : 0;
    } else {
      bytes = (kWhole ? k > 0 : row + turn * kRows < k) ? exist(left, v * (kLanes * 4)) : 0;
    }
    const u32 at =
        stage + to + turn * (kRows * (kAlongK ? kRowBytes : kExtent * 4)) + v * (kLanes * 16);
    cp_async_bytes(at, from + v * (kLanes * 16), bytes);
    if (v == kVectors - 1) from = advance(from, step);
    if (i == kCount - 1) from += next;
  }
};

// The same by single elements of any strides, to rows along K. Neighbours copy neighbours.
template <int kExtent>
struct Elements {
  static constexpr int kBytes = kExtent * kTileK * 4;
  static constexpr int kCount = kExtent * kTileK / kThreads;
  static constexpr int kRows = kThreads / kTileK;      // that threads copy at a time, along K
  static constexpr int kColumns = kThreads / kExtent;  // values of K, along the own dim
  static_assert(kRows == 2 && (kColumns == 2 || kColumns == 4 || kColumns == 8), "see copy()");

  const char* from;
  tc_int64 step, next;
  u32 to;
  int row, column, left;
  bool along_k;

  TC_DEVICE Elements(const void* base, tc_int64 offset, tc_int64 stride_mn, tc_int64 stride_k,
                     tc_int64 rest)
      : along_k(stride_k <= stride_mn) {
    const int thread = static_cast<int>(threadIdx.x);
    row = along_k ? thread / kTileK : thread % kExtent;
    column = along_k ? thread % kTileK : thread / kExtent;
    left = static_cast<int>(min(rest, static_cast<tc_int64>(kExtent))) - row;
    from = static_cast<const char*>(base) + (offset + row * stride_mn + column * stride_k) * 4;
    step = (along_k ? kRows * stride_mn : kColumns * stride_k) * 4;
    next = kTileK * stride_k * 4 - kCount * step;
    to = row * kRowBytes + ((column / 4 ^ turn_of(row)) << 4) + column % 4 * 4;
  }

  template <bool kWhole>
  TC_DEVICE void copy(u32 stage, int i, int k) {
    // What an element further adds to the place of the first: its bits are 0 there.
    const int rows = i * kRows, columns = i * kColumns;
    const u32 of_rows = rows * kRowBytes + (turn_of(rows) << 4);
    const u32 of_columns = (columns / 4 << 4) + columns % 4 * 4;
    const bool exists = along_k ? left > rows && (kWhole ? k > 0 : column < k)
                                : left > 0 && (kWhole ? k > 0 : column + columns < k);
    cp_async<4>(stage + (to ^ (along_k ? of_rows : of_columns)), from, exists);
    from = advance(from, step);
    if (i == kCount - 1) from += next;
  }
};

template <bool kOfAny>
struct Operands {
  using A = Copies<kTileM, kAAlongK>;
  using B = Copies<kTileN, kBAlongK>;
};
template <>
struct Operands<true> {
  using A = Elements<kTileM>;
  using B = Elements<kTileN>;
};
using CopiesA = Operands<kAny>::A;
using CopiesB = Operands<kAny>::B;
constexpr int kStageBytes = CopiesA::kBytes + CopiesB::kBytes;
static_assert(Config::kDynamicShared == kStages * kStageBytes, "the ring");

// A thread's rows or columns of kExtent, which kPlaces threads share: along K every kPlaces-th one,
// else runs of four and one of two.
template <int kExtent, bool kAlongK, int kPlaces>
struct Side {
  static constexpr int kSums = kExtent / kPlaces, kRuns = kSums / 4, kRest = kSums % 4;
  static_assert(kSums * kPlaces == kExtent && (kAlongK || kRest % 2 == 0));
  static_assert(!kAlongK || kPlaces % 8 == 0, "a thread's rows have one turn");
  int place;
  u32 from;  // in a stage

  TC_DEVICE Side(int place, u32 begin) : place(place) {
    from = begin + (kAlongK ? place * kRowBytes + (turn_of(place) << 4) : place * 16);
  }

  TC_DEVICE int index(int i) const {
    if constexpr (kAlongK) return place + kPlaces * i;
    return i / 4 < kRuns ? i / 4 * (kPlaces * 4) + place * 4 + i % 4
                         : kRuns * kPlaces * 4 + place * 2 + i % 4;
  }

  template <int kWidth>
  TC_DEVICE static void load(float (&f)[kSums][kStepK], u32 at, int first, int k) {
    float values[kWidth];
    load_shared(values, at);
#pragma unroll
    for (int i = 0; i < kWidth; ++i) f[first + i][k] = values[i];
  }

  TC_DEVICE void read(float (&f)[kSums][kStepK], u32 stage, int step) const {
    if constexpr (kAlongK) {
#pragma unroll
      for (int i = 0; i < kSums; ++i) {
        const int vector = step * kStepK / 4, within = step * kStepK % 4 * 4;
        load_shared(f[i], stage + (from ^ (vector << 4)) + within + i * (kPlaces * kRowBytes));
      }
    } else {
#pragma unroll
      for (int k = 0; k < kStepK; ++k) {
        const u32 at = stage + from + (step * kStepK + k) * (kExtent * 4);
#pragma unroll
        for (int run = 0; run < kRuns; ++run) load<4>(f, at + run * (kPlaces * 16), 4 * run, k);
        if constexpr (kRest > 0) load<2>(f, at + kRuns * kPlaces * 16 - place * 8, 4 * kRuns, k);
      }
    }
  }
};

using SideM = Side<kTileM, kAAlongK, kPlacesM>;
using SideN = Side<kTileN, kBAlongK, kPlacesN>;
constexpr int kSumsM = SideM::kSums, kSumsN = SideN::kSums;

// A thread's sums.
struct Sums {
  struct Fragments {
    float a[kSumsM][kStepK], b[kSumsN][kStepK];  // by k
  };
  float sum[kSumsM][kSumsN] = {}, total[kSumsM][kSumsN];
  SideM m;
  SideN n;

  // A quarter of a warp has 4 places of A and 2 of B, and neighbours have the same ones.
  TC_DEVICE Sums(int warp, int lane)
      : m(warp % TC_WARPS_M * 8 + lane / 2 % 8, 0),
        n(warp / TC_WARPS_M * 4 + lane % 2 + lane / 16 * 2, CopiesA::kBytes) {
    for_each([&](int i, int j) { total[i][j] = -0.0f; });  // of which no sum shows a trace
  }

  template <class Body>
  TC_DEVICE static void for_each(Body&& body) {
#pragma unroll
    for (int i = 0; i < kSumsM; ++i) {
#pragma unroll
      for (int j = 0; j < kSumsN; ++j) body(i, j);
    }
  }

  // Ends a chain.
  TC_DEVICE void move() {
    for_each([&](int i, int j) {
      total[i][j] += sum[i][j];
      sum[i][j] = 0;
    });
  }

  TC_DEVICE void read(Fragments& f, u32 stage, int step) const {
    m.read(f.a, stage, step);
    n.read(f.b, stage, step);
  }

  TC_DEVICE void multiply(const Fragments& f) {
#pragma unroll
    for (int k = 0; k < kStepK; ++k) {
      for_each([&](int i, int j) { sum[i][j] = fmaf(f.a[i][k], f.b[j][k], sum[i][j]); });
    }
  }
};

// Computes a tile of a product and stores it.
TC_DEVICE void compute_tile(const MatmulParams& p, const TileCoordinates& t) {
  extern __shared__ __align__(1024) unsigned char shared_memory[];
  CopiesA a(p.a, t.a, p.a_stride_m, p.a_stride_k, p.m - t.m0);
  CopiesB b(p.b, t.b, p.b_stride_n, p.b_stride_k, p.n - t.n0);
  const u32 ring = shared_address(shared_memory), end = ring + kStages * kStageBytes;

  const tc_int64 k = t.k_end - t.k_begin;
  const int whole = static_cast<int>(k / kTileK), rest = static_cast<int>(k % kTileK);
  int copied = 0;  // k tiles
  // Part `i` of the copies of the next k tile.
  constexpr int kCopies = CopiesA::kCount + CopiesB::kCount;
  auto copy = [&](auto is_whole, u32 stage, int i) {
    constexpr bool kWhole = decltype(is_whole)::value;
    const int here = copied < whole ? kTileK : copied == whole ? rest : 0;
    if (i < CopiesA::kCount) {
      a.template copy<kWhole>(stage, i, here);
    } else {
      b.template copy<kWhole>(stage + CopiesA::kBytes, i - CopiesA::kCount, here);
    }
  };
#pragma unroll 1
  for (int stage = 0; stage < kStages - 1; ++stage) {
#pragma unroll
    for (int i = 0; i < kCopies; ++i) copy(Constant<0>{}, ring + stage * kStageBytes, i);
    cp_async_commit();
    ++copied;
  }

  Sums math(threadIdx.x / 32, threadIdx.x % 32);
  Sums::Fragments f[kBuffers];
  u32 read = ring, write = ring + (kStages - 1) * kStageBytes;
  // Waits for the next k tile. All threads have read the fragments of the one before.
  auto next = [&](bool is_first) {
    if (!is_first) {
      cp_async_commit();
      ++copied;
      write = read;
      read += kStageBytes;
      if (read == end) read = ring;
    }
    cp_async_wait<kStages - 2>();
    __syncthreads();
  };
  int tile = 0;
  auto end_tile = [&] {
    ++tile;
    if (tile % kChainTiles == 0 && tile < t.k_tiles) math.move();
  };
  next(true);
#pragma unroll
  for (int step = 0; step < kAhead; ++step) math.read(f[step], read, step);
  // Copies behind each step of products.
  constexpr int kEach = (kCopies + kSteps - kAhead - 1) / (kSteps - kAhead);
  const int last = rest == 0 ? whole : whole - (kStages - 1);
#pragma unroll 1
  while (tile < last) {
    unrolled<kSteps>([&](auto constant) {
      constexpr int step = decltype(constant)::value, later = step + kAhead;
      if constexpr (later == kSteps) next(false);
      math.read(f[later % kBuffers], read, later % kSteps);
      if constexpr (later < kSteps) {
#pragma unroll
        for (int i = step * kEach; i < (step + 1) * kEach && i < kCopies; ++i) {
          copy(Constant<1>{}, write, i);
        }
      }
      math.multiply(f[step % kBuffers]);
    });
    end_tile();
  }
#pragma unroll 1
  while (tile < t.k_tiles) {
#pragma unroll
    for (int i = 0; i < kCopies; ++i) copy(Constant<0>{}, write, i);
    const int steps =
        tile < whole ? kSteps : (rest + kPaddedK - 1) / kPaddedK * (kPaddedK / kStepK);
    math.read(f[0], read, 0);
#pragma unroll 1
    for (int step = 0; step < steps; step += 2) {
      math.read(f[1], read, step + 1);
      math.multiply(f[0]);
      if (step + 2 < steps) math.read(f[0], read, step + 2);
      math.multiply(f[1]);
    }
    next(false);
    end_tile();
  }
  cp_async_wait<0>();
  math.move();

  const bool biased = p.bias != nullptr && p.partial == nullptr;
#pragma unroll
  for (int i = 0; i < kSumsM; ++i) {
    const int row = math.m.index(i);
    if (t.m0 + row >= p.m) continue;
    float* to = p.partial != nullptr ? static_cast<float*>(p.partial) + t.partial + row * p.n
                                     : static_cast<float*>(p.c) + t.c + row * p.c_stride_m;
#pragma unroll
    for (int j = 0; j < kSumsN; ++j) {
      const int column = math.n.index(j);
      if (t.n0 + column >= p.n) continue;
      to[column] = math.total[i][j] + (biased ? load_bias<DType::float32>(p, t.n0 + column) : 0.0f);
    }
  }
}

}  // namespace torch_cubin::TC_KERNEL
