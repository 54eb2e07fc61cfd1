// float32 products of few tiles in chains of 256 terms, without tensor cores, whose warps have a
// chain each: batch_invariant()'s few rows. A block's warps share K out as those of sliced.cu do,
// but by whole chains: warp w has the chains w, w + 8, w + 16 and so on, from zero each, and adds a
// chain's sums to those before, in shared memory, when the warp with the chain before has added its
// own. So the results have the bits of simt_tile.cuh's small tiles.
//
// Roles: all threads copy, multiply and store. Requires sm_80 only.
#include "common/mma.cuh"
#include "sliced_warps.cuh"
#include "tile.cuh"

namespace torch_cubin::TC_KERNEL {

constexpr int kWarps = kSlices, kChainSlices = TC_CHAIN / kSliceK;
static_assert(kTileK == kSliceK && kChainSlices * kSliceK == TC_CHAIN);
// Results have the bits of tiles whose k tile is this: zeros behind the end of K make +0 of -0.
constexpr int kPaddedK = 8;
constexpr int kTotalsBytes = kTileM * kTileN * 4;
static_assert(Config::kDynamicShared == kTotalsBytes + kRingsBytes);

// Where a thread has its totals: run `run` of four columns of its row i, for all of its warps.
TC_DEVICE u32 slot(u32 totals, int lane, int i, int run) {
  return totals + ((i * (kSumsN / 4) + run) * 32 + lane) * 16;
}

// Barriers of a warp's turn to add a chain's sums.
TC_DEVICE void wait_for_turn(int warp) {
  asm volatile("bar.sync %0, 64;" ::"r"(1 + warp) : "memory");
}
TC_DEVICE void pass_turn(int warp) {
  asm volatile("bar.arrive %0, 64;" ::"r"(1 + (warp + 1) % kWarps) : "memory");
}

TC_DEVICE void add_chain(Sums& math, u32 totals, bool is_first) {
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int i = 0; i < 8; ++i) {
#pragma unroll
    for (int run = 0; run < kSumsN / 4; ++run) {
      const u32 at = slot(totals, lane, i, run);
      float total[4] = {-0.0f, -0.0f, -0.0f, -0.0f};  // of which no sum shows a trace
      if (!is_first) load_shared(total, at);
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        total[j] += math.sum[i][run * 4 + j];
        math.sum[i][run * 4 + j] = 0;
      }
      store_shared(at, total);
    }
  }
}

extern "C" __global__ void __launch_bounds__(Config::kThreads, Config::kMinBlocks)
    TC_KERNEL(const __grid_constant__ MatmulParams p) {
  extern __shared__ __align__(1024) unsigned char shared_memory[];
  wait_for_previous_kernel();
  const auto t = tile_coordinates<kTileM, kTileN, kTileK>(p);
  const int warp = threadIdx.x / 32;
  SlicesA a(p.a, t.a, p.a_stride_m, p.a_stride_k, p.m - t.m0, warp, kChainSlices, 1);
  SlicesB b(p.b, t.b, p.b_stride_n, p.b_stride_k, p.n - t.n0, warp, kChainSlices, 1);
  const tc_int64 skip_a = (kWarps - 1) * TC_CHAIN * p.a_stride_k * 4;
  const tc_int64 skip_b = (kWarps - 1) * TC_CHAIN * p.b_stride_k * 4;
  const u32 totals = shared_address(shared_memory);
  const u32 ring = totals + kTotalsBytes + warp * (kStages * kStageBytes);

  // This warp's chains, and its slices: all, and those from the first on that are whole.
  const int k = static_cast<int>(t.k_end - t.k_begin);
  const int chains = max((k + TC_CHAIN - 1) / TC_CHAIN, 1);
  const int own = (chains + kWarps - 1 - warp) / kWarps;
  const bool has_last = (chains - 1) % kWarps == warp;
  const int of_last = k - (chains - 1) * TC_CHAIN;  // terms
  const int others = (own - (has_last ? 1 : 0)) * kChainSlices;
  const int whole = others + (has_last ? of_last / kSliceK : 0);
  const int rest = has_last ? of_last % kSliceK : 0, slices = whole + (rest > 0 ? 1 : 0);
  const bool inside = p.m - t.m0 >= kTileM && p.n - t.n0 >= kTileN;

  int copied = 0;
  auto copy = [&](auto is_whole, u32 stage) {
    constexpr bool kWhole = decltype(is_whole)::value;
    const int here = copied < whole ? kSliceK : copied == whole ? rest : 0;
    a.template copy<kWhole>(stage, here);
    b.template copy<kWhole>(stage + SlicesA::kBytes, here);
    cp_async_commit();
    if (++copied % kChainSlices == 0) {
      a.from += skip_a;
      b.from += skip_b;
    }
  };
#pragma unroll 1
  for (int s = 0; s < kStages - 1; ++s) copy(Constant<0>{}, ring + s * kStageBytes);

  Sums math;
  u32 read = ring, write = ring + (kStages - 1) * kStageBytes;
  auto multiply = [&](auto is_whole, int steps) {
    constexpr bool kWhole = decltype(is_whole)::value;
    cp_async_wait<kStages - 2>();
    __syncwarp();  // all lanes' copies are there, and all have read the stage that is written
    Sums::Fragments f;
    math.read(f, read, 0);
    copy(is_whole, write);
    if constexpr (kWhole) {
      unrolled<Sums::kSteps>([&](auto constant) {
        constexpr int step = decltype(constant)::value;
        if constexpr (step > 0) math.read(f, read, step);
        math.multiply(f);
      });
    } else {
#pragma unroll 1
      for (int step = 0; step < steps; ++step) {
        if (step > 0) math.read(f, read, step);
        math.multiply(f);
      }
    }
    write = read;
    read += kStageBytes;
    if (read == ring + kStages * kStageBytes) read = ring;
  };
  const int fast = inside ? whole - (kStages - 1) : 0;
  int slice = 0;
#pragma unroll 1
  for (int chain = warp; chain < chains; chain += kWarps) {
    const int end = min(slice + kChainSlices, slices);
#pragma unroll 1
    for (const int fast_end = min(end, fast); slice < fast_end; ++slice) {
      multiply(Constant<1>{}, Sums::kSteps);
    }
#pragma unroll 1
    for (; slice < end; ++slice) {
      multiply(Constant<0>{},
               slice < whole ? Sums::kSteps : (rest + kPaddedK - 1) / kPaddedK * (kPaddedK / 4));
    }
    if (chain > 0) wait_for_turn(warp);
    add_chain(math, totals, chain == 0);
    if (chain + 1 < chains) pass_turn(warp);
  }
  cp_async_wait<0>();
  __syncthreads();

  // A vector of four columns lies in a thread's run, or in those of four threads.
  constexpr int kOfRow = kTileN / 4, kVectors = kTileM * kOfRow;
#pragma unroll 2
  for (int i = threadIdx.x; i < kVectors; i += Config::kThreads) {
    const int row = i / kOfRow, column = i % kOfRow * 4;
    if (t.m0 + row >= p.m || t.n0 + column >= p.n) continue;
    float value[4];
    // Lane of (m, n): m = lane / 2 % 8, n = lane % 2 + lane / 16 * 2.
    auto lane = [&](int n) { return n % 2 + row % 8 * 2 + n / 2 * 16; };
    if constexpr (kBAlongK) {
      const int j = column / 4;  // of columns n + 4j
#pragma unroll
      for (int n = 0; n < 4; ++n) {
        u32 bits;
        load_shared(bits, slot(totals, lane(n), row / 8, j / 4) + j % 4 * 4);
        value[n] = __uint_as_float(bits);
      }
    } else {
      load_shared(value, slot(totals, lane(column / 4 % 4), row / 8, column / 16));
    }
    store_vector(p, t, row, column, value);
  }
}

}  // namespace torch_cubin::TC_KERNEL

/* torch_cubin kernels
{"kernels": [
  {"name": "sliced_matmul_f32_{layout}_{t.tile.0}x{t.tile.1}x{t.tile.2}", "kind": "sliced",
   "dtype": "float32", "math": "float32", "layout": "{layout}", "tile": "{t.tile}",
   "block": [256, 1, 1], "stages": "{t.stages}", "dynamic_shared": "{t.shared}",
   "archs": ["sm_90a"], "chain": 256,
   "cost": {"k_tile": "{t.k_tile}", "fixed": 6000, "lone": 1},
   "defines": {"TC_LAYOUT": "{layout}", "TC_MIN_BLOCKS": 1, "TC_CHAIN": 256},
   "for": {
    "layout": ["nn", "nt"],
    "t": [
     ["tile", "stages", "shared", "k_tile"],
     [[64, 32, 16], 3, 155648, 360],
     [[64, 48, 16], 3, 184320, 540]]}}]}
*/
