// A tile of a float32 product of few tiles and a long K, without tensor cores: every product and
// sum is a float32 FMA. The warps of a block share K out, so that few tiles fill a multiprocessor
// without a second launch that adds parts, and wait for no barrier but their own.
//
// A k tile has a slice of 16 values of K for each warp. A warp computes the whole tile's sums over
// its slices, through a ring of stages of its own that cp.async fills; a thread owns 8x8 outputs.
// An operand that is contiguous along K lies so in shared memory, too: a thread reads four values
// of K of each of its rows or columns at once. At the end the warps' sums are added in their order.
// Two blocks of a cluster may share K out once more; they add up in their order.
//
// Roles: all threads copy, multiply and store. Requires sm_90 (clusters).
//
// NOTE: without `#pragma once`: the build compiles several kernels of a source together, and this
// file once in the namespace of each.

#include "common/hopper.cuh"
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
constexpr int kSliceK = kTileK / kSlices;
static_assert(kTileM == 64 && kTileN == 32 && kSliceK == 16, "what a warp's lanes have");

// One operand's slices: rows of 64 bytes along K, or, of B contiguous along N, of kExtent columns.
template <int kExtent, bool kAlongK>
struct Slices {
  static constexpr int kBytes = kExtent * kSliceK * 4;
  static constexpr int kRowBytes = kAlongK ? kSliceK * 4 : kExtent * 4;
  static constexpr int kLanes = kRowBytes / 16;  // that copy a row
  static constexpr int kRows = 32 / kLanes;      // that a warp copies at a time
  static constexpr int kCopies = kBytes / 512;

  const char* from;     // this lane's first vector of the next slice
  tc_int64 step, next;  // bytes: to the next rows; from behind a slice's rows to the next slice
  u32 to;               // the lane's place in a stage
  int row, left;        // its first row; what exists of the operand's own dim from there on

  TC_DEVICE Slices(const void* base, tc_int64 offset, tc_int64 stride_mn, tc_int64 stride_k,
                   tc_int64 rest, int warp) {
    const int lane = threadIdx.x % 32, vector = lane % kLanes;
    row = lane / kLanes;
    const int own = static_cast<int>(min(rest, static_cast<tc_int64>(kExtent)));
    left = own - (kAlongK ? row : vector * 4);
    const tc_int64 row_bytes = (kAlongK ? stride_mn : stride_k) * 4;
    const tc_int64 slice_bytes = kSliceK * stride_k * 4;
    from = static_cast<const char*>(base) + offset * 4 + warp * slice_bytes + row * row_bytes +
           vector * 16;
    step = kRows * row_bytes;
    next = kSlices * slice_bytes - kCopies * step;
    to = lane * 16;
    if (kAlongK) to ^= turn_of(row);
  }

  // An XOR of a row's vectors, with which 8 rows' vectors of the same k lie in different banks.
  TC_DEVICE static int turn_of(int row) { return (row / 2 & 3) << 4; }

  // Copies the next slice, of which `k` values of K exist: with kWhole all, and all of its rows.
  template <bool kWhole>
  TC_DEVICE void copy(u32 stage, int k) {
#pragma unroll
    for (int c = 0; c < kCopies; ++c) {
      const u32 at = stage + to + c * 512;
      if constexpr (kWhole) {
        cp_async<16>(at, from, true);
      } else {
        const int vector = threadIdx.x % 32 % kLanes;
        const int count =
            kAlongK ? (left > c * kRows ? k - vector * 4 : 0) : (row + c * kRows < k ? left : 0);
        cp_async_bytes(at, from, 4 * max(min(count, 4), 0));
      }
      from = advance(from, step);
    }
    from += next;
  }
};

using SlicesA = Slices<kTileM, true>;
using SlicesB = Slices<kTileN, kBAlongK>;
constexpr int kStageBytes = SlicesA::kBytes + SlicesB::kBytes;
static_assert(Config::kDynamicShared == kSlices * kStages * kStageBytes, "the rings");

// A thread's sums.
struct Sums {
  static constexpr int kSteps = kSliceK / 4;  // of 4 values of K
  struct Fragments {
    float a[8][4], b[8][4];  // by k
  };
  float sum[8][8] = {};
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
  TC_DEVICE int column(int j) const {
    return kBAlongK ? n + 4 * j : n * 4 + j % 4 + j / 4 * (kTileN / 2);
  }

  TC_DEVICE void read(Fragments& f, u32 stage, int step) const {
#pragma unroll
    for (int i = 0; i < 8; ++i) load_shared(f.a[i], stage + (from_a ^ (step << 4)) + i * 512);
    if constexpr (kBAlongK) {
#pragma unroll
      for (int j = 0; j < 8; ++j) {  // column n + 4 has another turn than n
        load_shared(f.b[j], stage + (from_b ^ ((step ^ (j & 1) << 1) << 4)) + j * 256);
      }
    } else {
#pragma unroll
      for (int k = 0; k < 4; ++k) {
#pragma unroll
        for (int run = 0; run < 2; ++run) {
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
        for (int jj = 0; jj < 8; ++jj) {
          const int j = i % 2 == 0 ? jj : 7 - jj;
          sum[i][j] = fmaf(f.a[i][k], f.b[j][k], sum[i][j]);
        }
      }
    }
  }
};

// Four contiguous floats of another block of the cluster (map_to_rank).
TC_DEVICE void load_remote(float (&out)[4], u32 remote) {
  asm volatile("ld.shared::cluster.v4.f32 {%0, %1, %2, %3}, [%4];"
               : "=f"(out[0]), "=f"(out[1]), "=f"(out[2]), "=f"(out[3])
               : "r"(remote)
               : "memory");
}

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

// The tile of this block and its share of K: p.splits blocks, a cluster, have the same tile.
TC_DEVICE TileCoordinates coordinates(const MatmulParams& p) {
  const u32 splits = static_cast<u32>(p.splits);
  auto t = tile_coordinates<kTileM, kTileN, kTileK>(p, tile_index<kTileM>(p, blockIdx.x / splits));
  const tc_int64 of_split = p.k_tiles_per_split * kTileK;
  t.k_begin = blockIdx.x % splits * of_split;
  t.k_end = min(t.k_begin + of_split, p.k);
  t.k_tiles = static_cast<int>((t.k_end - t.k_begin + kTileK - 1) / kTileK);
  t.a += t.k_begin * p.a_stride_k;
  t.b += t.k_begin * p.b_stride_k;
  return t;
}

// Computes a tile of a product and stores it.
TC_DEVICE void compute_tile(const MatmulParams& p) {
  extern __shared__ __align__(1024) unsigned char shared_memory[];
  const auto t = coordinates(p);
  const int warp = threadIdx.x / 32;
  SlicesA a(p.a, t.a, p.a_stride_m, p.a_stride_k, p.m - t.m0, warp);
  SlicesB b(p.b, t.b, p.b_stride_n, p.b_stride_k, p.n - t.n0, warp);
  const u32 ring = shared_address(shared_memory) + warp * (kStages * kStageBytes);

  const tc_int64 k = t.k_end - t.k_begin;
  const bool inside = p.m - t.m0 >= kTileM && p.n - t.n0 >= kTileN;
  // This warp's slices that are whole, and the values of K from its next one on.
  const int whole = inside ? static_cast<int>((k + kTileK - (warp + 1) * kSliceK) / kTileK) : 0;
  tc_int64 left = k - warp * kSliceK;
  auto copy = [&](auto is_whole, u32 stage) {
    constexpr bool kWhole = decltype(is_whole)::value;
    const int here =
        static_cast<int>(max(min(left, static_cast<tc_int64>(kSliceK)), static_cast<tc_int64>(0)));
    a.template copy<kWhole>(stage, here);
    b.template copy<kWhole>(stage + SlicesA::kBytes, here);
    cp_async_commit();
    left -= kTileK;
  };
#pragma unroll
  for (int s = 0; s < kStages - 1; ++s) copy(Constant<0>{}, ring + s * kStageBytes);

  Sums math;
  u32 read = ring, write = ring + (kStages - 1) * kStageBytes;
  auto multiply = [&](auto is_whole) {
    cp_async_wait<kStages - 2>();
    __syncwarp();  // all lanes' copies are there, and all have read the stage that is written
    Sums::Fragments f;
    math.read(f, read, 0);
    copy(is_whole, write);
    unrolled<Sums::kSteps>([&](auto constant) {
      constexpr int step = decltype(constant)::value;
      if constexpr (step > 0) math.read(f, read, step);
      math.multiply(f);
    });
    write = read;
    read += kStageBytes;
    if (read == ring + kStages * kStageBytes) read = ring;
  };
  int tile = 0;
#pragma unroll 1
  for (; tile + kStages - 1 < whole; ++tile) multiply(Constant<1>{});
#pragma unroll 1
  for (; tile < t.k_tiles; ++tile) multiply(Constant<0>{});

  cp_async_wait<0>();
  __syncthreads();
  // The warps' sums; pairs of columns are swapped, so that ptxas, which stores vectors of them, has
  // each in a register of the other bank than the value of B that it is multiplied with.
  constexpr int kPitch = kTileN + 4, kOfWarp = kTileM * kPitch;
  static_assert(kSlices * kOfWarp * 4 <= Config::kDynamicShared, "the warps' sums fit");
  auto sums = reinterpret_cast<float*>(shared_memory);
#pragma unroll
  for (int i = 0; i < 8; ++i) {
#pragma unroll
    for (int j = 0; j < 8; ++j) {
      sums[warp * kOfWarp + math.row(i) * kPitch + (math.column(j) ^ 1)] = math.sum[i][j];
    }
  }
  __syncthreads();
  const u32 shared = shared_address(shared_memory);
  constexpr int kOfRow = kTileN / 4, kVectors = kTileM * kOfRow;
  auto place = [&](int i) -> u32 { return shared + (i / kOfRow * kPitch + i % kOfRow * 4) * 4; };
  auto add_warps = [&](int i, float (&total)[4]) {
    load_shared(total, place(i));
#pragma unroll
    for (int w = 1; w < kSlices; ++w) {
      float more[4];
      load_shared(more, place(i) + w * (kOfWarp * 4));
#pragma unroll
      for (int j = 0; j < 4; ++j) total[j] += more[j];
    }
  };
  auto store = [&](int i, const float (&total)[4]) {
    const int row = i / kOfRow, column = i % kOfRow * 4;
    const float turned[4] = {total[1], total[0], total[3], total[2]};
    if (t.m0 + row < p.m && t.n0 + column < p.n) store_vector(p, t, row, column, turned);
  };
  const u32 splits = static_cast<u32>(p.splits);
  if (splits == 1) {
#pragma unroll 4
    for (int i = threadIdx.x; i < kVectors; i += Config::kThreads) {
      float total[4];
      add_warps(i, total);
      store(i, total);
    }
    return;
  }
#pragma unroll 4
  for (int i = threadIdx.x; i < kVectors; i += Config::kThreads) {
    float total[4];
    add_warps(i, total);
    store_shared(place(i), total);
  }
  sm90::cluster_sync_unaligned();
#pragma unroll 1
  for (int i = blockIdx.x % splits * Config::kThreads + threadIdx.x; i < kVectors;
       i += splits * Config::kThreads) {
    float total[4];
    load_remote(total, sm90::map_to_rank(place(i), 0));
#pragma unroll 1
    for (u32 split = 1; split < splits; ++split) {
      float more[4];
      load_remote(more, sm90::map_to_rank(place(i), split));
#pragma unroll
      for (int j = 0; j < 4; ++j) total[j] += more[j];
    }
    store(i, total);
  }
  sm90::cluster_meet();  // no block ends while another one reads its sums
}

}  // namespace torch_cubin::TC_KERNEL
