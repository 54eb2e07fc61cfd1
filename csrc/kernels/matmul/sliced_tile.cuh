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
#include "sliced_warps.cuh"

namespace torch_cubin::TC_KERNEL {

static_assert(kTileK == kSlices * kSliceK && kTileN == 32);
static_assert(Config::kDynamicShared == kRingsBytes);

// Four contiguous floats of another block of the cluster (map_to_rank).
TC_DEVICE void load_remote(float (&out)[4], u32 remote) {
  asm volatile("ld.shared::cluster.v4.f32 {%0, %1, %2, %3}, [%4];"
               : "=f"(out[0]), "=f"(out[1]), "=f"(out[2]), "=f"(out[3])
               : "r"(remote)
               : "memory");
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
