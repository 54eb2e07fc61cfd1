// Matrix product on Hopper of operands whose rows begin anywhere, along either dim, in one kernel
// without a copy: of few rows by a large operand, and of a short K.
//
// All threads of a block read their parts of A and B, 16 aligned bytes at a time, shift them, and
// store them in the layout that wgmma takes (anywhere_rows.cuh). Two blocks or more share a
// multiprocessor: while one waits for its loads, another one multiplies or stores. With TC_SHORT
// all of K is read before the first product, so that sums and loads need no registers at the same
// time; else the loads of the next 128 bytes of K are in flight while these are multiplied, and the
// blocks of a cluster may divide K (splits), whose sums they add through shared memory, in a fixed
// order. More blocks than a cluster has leave their sums in memory, for reduce.cu (p.partial).
//
// Results go through shared memory, so that a warp stores 128 bytes of a row at a time, whatever
// address the row begins at.
//
//   shared memory: two parts of K, each A's and B's lines of 128 bytes; then, in the same place, the
//   results of each warp, or the sums of the tile
#include "anywhere_rows.cuh"
#include "pairs.cuh"
#include "tile.cuh"

namespace torch_cubin::TC_KERNEL {

using namespace sm90;

constexpr DType kDType = DType::TC_DTYPE;
constexpr bool kTf32 = kDType == DType::float32, kShort = TC_SHORT;
constexpr WgmmaType kType = kTf32                       ? WgmmaType::tf32
                            : kDType == DType::bfloat16 ? WgmmaType::bf16
                                                        : WgmmaType::f16;
using Element = std::conditional_t<kTf32, float, u16>;
constexpr int kSize = sizeof(Element), kVector = 16 / kSize, kPartK = 128 / kSize;
constexpr int kTileM = TC_TILE_M, kTileN = TC_TILE_N, kThreads = TC_THREADS;
// Parts of K that are requested together.
constexpr int kRound = TC_ROUND;
// Warpgroups: where a tile has 64 rows and columns, both multiply it, each half of K.
constexpr int kGroups = 2, kGroupsM = kTileM / 64;
constexpr int kGroupsN = kTileN == 64 ? 1 : kGroups / kGroupsM;
constexpr int kGroupsK = kGroups / (kGroupsM * kGroupsN), kSteps = 4 / kGroupsK;
constexpr int kColumns = kTileN / kGroupsN;  // of one
constexpr int kBytesA = kTileM * 128, kBytesB = kTileN * 128, kPartBytes = kBytesA + kBytesB;
constexpr int kPitch = kColumns * kSize + 16;  // of a row of a warp's results
constexpr int kWarpBytes = 16 * kPitch;
constexpr int kSumPitch = kTileN * 4 + 32;      // of a row of sums
constexpr int kGroupSums = kTileM * kSumPitch;  // bytes of the sums of a group
constexpr int kMostSplits = 8;                  // blocks of a cluster
constexpr int kSharedBytes = 2 * kRound * kPartBytes;
static_assert(kGroups == kGroupsM * kGroupsN * kGroupsK && kThreads == kGroups * 128);
static_assert(kGroupsK == 1 || !kShort);
static_assert(kTf32 || kColumns % 64 == 0);
static_assert(kThreads / 32 * kWarpBytes <= kSharedBytes);
static_assert(kShort || kGroupsK * kGroupSums <= kSharedBytes);
static_assert(kSharedBytes == TC_DYNAMIC_SHARED, "the kernel table's shared memory");

template <int kAOwn, int kBOwn>
TC_DEVICE void multiply(float (&sum)[kColumns / 2], u64 a, u64 b, int add, int group_k) {
  constexpr u32 kStepA = kAOwn ? kMnMajorStep : 32, kStepB = kBOwn ? kMnMajorStep : 32;
  if constexpr (kGroupsK > 1) {
    a = advance(a, group_k * kSteps * kStepA);
    b = advance(b, group_k * kSteps * kStepB);
  }
  wgmma_fence();
#pragma unroll
  for (int k = 0; k < kSteps; ++k) {
    Wgmma<kColumns>::template run<kType, kAOwn, kBOwn>(sum, advance(a, k * kStepA),
                                                       advance(b, k * kStepB), k == 0 ? add : 1);
  }
  wgmma_commit();
}

TC_DEVICE void store_pair_shared(u32 shared, float x, float y) {
  asm volatile("st.shared.v2.f32 [%0], {%1, %2};" ::"r"(shared), "f"(x), "f"(y) : "memory");
}

// ---- the end without splits

// Stores 16 rows of results, which lie at `from`, by one warp: words of 4 bytes, 32 at a time.
TC_DEVICE void store_rows(u32 from, Element* c, tc_int64 pitch, int rows, int columns) {
  const int lane = threadIdx.x % 32;
  if (columns >= kColumns && pitch % kVector == 0 && reinterpret_cast<u64>(c) % 16 == 0) {
    constexpr int kLanes = kColumns / kVector;  // of a row
#pragma unroll
    for (int i = 0; i < 16 * kLanes / 32; ++i) {
      const int row = (i * 32 + lane) / kLanes, column = (i * 32 + lane) % kLanes * kVector;
      u32 x[4];
      load_shared(x, from + row * kPitch + column * kSize);
      if (row < rows) {
        *reinterpret_cast<uint4*>(c + row * pitch + column) = make_uint4(x[0], x[1], x[2], x[3]);
      }
    }
    return;
  }
#pragma unroll 4
  for (int row = 0; row < 16; ++row) {
    if (row >= rows) break;
    Element* to = c + row * pitch;
    const u32 own = from + row * kPitch;
    u32 word;
    if constexpr (kTf32) {
#pragma unroll
      for (int i = 0; i < kColumns / 32; ++i) {
        const int at = 32 * i + lane;
        load_shared(word, own + 4 * at);
        if (at < columns) to[at] = __uint_as_float(word);
      }
    } else {
      const int lead = static_cast<int>(reinterpret_cast<u64>(to) / 2 % 2);
#pragma unroll
      for (int i = 0; i < kColumns / 64; ++i) {
        const int at = 64 * i + 2 * lane - lead;  // the first of the word's elements
        load_shared(word, own + 4 * (32 * i + lane));
        if (lead) {
          u32 before;
          load_shared(before, own + 4 * max(32 * i + lane - 1, 0));
          word = __funnelshift_r(before, word, 16);
        }
        if (at >= 0 && at + 1 < columns) {
          *reinterpret_cast<u32*>(to + at) = word;
        } else {
          if (at >= 0 && at < columns) to[at] = static_cast<u16>(word);
          if (at < 0) to[0] = static_cast<u16>(word >> 16);
        }
      }
      if (lead && lane == 0 && columns == kColumns) {
        load_shared(word, own + 2 * kColumns - 4);
        to[kColumns - 1] = static_cast<u16>(word >> 16);
      }
    }
  }
}

// Rounds and stores a warp's results, which begin at row `m` and column `n` of the batch.
TC_DEVICE void store_results(const MatmulParams& p, float (&sum)[kColumns / 2], u32 own,
                             tc_int64 batch, tc_int64 m, tc_int64 n) {
  const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
  if (p.bias != nullptr) {
#pragma unroll
    for (int j = 0; j < kColumns / 8; ++j) {
#pragma unroll
      for (int c = 0; c < 2; ++c) {
        const tc_int64 column = n + 8 * j + 2 * t + c;
        const float bias = column < p.n ? load_bias<kDType>(p, column) : 0.0f;
        sum[4 * j + c] += bias;
        sum[4 * j + 2 + c] += bias;
      }
    }
  }
#pragma unroll
  for (int j = 0; j < kColumns / 8; ++j) {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const u32 to = own + (8 * h + g) * kPitch + (8 * j + 2 * t) * kSize;
      if constexpr (kTf32) {
        store_pair_shared(to, sum[4 * j + 2 * h], sum[4 * j + 2 * h + 1]);
      } else {
        store_shared(to, packed<kDType>(sum[4 * j + 2 * h], sum[4 * j + 2 * h + 1]));
      }
    }
  }
  __syncwarp();
  const int rows = static_cast<int>(min(p.m - m, tc_int64(16)));
  const int columns = static_cast<int>(min(p.n - n, tc_int64(kColumns)));
  if (rows <= 0 || columns <= 0) return;
  store_rows(own, static_cast<Element*>(p.c) + (batch * p.m + m) * p.n + n, p.n, rows, columns);
}

// ---- the end with several sums

// Adds the sums of all blocks of a cluster, or of this block's groups, of rows [first, last) of the
// tile, and stores them to C, or as they are at `unrounded`.
template <bool kOfCluster>
TC_DEVICE void add_sums(const MatmulParams& p, u32 shared, Element* c, float* unrounded, int first,
                        int last, int columns, tc_int64 n0) {
  constexpr int kSums = kOfCluster ? kMostSplits : kGroupsK;
  constexpr int kLanes = kTileN / 2;  // of a row
  const int column = threadIdx.x % kLanes * 2;
  if (column >= columns) return;
  const bool both = column + 1 < columns;
  float bias[2] = {};
  if (p.bias != nullptr && unrounded == nullptr) {
    bias[0] = load_bias<kDType>(p, n0 + column);
    if (both) bias[1] = load_bias<kDType>(p, n0 + column + 1);
  }
  const bool pairs = !kTf32 && both && p.n % 2 == 0 && reinterpret_cast<u64>(c) % 4 == 0;
  u32 from[kSums];
#pragma unroll
  for (int s = 0; s < kSums; ++s) {
    from[s] = shared + column * 4;
    if (kOfCluster) {
      from[s] = map_to_rank(from[s], s < p.splits ? s : 0);
    } else {
      from[s] += s * kGroupSums;
    }
  }
#pragma unroll 2
  for (int row = first + threadIdx.x / kLanes; row < last; row += kThreads / kLanes) {
    float x[kSums][2] = {}, sums[2] = {};
#pragma unroll
    for (int s = 0; s < kSums; ++s) {
      if (kOfCluster && s >= 2 && s >= p.splits) continue;
      load_pair<kOfCluster>(x[s], from[s] + row * kSumPitch);
    }
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      sums[i] = kOfCluster ? bias[i] + x[0][i] : x[0][i];
#pragma unroll
      for (int s = 1; s < kSums; ++s) sums[i] += x[s][i];
      if (!kOfCluster) sums[i] += bias[i];
    }
    const tc_int64 at = row * p.n + column;
    if (kTf32 || unrounded != nullptr) {
      float* to = unrounded != nullptr ? unrounded + at : reinterpret_cast<float*>(c) + at;
      to[0] = sums[0];
      if (both) to[1] = sums[1];
    } else if constexpr (!kTf32) {
      Element* to = c + at;
      const u32 pair = packed<kDType>(sums[0], sums[1]);
      if (pairs) {
        *reinterpret_cast<u32*>(to) = pair;
      } else {
        to[0] = static_cast<u16>(pair);
        if (both) to[1] = static_cast<u16>(pair >> 16);
      }
    }
  }
}

extern "C" __global__ void __launch_bounds__(kThreads, TC_BLOCKS)
    TC_KERNEL(const __grid_constant__ MatmulParams p) {
  extern __shared__ __align__(1024) unsigned char memory[];
  const u32 shared = shared_address(memory);
  const int warp = __shfl_sync(~0u, threadIdx.x / 32, 0), group = warp / 4;
  // The grid is (columns of tiles * splits, rows of tiles, batch).
  const u32 column = kShort ? blockIdx.x : blockIdx.x / static_cast<u32>(p.splits);
  const int rank = kShort ? 0 : static_cast<int>(blockIdx.x - column * p.splits);
  const tc_int64 n0 = tc_int64(column) * kTileN, m0 = tc_int64(blockIdx.y) * kTileM;
  const u32 batch = blockIdx.z;
  tc_int64 a_batch = 0, b_batch = 0;
  u32 rest = batch;
#pragma unroll 1
  for (int i = 0; rest != 0; ++i) {
    const u32 size = static_cast<u32>(p.batch_size[i]), next = rest / size;
    a_batch += (rest - next * size) * p.a_batch_stride[i];
    b_batch += (rest - next * size) * p.b_batch_stride[i];
    rest = next;
  }
  const int k_size = static_cast<int>(p.k), parts = (k_size + kPartK - 1) / kPartK;
  const int each = kShort ? parts : static_cast<int>(p.k_tiles_per_split);
  const int begin = min(rank * each, parts), end = min(begin + each, parts);
  LineReader<Element, kTileM, kRound> a;
  LineReader<Element, kTileN, kRound> b;
  a.set(p.a, a_batch, p.a_stride_m, p.a_stride_k, m0, p.m, begin * kPartK, p.k);
  b.set(p.b, b_batch, p.b_stride_n, p.b_stride_k, n0, p.n, begin * kPartK, p.k);
  const int layout = (a.along_k ? 0 : 1) + (b.along_k ? 0 : 2);
  // A tile at the diagonal of x @ x.t(): its rows are its columns, and are read once.
  const bool same = kTileM == kTileN && p.a == p.b && p.m == p.n && m0 == n0 &&
                    a_batch == b_batch && p.a_stride_m == p.b_stride_n &&
                    p.a_stride_k == p.b_stride_k;
  const int group_k = kGroupsK > 1 ? group : 0;
  const int group_m = kGroupsK > 1 ? 0 : group / kGroupsN, group_n = group % kGroupsN;
  const u64 from_a = wgmma_descriptor(shared + group_m * 8192, 8192, 1024);
  const u64 from_b =
      wgmma_descriptor(shared + (same ? 0 : kBytesA) + group_n * (kColumns * 128), 8192, 1024);
  float sum[kColumns / 2];
  const auto product = [&](u32 part, int add) {
    const u64 part_a = advance(from_a, part), part_b = advance(from_b, part);
    if (kTf32 || layout == 0) {
      multiply<0, 0>(sum, part_a, part_b, add, group_k);
    } else if (layout == 1) {
      multiply<!kTf32, 0>(sum, part_a, part_b, add, group_k);
    } else if (layout == 2) {
      multiply<0, !kTf32>(sum, part_a, part_b, add, group_k);
    } else {
      multiply<!kTf32, !kTf32>(sum, part_a, part_b, add, group_k);
    }
  };

  wait_for_previous_grid();
  launch_next_grid();
  if constexpr (kShort) {
#pragma unroll 1
    for (int part = 0; part < parts; ++part) {
      const int k = part * kPartK;
      a.request(k, k_size - k);
      if (!same) b.request(k, k_size - k);
      a.store(shared + part * kPartBytes, k_size - k);
      if (!same) b.store(shared + part * kPartBytes + kBytesA, k_size - k);
    }
    fence_async_proxy();
    __syncthreads();
    product(0, 0);
    if (parts > 1) product(kPartBytes, 1);
  } else {
#pragma unroll
    for (int j = 0; j < kColumns / 2; ++j) sum[j] = 0;
    const auto request = [&](int part) {
      const int k = part * kPartK, count = min(kRound, end - part);
      a.request(k, k_size - k, count);
      if (!same) b.request(k, k_size - k, count);
    };
    if (begin < end) request(begin);
    u32 place = 0;
#pragma unroll 1
    for (int part = begin; part < end; part += kRound) {
      const int k_left = k_size - part * kPartK, count = min(kRound, end - part);
      a.store(shared + place, k_left, count, kPartBytes);
      if (!same) b.store(shared + place + kBytesA, k_left, count, kPartBytes);
      wgmma_wait<0>();  // the other place is free when all warps meet
      keep_in_place(sum);
      fence_async_proxy();  // before the next loads, for which it would wait
      if (part + kRound < end) request(part + kRound);
      __syncthreads();
#pragma unroll
      for (int u = 0; u < kRound; ++u) {
        if (u == 0 || u < count) product(place + u * kPartBytes, 1);
      }
      place = kRound * kPartBytes - place;
    }
  }
  wgmma_wait<0>();
  keep_in_place(sum);
  __syncthreads();  // all have multiplied what lies there

  const int own_m = group_m * 64 + warp % 4 * 16, own_n = group_n * kColumns;
  if (kShort || (kGroupsK == 1 && p.splits == 1)) {
    store_results(p, sum, shared + warp * kWarpBytes, batch, m0 + own_m, n0 + own_n);
    return;
  }
  const bool in_cluster = p.splits > 1 && p.partial == nullptr;  // else reduce.cu adds the splits
  if constexpr (kGroupsK > 1) {
    if (in_cluster) {
      // The second group's sums are added to the first one's, so that blocks read one of another.
      const u32 sums = shared + threadIdx.x % 128 * 8;
      if (group_k > 0) {
#pragma unroll
        for (int j = 0; j < kColumns / 4; ++j) {
          store_pair_shared(sums + j * 1024, sum[2 * j], sum[2 * j + 1]);
        }
      }
      __syncthreads();
      if (group_k == 0) {
#pragma unroll
        for (int j = 0; j < kColumns / 4; ++j) {
          float other[2];
          load_pair<false>(other, sums + j * 1024);
          sum[2 * j] += other[0];
          sum[2 * j + 1] += other[1];
        }
      }
      __syncthreads();
    }
  }
  const int g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
  const u32 own = shared + (in_cluster ? 0 : group_k * kGroupSums) + (own_m + g) * kSumPitch +
                  (own_n + 2 * t) * 4;
#pragma unroll
  for (int j = 0; j < kColumns / 8; ++j) {
    if (in_cluster && group_k > 0) break;
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      store_pair_shared(own + 8 * h * kSumPitch + 32 * j, sum[4 * j + 2 * h],
                        sum[4 * j + 2 * h + 1]);
    }
  }
  const int rows = static_cast<int>(min(p.m - m0, tc_int64(kTileM)));
  const int columns = static_cast<int>(min(p.n - n0, tc_int64(kTileN)));
  const tc_int64 at = (batch * p.m + m0) * p.n + n0, outputs = p.batch * p.m * p.n;
  Element* c = static_cast<Element*>(p.c) + at;
  if (in_cluster) {
    const int of_one = (rows + p.splits - 1) / p.splits, first = rank * of_one;
    cluster_sync_unaligned();
    add_sums<true>(p, shared, c, nullptr, first, min(first + of_one, rows), columns, n0);
    cluster_meet();  // a block must not exit while another reads its sums
  } else if constexpr (kGroupsK > 1) {
    float* partial = static_cast<float*>(p.partial);
    __syncthreads();
    add_sums<false>(p, shared, c, partial == nullptr ? nullptr : partial + rank * outputs + at, 0,
                    rows, columns, n0);
  }
}

}  // namespace torch_cubin::TC_KERNEL

/* torch_cubin kernels
{"virtual_arch": ["90a"],
 "defaults": {
  "kind": "anywhere", "tile": "{t.tile}", "block": [256, 1, 1], "stages": 2,
  "dynamic_shared": "{t.shared}",
  "cost": {"block": "{t.block}", "part": "{t.part}", "beside": "{t.beside}", "again": "{t.again}",
           "turned": "{t.turned}", "split": "{t.split}", "memory": "{t.memory}"},
  "short": "{t.short}",
  "defines": {"TC_DTYPE": "{d.dtype}", "TC_BLOCKS": "{t.blocks}", "TC_SHORT": "{t.short}",
              "TC_ROUND": "{t.round}"}},
 "kernels": [
  {"name": "anywhere_matmul_{d.short}_{t.tile.0}x{t.tile.1}{t.name}", "alignment": 2,
   "for": {
    "d": "bf16 f16",
    "t": [
     ["name", "tile", "blocks", "short", "round", "shared", "block", "part", "beside", "again",
      "turned", "split", "memory"],
     ["",       [64, 64, 64],   2, 0, 2, 65536, 3000, 1080, 0.31, 2.7, 0, 1290, 3000],
     ["",       [64, 128, 64],  2, 0, 1, 49152, 4100, 1990, 0.28, 2.2, 0,  640,    0],
     ["_short", [128, 128, 64], 2, 1, 1, 65536, 6770, 2600, 0.18, 6.4, 0,    0,    0]]}},
  {"name": "anywhere_matmul_tf32_{t.tile.0}x{t.tile.1}{t.name}", "alignment": 4,
   "for": {
    "d": "tf32",
    "t": [
     ["name", "tile", "blocks", "short", "round", "shared", "block", "part", "beside", "again",
      "turned", "split", "memory"],
     ["",       [64, 64, 32],  1, 0, 2, 65536, 2700, 1390,    0, 6.7, 0.38, 990, 1200],
     ["_short", [64, 128, 32], 2, 1, 1, 49152, 2780, 2440, 0.55, 4.5,  0.2,   0,    0]]}}]}
*/
