// Matrix product on tensor cores with the instructions of sm_80 (cp.async, ldmatrix, mma.sync), for
// all architectures from one source: float16, bfloat16, float32 as tf32, float64.
//
// A block computes kTileM x kTileN of C, a warp kWarpM x kWarpN of that. Tiles of A and B pass
// through a ring of kStages stages in shared memory: all threads issue the copies of tile
// k + kStages - 1 while they multiply tile k, with one barrier per tile. Fragments are loaded one
// mma step ahead (kFragments 2), when needed (1), or in between (3: see kRotates).
//
// A block of a persistent kernel computes the tiles blockIdx.x, blockIdx.x + gridDim.x, ...: the
// first copies of the next tile replace the empty ones past the end of the current tile, and the
// results are stored through the one stage that is free then. With fewer blocks than tiles, all
// tiles must be whole, K a multiple of kTileK of at least kStages tiles, and splits 1.
//
// Layout `any` takes any strides: element copies by cp.async, or for 16-bit types through
// registers.
//
// NOTE: without `#pragma once`: the build compiles several kernels of a source together, and this
// file once in the namespace of each.

#include "chain_totals.cuh"
#include "epilogue.cuh"
#include "mma_operand.cuh"

namespace torch_cubin::TC_KERNEL {

struct Config {
  static constexpr DType kDType = DType::TC_DTYPE;
  static constexpr Layout kLayout = Layout::TC_LAYOUT;
  static constexpr int kTileM = TC_TILE_M, kTileN = TC_TILE_N, kTileK = TC_TILE_K;
  static constexpr int kWarpM = TC_WARP_M, kWarpN = TC_WARP_N;
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  static constexpr int kFragments = TC_FRAGMENTS;
#else
  static constexpr int kFragments = TC_FRAGMENTS == 3 ? 1 : TC_FRAGMENTS;  // 3 is not measured
#endif
  static constexpr int kStages = TC_STAGES, kThreads = TC_THREADS, kMinBlocks = TC_MIN_BLOCKS;
  static constexpr int kDynamicShared = TC_DYNAMIC_SHARED;
  static constexpr bool kPersistent = TC_PERSISTENT;
};

constexpr DType kDType = Config::kDType;
constexpr Layout kLayout = Config::kLayout;
constexpr bool kAny = kLayout == Layout::any;
constexpr int kWarpsN = Config::kTileN / Config::kWarpN;
constexpr int kWarps = Config::kTileM / Config::kWarpM * kWarpsN;
static_assert(kWarps * 32 == Config::kThreads, "the block must hold the tile's warps");

// K is contiguous in A for `n` and in B for `t` (the BLAS letters, for column-major C).
constexpr bool kAKMajor = kAny || kLayout == Layout::nn || kLayout == Layout::nt;
constexpr bool kBKMajor = kAny || kLayout == Layout::nt || kLayout == Layout::tt;
using ATile =
    OperandTile<kDType, true, kAKMajor, kAny, Config::kTileM, Config::kTileK, Config::kThreads>;
using BTile =
    OperandTile<kDType, false, kBKMajor, kAny, Config::kTileN, Config::kTileK, Config::kThreads>;
using ALoader = FragmentLoader<ATile, Config::kWarpM>;
using BLoader = FragmentLoader<BTile, Config::kWarpN>;

constexpr int kStageBytes = ATile::kBytes + BTile::kBytes;
static_assert(kStageBytes * Config::kStages == Config::kDynamicShared,
              "the kernel table's shared memory");
constexpr int kSteps = Config::kTileK / ATile::kStepK;
static_assert(kSteps % 2 == 0 || Config::kFragments == 1, "fragment buffers alternate");
constexpr int kBlocksM = Config::kWarpM / 16;
constexpr int kBlocksN = Config::kWarpN / 16;
using Accumulator = typename DTypeTraits<kDType>::Accumulator;

// Kind "persistent": a block can compute several tiles.
[[maybe_unused]] constexpr bool kPersistent = Config::kPersistent;

// Doubles lack the registers for two steps' fragments. Those of B are loaded a step ahead; those of
// A as soon as the rows before them are multiplied, into the registers of the rows that were.
constexpr bool kRotates = Config::kFragments == 3;

// Of float64 with kFlagInChains.
constexpr bool kMayChain = kDType == DType::float64;

struct Multiplier {
  ALoader a_loader;
  BLoader b_loader;
  typename ALoader::Fragments a[kRotates ? 1 : Config::kFragments];
  typename BLoader::Fragments b[kRotates ? 2 : Config::kFragments];
  Accumulator sum[kBlocksM][2 * kBlocksN][4];

  TC_DEVICE Multiplier(int warp_m, int warp_n) : a_loader(warp_m), b_loader(warp_n) { fill(0); }

  TC_DEVICE void fill(Accumulator value) {
#pragma unroll
    for (int i = 0; i < kBlocksM; ++i)
#pragma unroll
      for (int j = 0; j < 2 * kBlocksN; ++j)
#pragma unroll
        for (int r = 0; r < 4; ++r) sum[i][j][r] = value;
  }

  static constexpr int kSums = kBlocksM * 2 * kBlocksN * 4;
  TC_DEVICE Accumulator& sum_at(int i) {
    return sum[i / 4 / (2 * kBlocksN)][i / 4 % (2 * kBlocksN)][i % 4];
  }

  TC_DEVICE void load(int buffer, u32 stage, int step) {
    a_loader.load(a[buffer], stage, step);
    b_loader.load(b[buffer], stage + ATile::kBytes, step);
  }

  TC_DEVICE void round(int buffer) {
    round_fragments<kDType>(a[buffer]);
    round_fragments<kDType>(b[buffer]);
  }

  // Calls between(row) after each of the kBlocksM rows of mma.
  template <class Between>
  TC_DEVICE void multiply(int buffer, Between&& between) {
    unrolled<kBlocksM>([&](auto row) {
      constexpr int i = decltype(row)::value;
#pragma unroll
      for (int jj = 0; jj < 2 * kBlocksN; ++jj) {
        int j = i % 2 == 0 ? jj : 2 * kBlocksN - 1 - jj;  // consecutive mma share an operand
        const auto& words = b[buffer][j / 2];
        mma<kDType>(sum[i][j], a[kRotates ? 0 : buffer][i], words[2 * (j % 2)],
                    words[2 * (j % 2) + 1]);
      }
      between(row);
    });
  }
};

// Makes the compiler recompute the coordinates, which is cheaper than keeping them in registers
// through the loop over K.
TC_DEVICE TileCoordinates coordinates_again(const MatmulParams& p, const TileIndex& index) {
  TileIndex fresh = index;
  asm volatile("" : "+r"(fresh.m), "+r"(fresh.n), "+r"(fresh.batch));
  return tile_coordinates<Config::kTileM, Config::kTileN, Config::kTileK>(p, fresh);
}

TC_DEVICE int left_of(tc_int64 k) {
  return static_cast<int>(
      max(min(k, static_cast<tc_int64>(Config::kTileK)), static_cast<tc_int64>(0)));
}

// Byte offsets in A and B from the end of a tile's last k tile to the first k tile of the block's
// next tile.
struct NextTile {
  tc_int64 a, b;
};

// One warp computes it while the others multiply. It is kept in shared memory because no register
// is free in the loop over K.
TC_DEVICE void find_next(NextTile& next, const MatmulParams& p, const TileIndex& index,
                         u32 next_number) {
  if (threadIdx.x >= 32) return;
  auto from = coordinates_again(p, index);
  auto to = coordinates_again(p, tile_index<Config::kTileM>(p, next_number));
  next.a = (to.a - from.a - from.k_tiles * (Config::kTileK * p.a_stride_k)) * ATile::kElement;
  next.b = (to.b - from.b - from.k_tiles * (Config::kTileK * p.b_stride_k)) * ATile::kElement;
}

// The pipelined loop for asynchronous copies. For all but the last of a persistent block's tiles it
// calls store_whole(index, offset of the free stage); at the end `index` is the last tile.
struct NoTotals {
  template <class At>
  TC_DEVICE void move(bool, At&&) {}
  template <class At>
  TC_DEVICE void add_to(At&&) {}
};
using Totals = std::conditional_t<kMayChain, ChainTotals<Multiplier::kSums>, NoTotals>;

template <class ACopy, class BCopy, class StoreWhole>
TC_DEVICE void multiply_async(Multiplier& math, const MatmulParams& p, TileIndex& index, u32 shared,
                              StoreWhole&& store_whole) {
  auto t = tile_coordinates<Config::kTileM, Config::kTileN, Config::kTileK>(p, index);
  using Storage = typename ATile::Storage;
  ACopy a(static_cast<const Storage*>(p.a) + t.a, p.a_stride_m, p.a_stride_k, p.m - t.m0);
  BCopy b(static_cast<const Storage*>(p.b) + t.b, p.b_stride_n, p.b_stride_k, p.n - t.n0);

  // A tile's copies are spread evenly over the rows of mma of all steps except the last, which
  // waits for them. Copies past the last tile are still issued, but read nothing.
  constexpr int kSlots = (kSteps - 1) * kBlocksM;
  constexpr int kCopies = ACopy::kCopies + BCopy::kCopies;
  tc_int64 k_left = t.k_end - t.k_begin;
  auto copy_slot = [&](auto whole, auto slot, u32 stage) {
    constexpr bool kWhole = decltype(whole)::value;
    constexpr int s = decltype(slot)::value;
    constexpr int begin = kCopies * s / kSlots, end = kCopies * (s + 1) / kSlots;
    constexpr int kA = ACopy::kCopies;
    int left = left_of(k_left);
    if constexpr (begin < kA && begin < end) {
      a.template copy<kWhole, begin, (end < kA ? end : kA)>(stage, left);
    }
    if constexpr (end > kA && begin < end) {
      b.template copy<kWhole, (begin > kA ? begin : kA) - kA, end - kA>(stage + ATile::kBytes,
                                                                        left);
    }
    if (s == kSlots - 1) {
      cp_async_commit();
      if (!kPersistent || !kWhole) k_left -= Config::kTileK;
    }
  };
#pragma unroll
  for (int s = 0; s < Config::kStages - 1; ++s) {
    unrolled<kSlots>([&](auto slot) { copy_slot(Constant<0>{}, slot, shared + s * kStageBytes); });
  }
  __shared__ NextTile to_next;
  u32 tiles = static_cast<u32>(p.tiles_m) * static_cast<u32>(p.tiles_n) * static_cast<u32>(p.batch);
  u32 next_number = blockIdx.x + gridDim.x;
  if (kPersistent && next_number < tiles) find_next(to_next, p, index, next_number);
  cp_async_wait<Config::kStages - 2>();
  __syncthreads();

  u32 read = shared;
  u32 write = shared + (Config::kStages - 1) * kStageBytes;
  int tile = 0;
  auto multiply_until = [&](auto whole, int end) {
    if constexpr (Config::kFragments > 1) math.load(0, read, 0);
#pragma unroll 1
    for (; tile < end; ++tile) {
      unrolled<kSteps>([&](auto constant) {
        constexpr int step = decltype(constant)::value;
        constexpr int next = (step + 1) % 2;
        if constexpr (Config::kFragments == 1) math.load(0, read, step);
        if constexpr (Config::kFragments == 1 || step == 0) math.round(0);
        if constexpr (step == kSteps - 1) {
          // After the barrier no thread reads this tile, and the next one has arrived.
          cp_async_wait<Config::kStages - 2>();
          __syncthreads();
          write = read;
          read += kStageBytes;
          if (read == shared + Config::kStages * kStageBytes) read = shared;
        }
        if constexpr (Config::kFragments == 2) math.load(next, read, (step + 1) % kSteps);
        if constexpr (kRotates) {
          math.b_loader.load(math.b[next], read + ATile::kBytes, (step + 1) % kSteps);
        }
        // NOTE: the copies come after the loads. ptxas keeps the order of shared memory accesses,
        // and copies wait for their addresses: before the loads they cost 7% of the speed (H200).
        math.multiply(step % (kRotates ? 2 : Config::kFragments), [&](auto row) {
          constexpr int i = decltype(row)::value;
          if constexpr (kRotates) math.a_loader.load_block(math.a[0], read, (step + 1) % kSteps, i);
          constexpr int slot = step * kBlocksM + i;
          if constexpr (slot < kSlots) copy_slot(whole, Constant<slot>{}, write);
          if constexpr (Config::kFragments == 2 && i == (kBlocksM - 1) / 2 && step != kSteps - 1) {
            math.round(next);
          }
        });
      });
    }
  };

  // While the tiles to copy are whole, the loop skips the bounds tests, which cost 2% of the time
  // (H200).
  int k_tiles = t.k_tiles;
  [[maybe_unused]] Totals totals;
  const bool in_chains = kMayChain && (p.flags & kFlagInChains) != 0;
  const int of_chain = in_chains ? static_cast<int>(p.k_tiles_per_split) : k_tiles;
  int chain_end = of_chain;
  auto multiply_to = [&](auto whole, int end) {
    if constexpr (!kMayChain) {
      multiply_until(whole, end);
    } else {
      while (tile < end) {
        multiply_until(whole, min(end, chain_end));
        if (tile == chain_end && tile < k_tiles) {
          totals.move(tile == of_chain, [&](int i) -> Accumulator& { return math.sum_at(i); });
          chain_end += of_chain;
        }
      }
    }
  };
  if constexpr (!kAny) {
    bool whole = p.m - t.m0 >= Config::kTileM && p.n - t.n0 >= Config::kTileN;
    int whole_tiles = static_cast<int>((t.k_end - t.k_begin) / Config::kTileK);
    int end = whole_tiles - (Config::kStages - 1);
    if constexpr (kPersistent) {
      // NOTE: this loop's conditions must depend on parameters and block numbers, not on memory.
      // Otherwise ptxas does not keep the stages' addresses in uniform registers, and the loop over
      // K grows by a dozen instructions.
      while (next_number < tiles) {
        int until = end;
        while (true) {
          multiply_until(Constant<1>{}, until);
          if (until == k_tiles) break;
          until = k_tiles;
          a.global += to_next.a;
          b.global += to_next.b;
        }
        store_whole(index, write - shared);
        index = tile_index<Config::kTileM>(p, next_number);
        next_number += gridDim.x;
        __syncthreads();
        if (next_number < tiles) find_next(to_next, p, index, next_number);
        math.fill(0);
        tile = 0;
      }
    }
    if (whole) multiply_to(Constant<1>{}, end);
    if constexpr (kPersistent) {
      k_left =
          t.k_end - t.k_begin - static_cast<tc_int64>(tile + Config::kStages - 1) * Config::kTileK;
    }
  }

  // The remaining tiles, in runs: a tile with straddling vectors begins a run, before which they
  // are copied. (That code inside the loop cost 6% of its speed without ever running.)
  t = coordinates_again(p, index);
  bool straddles_k = (ACopy::straddles_k(p.k) || BCopy::straddles_k(p.k)) && t.k_end == p.k;
  bool straddles_mn = ACopy::straddles_mn(p.m - t.m0) || BCopy::straddles_mn(p.n - t.n0);
  while (tile < k_tiles) {
    int end = k_tiles;
    if (straddles_mn) {
      end = tile + 1;
    } else if (straddles_k && tile < k_tiles - 1) {
      end = k_tiles - 1;
    }
    if (straddles_mn || (straddles_k && tile == k_tiles - 1)) {
      auto t = coordinates_again(p, index);
      tc_int64 k = static_cast<tc_int64>(tile) * Config::kTileK;
      int left = left_of(t.k_end - t.k_begin - k);
      auto a_tile = static_cast<const Storage*>(p.a) + t.a + k * p.a_stride_k;
      auto b_tile = static_cast<const Storage*>(p.b) + t.b + k * p.b_stride_k;
      if constexpr (kRotates) __syncthreads();  // all have read this tile, if too early
      ACopy::copy_straddling(a_tile, p.a_stride_m, p.a_stride_k, p.m - t.m0, left, read);
      BCopy::copy_straddling(b_tile, p.b_stride_n, p.b_stride_k, p.n - t.n0, left,
                             read + ATile::kBytes);
      __syncthreads();
    }
    multiply_to(Constant<0>{}, end);
  }
  if constexpr (kMayChain) {
    if (k_tiles > of_chain) {
      totals.add_to([&](int i) -> Accumulator& { return math.sum_at(i); });
    }
  }
  cp_async_wait<0>();  // the epilogue reuses the shared memory
}

// The loop for copies through registers: two stages, with the next tile's elements in flight.
template <class ACopy, class BCopy>
TC_DEVICE void multiply_registers(Multiplier& math, const MatmulParams& p, const TileIndex& index,
                                  u32 shared) {
  static_assert(ACopy::kAsync || (Config::kStages == 2 && Config::kFragments == 1),
                "what this loop uses");
  auto t = tile_coordinates<Config::kTileM, Config::kTileN, Config::kTileK>(p, index);
  using Storage = typename ATile::Storage;
  ACopy a(static_cast<const Storage*>(p.a) + t.a, p.a_stride_m, p.a_stride_k, p.m - t.m0);
  BCopy b(static_cast<const Storage*>(p.b) + t.b, p.b_stride_n, p.b_stride_k, p.n - t.n0);
  tc_int64 k_left = t.k_end - t.k_begin;
  a.fetch(left_of(k_left));
  b.fetch(left_of(k_left));
#pragma unroll 1
  for (int tile = 0; tile < t.k_tiles; ++tile) {
    u32 stage = shared + tile % 2 * kStageBytes;
    a.store(stage);
    b.store(stage + ATile::kBytes);
    __syncthreads();  // also: all threads have read the other stage's tile
    k_left -= Config::kTileK;
    a.fetch(left_of(k_left));
    b.fetch(left_of(k_left));
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
      math.load(0, stage, step);
      math.multiply(0, [](auto) {});
    }
  }
}

template <class Tile>
using CopyOf = std::conditional_t<
    !kAny, VectorCopy<Tile>,
    std::conditional_t<Tile::kElement == 2, RegisterCopy<Tile>, ElementCopy<Tile>>>;

template <class ACopy, class BCopy, class StoreWhole>
TC_DEVICE void multiply_tiles(Multiplier& math, const MatmulParams& p, TileIndex& index, u32 shared,
                              StoreWhole&& store_whole) {
  if constexpr (ACopy::kAsync) {
    multiply_async<ACopy, BCopy>(math, p, index, shared, store_whole);
  } else {
    multiply_registers<ACopy, BCopy>(math, p, index, shared);
  }
}

// Computes a tile of a product, in a persistent kernel those that follow it, too, and stores them;
// with `is_wrong` all its outputs are NaN.
TC_DEVICE void compute_tile(const MatmulParams& p, TileIndex index, bool is_wrong) {
  extern __shared__ __align__(1024) unsigned char shared_memory[];
  int warp = threadIdx.x / 32;
  int warp_m = warp / kWarpsN * Config::kWarpM;
  int warp_n = warp % kWarpsN * Config::kWarpN;
  Multiplier math(warp_m, warp_n);
  multiply_tiles<CopyOf<ATile>, CopyOf<BTile>>(
      math, p, index, shared_address(shared_memory), [&](const TileIndex& index, u32 stage) {
        if constexpr (kPersistent) {
          store_whole_tile<kDType, kStageBytes / kWarps>(p, coordinates_again(p, index), warp_m,
                                                         warp_n, shared_memory + stage, math.sum);
        }
      });
  if (is_wrong) math.fill(__int_as_float(0x7fc00000));
  __syncthreads();  // all threads have read the last tile: its memory is free
  store_tile<kDType, Config::kDynamicShared / kWarps>(p, coordinates_again(p, index), warp_m,
                                                      warp_n, shared_memory, math.sum);
}

}  // namespace torch_cubin::TC_KERNEL
