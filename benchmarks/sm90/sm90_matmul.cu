// Matrix product on Hopper: a persistent, warp-specialised kernel of TMA and wgmma.
//
// A block is one producer thread, which keeps kStages tiles of A and B on their way from memory, and
// one or two consumer warpgroups of 64 or 128 rows of the tile each. Clusters of two blocks share
// A's or B's tile: each loads half and multicasts it (they then stay within kStages of one another).
//
//   shared memory:  kStages x (A tile, B tile) | a staging buffer a warp | full, empty barriers
//   full[s]:   the producer's arrival and all bytes of the stage
//   empty[s]:  one arrival a consumer warpgroup, of both blocks where a cluster shares an operand
//
// What was measured on an H200, in shares of the speed (README.md has the table): one wgmma group
// stays in flight while the next is issued (without 0.985); the second warpgroup starts one k block
// late, once, so that its epilogues overlap the first one's products for good (+1.5%); K runs
// backwards in every other tile (less DRAM traffic, hence power); out is stored evict-first.
//
// The last, partial wave of tiles is streamed: its k blocks are dealt out evenly, so that most of these
// tiles have parts in several clusters. The cluster with the last part adds the others to its own, in
// one order, so the same inputs give the same bits. It waits for them, but not for ever: where the
// blocks of a launch do not all run at the same time, whichever part comes last finishes the tile.
#include "sm90_matmul_params.h"
#include "sm90_ptx.cuh"

namespace torch_cubin {
namespace sm90 {

enum class Type { bf16, f16, tf32 };

constexpr int kShared = 233472, kReserved = 1024;  // of a multiprocessor; of it, by each block

template <Type kTypeValue, bool kAMnMajorValue, bool kBMnMajorValue, int kTileMValue,
          int kTileNValue, int kStagesValue, int kConsumersValue, int kResidentValue>
struct Config {
  static constexpr Type kType = kTypeValue;
  static constexpr bool kAMnMajor = kAMnMajorValue, kBMnMajor = kBMnMajorValue;
  static constexpr int kTileM = kTileMValue, kTileN = kTileNValue, kStages = kStagesValue;
  static constexpr int kConsumers = kConsumersValue;
  static constexpr int kResident = kResidentValue;  // blocks a multiprocessor: 1 or 2
  static constexpr int kThreads = 128 * (1 + kConsumers);
  static constexpr int kBlocksM = kTileM / (64 * kConsumers);  // m64 of one warpgroup
  static constexpr int kElement = kType == Type::tf32 ? 4 : 2;
  static constexpr int kTileK = 128 / kElement;
  static constexpr int kABytes = kTileM * 128;
  static constexpr int kBBytes = (kBMnMajor ? (kTileN + 63) / 64 * 64 : kTileN) * 128;
  static constexpr int kStageBytes = kABytes + kBBytes;
  // A panel is what one TMA store writes: 16 rows of a warp, at most 128 bytes wide.
  static constexpr int kPanel = (kTileN * kElement) % 128 == 0  ? 128 / kElement
                                : (kTileN * kElement) % 64 == 0 ? 64 / kElement
                                                                : 32 / kElement;
  static constexpr int kPanelBytes = 16 * kPanel * kElement;
  static constexpr int kRing = kStages < 8 ? 8 : 16;
  static constexpr int kControlBytes = 16 * kStages + 16 + 64 * kRing;
  // Staging: 1 to 4 panels of 2048 bytes a warp, as many as memory is left for.
  static constexpr int kMaxShared = kShared / kResident - kReserved;
  static constexpr int kLeft =
      (kMaxShared - kControlBytes - kStages * kStageBytes) / (4 * kConsumers) / 2048;
  static constexpr int kWarpBytes = 2048 * (kLeft > 4 ? 4 : kLeft);
  static constexpr int kChunk = kWarpBytes >= 4096 ? 64 : 32;  // columns of floats that fit
  static constexpr int kBuffers = kWarpBytes / 2048;
  static constexpr int kStaging = kStages * kStageBytes;
  static constexpr int kBarriers = kStaging + 4 * kConsumers * kWarpBytes;
  static constexpr int kSharedBytes = kBarriers + kControlBytes;
  static_assert(kTileM == 64 * kConsumers * kBlocksM && kTileN % 16 == 0 && kTileN <= 256);
  static_assert(kBlocksM * kTileN <= 384, "accumulators: 192 registers at most");
  static_assert(kSharedBytes <= kMaxShared && kLeft >= 1, "shared memory of a block");
  // setmaxnreg deals out what three warpgroups have at launch: 3 x 168 registers, or 3 x 80.
  static constexpr int kProducerRegisters = kResident == 2 ? 24 : kBlocksM * kTileN > 256 ? 40 : 56;
  static constexpr int kConsumerRegisters = kResident == 2 ? 104 : kBlocksM * kTileN > 256 ? 232 : 224;
};

// A stretch of K of one tile: what the producer tells the consumers, in shared memory. It is written
// before the first stage of that work arrives and stays for kRing more works: the producer is at most
// kStages works ahead of the slower consumer.
struct alignas(16) Work {
  int m0, n0;    // the block's tile
  int k_count;   // in k blocks; 0: no more work
  int streamed;  // whether other clusters have parts of this tile
  int b0, b1, b2;
  int counter;   // of warpgroup 0 of this block and tile
  int parts;             // of the tile; the last one of them is its finisher's
  int finisher;          // whether that is this one
  int first_part;        // in tiles of `partial`; the others but for the last one follow
  int part, last_part;   // this one; the finisher's, where that did not wait
};

// Which work a block does: whole tiles, one in every `clusters`, then its share of the streamed ones.
template <class C>
struct Schedule {
  const Sm90MatmulParams& p;
  int rank, size, cluster, clusters;
  int next;         // tile, until whole_tiles
  u32 unit, units;  // stream work left, in k blocks of all streamed tiles
  int k_begin;      // of the work

  TC_DEVICE Schedule(const Sm90MatmulParams& params) : p(params) {
    size = p.flags & (kSm90ShareA | kSm90ShareB | kSm90SplitPair) ? 2 : 1;
    rank = size == 2 ? blockIdx.x & 1 : 0;
    cluster = size == 2 ? blockIdx.x >> 1 : blockIdx.x;
    clusters = size == 2 ? gridDim.x >> 1 : gridDim.x;
    next = cluster;
    unit = first_unit(cluster);
    units = first_unit(cluster + 1);
  }

  // The host streams no tiles where stream_clusters * stream_tiles * k_blocks needs more than 31 bits.
  TC_DEVICE u32 all_units() const { return p.stream_tiles * p.k_blocks; }
  TC_DEVICE u32 first_unit(u32 of_cluster) const {
    if (of_cluster >= p.stream_clusters) return all_units();
    return of_cluster * all_units() / p.stream_clusters;
  }
  // The cluster that computes this unit.
  TC_DEVICE int cluster_of(u32 of_unit) const {
    return ((of_unit + 1) * p.stream_clusters - 1) / all_units();
  }

  TC_DEVICE bool get(Work& work) {
    int tile;
    work.streamed = 0;
    if (next < p.whole_tiles) {
      tile = next;
      next += clusters;
      k_begin = 0;
      work.k_count = p.k_blocks;
      if (p.flags & kSm90SplitPair) {
        int half = (p.k_blocks + 1) / 2;
        k_begin = rank * half;
        work.k_count = rank == 0 ? half : p.k_blocks - half;
      }
    } else if (unit < units) {
      // From the end: what other clusters wait for comes before what waits for others.
      int of = (units - 1) / p.k_blocks;
      u32 begin = of * p.k_blocks;
      k_begin = unit > begin ? unit - begin : 0;
      work.k_count = units - begin - k_begin;
      units = begin + k_begin;
      tile = p.whole_tiles + of;
      int first = cluster_of(begin), last = cluster_of(begin + p.k_blocks - 1);
      work.parts = last - first + 1;
      work.streamed = work.parts > 1;
      work.finisher = last == cluster;
      work.counter = (of * size + rank) * C::kConsumers;
      work.first_part = part(first, 0);
      work.last_part = part(last, 1);
      work.part = part(cluster, work.finisher);
    } else {
      return false;
    }
    place(tile, work);
    return true;
  }

  TC_DEVICE int part(int of_cluster, int of_finisher) const {
    return (2 * of_cluster + of_finisher) * size + rank;
  }

  // Tiles of `group` rows follow one another, column by column; the next group comes back.
  TC_DEVICE void place(int tile, Work& work) const {
    work.b0 = work.b1 = work.b2 = 0;
    if (p.flags & kSm90Batched) {
      int one = p.tiles_m * p.tiles_n;
      int batch = tile / one;
      tile -= batch * one;
      work.b0 = batch % p.batch[0];
      batch /= p.batch[0];
      work.b1 = batch % p.batch[1];
      work.b2 = batch / p.batch[1];
    }
    bool along_n = p.flags & kSm90GroupN;
    int rows = along_n ? p.tiles_n : p.tiles_m, columns = along_n ? p.tiles_m : p.tiles_n;
    int group = tile / (p.group * columns);
    int inside = tile - group * p.group * columns;
    int height = min(p.group, rows - group * p.group);
    int column = inside / height;
    int row = group * p.group + inside - column * height;
    if (group & 1) column = columns - 1 - column;
    int m = along_n ? column : row, n = along_n ? row : column;
    if (p.flags & kSm90ShareB) m = 2 * m + rank;
    if (p.flags & kSm90ShareA) n = 2 * n + rank;
    work.m0 = m * C::kTileM;
    work.n0 = n * C::kTileN;
  }
};

// ---- producer -----------------------------------------------------------------------------------

TC_DEVICE void load_box(const Sm90TensorMap& map, u32 to, u32 full, bool multicast, bool batched,
                        int x, int y, const Work& w) {
  if (multicast) {
    if (batched) {
      tma_multicast(to, &map, full, 3, x, y, w.b0, w.b1, w.b2);
    } else {
      tma_multicast(to, &map, full, 3, x, y);
    }
  } else if (batched) {
    tma_load(to, &map, full, x, y, w.b0, w.b1, w.b2);
  } else {
    tma_load(to, &map, full, x, y);
  }
}

// One operand's tile, or this block's half of it.
template <bool kMnMajor, int kRows, int kTileK>
TC_DEVICE void load_operand(const Sm90TensorMap& map, u32 to, u32 full, bool share, int rank,
                            bool batched, int mn, int k, const Work& w) {
  if constexpr (kMnMajor) {
    int skipped = share ? rank * (kTileK / 2) : 0;
#pragma unroll
    for (int panel = 0; panel < (kRows + 63) / 64; ++panel) {
      load_box(map, to + panel * 8192 + skipped * 128, full, share, batched, mn + 64 * panel,
               k + skipped, w);
    }
  } else {
    int skipped = share ? rank * (kRows / 2) : 0;
    load_box(map, to + skipped * 128, full, share, batched, k, mn + skipped, w);
  }
}

template <class C>
TC_DEVICE void produce(const Sm90MatmulParams& p, u32 shared, u32 full, u32 empty, Work* ring) {
  Schedule<C> schedule(p);
  int stage = 0, number = 0;
  u32 phase = 0;
  bool share_a = p.flags & kSm90ShareA, share_b = p.flags & kSm90ShareB;
  bool batched = p.flags & kSm90Batched;
  bool backwards = false;
  Work w;
  bool any = schedule.get(w);
  wait_for_previous_grid();
  for (; any; any = schedule.get(w)) {
    int k = (backwards ? schedule.k_begin + w.k_count - 1 : schedule.k_begin) * C::kTileK;
    int step = backwards ? -C::kTileK : C::kTileK;
    barrier_wait_bounded(empty + 8 * stage, phase ^ 1);
    ring[number++ % C::kRing] = w;
#pragma unroll 1
    for (int i = 0; i < w.k_count; ++i, k += step) {
      barrier_wait_bounded(empty + 8 * stage, phase ^ 1);
      u32 arrived = full + 8 * stage;
      u32 to = shared + stage * C::kStageBytes;
      barrier_expect(arrived, C::kStageBytes);
      load_operand<C::kAMnMajor, C::kTileM, C::kTileK>(p.a, to, arrived, share_a, schedule.rank,
                                                       batched, w.m0, k, w);
      load_operand<C::kBMnMajor, C::kTileN, C::kTileK>(p.b, to + C::kABytes, arrived, share_b,
                                                       schedule.rank, batched, w.n0, k, w);
      if (++stage == C::kStages) {
        stage = 0;
        phase ^= 1;
      }
    }
    if (p.flags & kSm90Serpentine) backwards = !backwards;
  }
  barrier_wait_bounded(empty + 8 * stage, phase ^ 1);
  ring[number % C::kRing].k_count = 0;
  barrier_arrive(full + 8 * stage);
#ifdef TC_BOUND_NANOSECONDS
  for (int i = 1; i < C::kStages; ++i) {  // consumers that hang trap, too
    if (++stage == C::kStages) {
      stage = 0;
      phase ^= 1;
    }
    barrier_wait_bounded(empty + 8 * stage, phase ^ 1);
  }
#endif
}

// ---- epilogues ----------------------------------------------------------------------------------

template <Type kType>
TC_DEVICE u32 pack(float low, float high) {
  u32 out;
  if constexpr (kType == Type::bf16) {
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(out) : "f"(high), "f"(low));
  } else {
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(out) : "f"(high), "f"(low));
  }
  return out;
}

template <Type kType>
TC_DEVICE float load_element(const void* from, tc_int64 index) {
  if constexpr (kType == Type::tf32) {
    return static_cast<const float*>(from)[index];
  } else {
    u16 bits = static_cast<const u16*>(from)[index];
    if constexpr (kType == Type::bf16) return __uint_as_float(static_cast<u32>(bits) << 16);
    float out;
    asm("cvt.f32.f16 %0, %1;" : "=f"(out) : "h"(bits));
    return out;
  }
}

TC_DEVICE float exp2_fast(float x) {
  float out;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(out) : "f"(x));
  return out;
}

TC_DEVICE float reciprocal(float x) {
  float out;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(out) : "f"(x));
  return out;
}

// x / (1 + exp(-y)); right for y = +-infinity too.
TC_DEVICE float times_sigmoid(float x, float y) {
  return x * reciprocal(1.0f + exp2_fast(-1.4426950408889634f * y));
}

TC_DEVICE float activate(float x, int activation) {
  switch (activation) {
    case kSm90Relu:
      return x < 0.0f ? 0.0f : x;  // NaN stays NaN
    case kSm90GeluErf:
      return 0.5f * x * (1.0f + erff(0.70710678118654752f * x));
    case kSm90GeluTanh: {
      // 0.5 * (1 + tanh(u)) = sigmoid(2 * u)
      float u = 0.79788456080286536f * (x + 0.044715f * x * x * x);
      return times_sigmoid(x, 2.0f * u);
    }
    case kSm90Silu:
      return times_sigmoid(x, x);
    default:
      return x;
  }
}

// One warp's 16 rows from row m and all of the tile's columns, which are the sum and nothing else:
// rounded into panels, which the TMA stores while the next ones are written.
template <class C>
TC_DEVICE void store_rows(const Sm90MatmulParams& p, u32 staging, int& turn, int m, const Work& w,
                          const float (&sum)[C::kTileN / 2]) {
  int lane = threadIdx.x % 32;
  constexpr int kPanels = C::kTileN / C::kPanel;
  constexpr int kRowBytes = C::kPanel * C::kElement;
#pragma unroll
  for (int panel = 0; panel < kPanels; ++panel) {
    u32 buffer = staging + turn * 2048;
    turn = turn + 1 == C::kBuffers ? 0 : turn + 1;
    if (lane == 0) tma_store_wait_read<C::kBuffers - 1>();
    __syncwarp();
    if constexpr (C::kElement == 2) {
      // Lanes 8j..8j+7 address the rows of matrix j: rows 0-7, 8-15 of 8 columns, then of the next 8.
      int row = lane % 16;
      int swizzle = kRowBytes == 128 ? row & 7 : kRowBytes == 64 ? row >> 1 & 3 : row >> 2 & 1;
      u32 at = buffer + row * kRowBytes;
#pragma unroll
      for (int j = 0; j < C::kPanel / 16; ++j) {
        const float* s = sum + panel * (C::kPanel / 2) + 8 * j;
        stmatrix(at + ((2 * j + lane / 16) ^ swizzle) * 16, pack<C::kType>(s[0], s[1]),
                 pack<C::kType>(s[2], s[3]), pack<C::kType>(s[4], s[5]),
                 pack<C::kType>(s[6], s[7]));
      }
    } else {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        int row = lane / 4 + 8 * half;
        int swizzle = kRowBytes == 128 ? row & 7 : kRowBytes == 64 ? row >> 1 & 3 : row >> 2 & 1;
        u32 at = buffer + row * kRowBytes + lane % 2 * 8;
#pragma unroll
        for (int j = 0; j < C::kPanel / 8; ++j) {
          const float* s = sum + panel * (C::kPanel / 2) + 4 * j + 2 * half;
          asm volatile("st.shared.v2.f32 [%0], {%1, %2};" ::"r"(
                           at + ((2 * j + lane % 4 / 2) ^ swizzle) * 16),
                       "f"(s[0]), "f"(s[1])
                       : "memory");
        }
      }
    }
    fence_async_proxy();
    __syncwarp();
    if (lane == 0) {
      int n = w.n0 + panel * C::kPanel;
      if (m < p.m && n < p.n) {
        if (p.flags & kSm90Batched) {
          tma_store(&p.out_map, buffer, n, m, w.b0, w.b1, w.b2, kEvictFirst);
        } else {
          tma_store(&p.out_map, buffer, n, m, kEvictFirst);
        }
      }
      tma_store_commit();
    }
  }
}

// The same with bias, activation, addend, any output type and any alignment. The sums cross shared
// memory as floats, 16 x 64 at a time, so that a lane then has neighbouring columns of one row:
// everything is read and written in whole vectors, and this code exists once, not once a register.
template <class C>
TC_DEVICE void finish_rows(const Sm90MatmulParams& p, u32 staging, int m, const Work& w,
                           const float (&sum)[C::kTileN / 2]) {
  constexpr int kChunks = (C::kTileN + C::kChunk - 1) / C::kChunk;
  constexpr int kRowBytes = C::kChunk * 4, kVectors = C::kChunk / 4;  // of a row
  int lane = threadIdx.x % 32;
  int activation = p.flags >> kSm90Activation & 7;
  tc_int64 out_at =
      w.b0 * p.out_batch_stride[0] + w.b1 * p.out_batch_stride[1] + w.b2 * p.out_batch_stride[2];
  tc_int64 add_at = w.b0 * p.addend_batch_stride[0] + w.b1 * p.addend_batch_stride[1] +
                    w.b2 * p.addend_batch_stride[2];
#pragma unroll 1
  for (int chunk = 0; chunk < kChunks; ++chunk) {
    __syncwarp();
#pragma unroll
    for (int c = 0; c < kChunks; ++c) {
      if (c != chunk) continue;
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        int row = lane / 4 + 8 * half;
        u32 at = staging + row * kRowBytes + lane % 2 * 8;
#pragma unroll
        for (int j = 0; j < C::kChunk / 8; ++j) {
          if (C::kChunk * c + 8 * j < C::kTileN) {
            const float* s = sum + C::kChunk / 2 * c + 4 * j + 2 * half;
            asm volatile("st.shared.v2.f32 [%0], {%1, %2};" ::"r"(
                             at + ((2 * j + lane % 4 / 2) ^ (row % 4 * 2)) * 16),
                         "f"(s[0]), "f"(s[1])
                         : "memory");
          }
        }
      }
    }
    __syncwarp();
    bool vector = p.flags & kSm90OutVector;
    int width = vector ? 4 : 1;                               // neighbouring columns of a lane
    int column = vector ? lane % kVectors * 4 : lane;         // within the chunk
    int first_row = vector ? lane / kVectors : 0;
    int n = w.n0 + chunk * C::kChunk + column;
    int end = min(p.n, w.n0 + C::kTileN);
#pragma unroll 1
    for (int pass = 0; pass < (vector ? 1 : C::kChunk / 32); ++pass, column += 32, n += 32) {
      if (n >= end) continue;
      float bias[4] = {0.0f, 0.0f, 0.0f, 0.0f};
      if (p.bias != nullptr && !(p.flags & kSm90BiasRow)) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          if (i < width && n + i < end) bias[i] = load_element<C::kType>(p.bias, (n + i) * p.bias_stride);
        }
      }
#pragma unroll 2
      for (int row = first_row; row < 16; row += vector ? 32 / kVectors : 1) {
        if (m + row >= p.m) break;
        u32 at = staging + row * kRowBytes + ((column / 4 ^ row % 4 * 2) * 16) + column % 4 * 4;
        float x[4];
        if (vector) {
          asm volatile("ld.shared.v4.f32 {%0, %1, %2, %3}, [%4];"
                       : "=f"(x[0]), "=f"(x[1]), "=f"(x[2]), "=f"(x[3])
                       : "r"(at)
                       : "memory");
        } else {
          asm volatile("ld.shared.f32 %0, [%1];" : "=f"(x[0]) : "r"(at) : "memory");
          x[1] = x[2] = x[3] = 0.0f;
        }
        if (p.bias != nullptr && (p.flags & kSm90BiasRow)) {
          bias[0] = load_element<C::kType>(p.bias, (m + row) * p.bias_stride);
          bias[1] = bias[2] = bias[3] = bias[0];
        }
#pragma unroll
        for (int i = 0; i < 4; ++i) x[i] = activate(fmaf(p.alpha, x[i], bias[i]), activation);
        if (p.addend != nullptr) {
          tc_int64 from = add_at + (m + row) * p.addend_stride_m + n * p.addend_stride_n;
          if ((p.flags & kSm90AddVector) && vector) {
            if constexpr (C::kElement == 2) {
              uint2 bits = *reinterpret_cast<const uint2*>(static_cast<const u16*>(p.addend) + from);
              u16 parts[4] = {static_cast<u16>(bits.x), static_cast<u16>(bits.x >> 16),
                              static_cast<u16>(bits.y), static_cast<u16>(bits.y >> 16)};
#pragma unroll
              for (int i = 0; i < 4; ++i) {
                x[i] = fmaf(p.beta, load_element<C::kType>(parts, i), x[i]);
              }
            } else {
              float4 more = *reinterpret_cast<const float4*>(static_cast<const float*>(p.addend) + from);
              x[0] = fmaf(p.beta, more.x, x[0]);
              x[1] = fmaf(p.beta, more.y, x[1]);
              x[2] = fmaf(p.beta, more.z, x[2]);
              x[3] = fmaf(p.beta, more.w, x[3]);
            }
          } else {
#pragma unroll
            for (int i = 0; i < 4; ++i) {
              if (i < width && n + i < end) {
                x[i] = fmaf(p.beta,
                            load_element<C::kType>(p.addend, from + i * p.addend_stride_n), x[i]);
              }
            }
          }
        }
        tc_int64 to = out_at + (m + row) * p.out_stride_m + n;
        if (C::kElement == 4 || (p.flags & kSm90OutFloat)) {
          auto out = static_cast<float*>(p.out) + to;
          if (vector) {
            *reinterpret_cast<float4*>(out) = make_float4(x[0], x[1], x[2], x[3]);
          } else {
            out[0] = x[0];
          }
        } else if constexpr (C::kElement == 2) {
          auto out = static_cast<u16*>(p.out) + to;
          if (vector) {
            *reinterpret_cast<uint2*>(out) =
                make_uint2(pack<C::kType>(x[0], x[1]), pack<C::kType>(x[2], x[3]));
          } else {
            out[0] = static_cast<u16>(pack<C::kType>(x[0], 0.0f));
          }
        }
      }
    }
  }
  __syncwarp();
}

// ---- consumers ----------------------------------------------------------------------------------

constexpr int kSkewBarrier = 1, kGroupBarrier = 2;  // named barriers; the second + warpgroup

// Products of one stage, not waited for. `a` and `b` describe the stage's tiles.
template <class C>
TC_DEVICE void multiply(float (&sum)[C::kBlocksM][C::kTileN / 2], u64 a, u64 b, int add) {
  constexpr WgmmaType kType = C::kType == Type::bf16  ? WgmmaType::bf16
                              : C::kType == Type::f16 ? WgmmaType::f16
                                                      : WgmmaType::tf32;
  wgmma_fence();
#pragma unroll
  for (int k = 0; k < 4; ++k) {
#pragma unroll
    for (int i = 0; i < C::kBlocksM; ++i) {
      Wgmma<C::kTileN>::template run<kType, C::kAMnMajor, C::kBMnMajor>(
          sum[i], advance(a, i * 8192 + k * (C::kAMnMajor ? 2048 : 32)),
          advance(b, k * (C::kBMnMajor ? 2048 : 32)), k == 0 ? add : 1);
    }
  }
  wgmma_commit();
}

// A part of a streamed tile: to memory, or from there into (or on top of) the sums.
enum class Move { store, load, add };

template <class C, Move kMove>
TC_DEVICE void move_part(float4* part, float (&sum)[C::kBlocksM][C::kTileN / 2]) {
#pragma unroll
  for (int i = 0; i < C::kBlocksM; ++i) {
#pragma unroll
    for (int j = 0; j < C::kTileN / 8; ++j) {
      float* s = sum[i] + 4 * j;
      float4* at = part + (i * (C::kTileN / 8) + j) * 128;
      if constexpr (kMove == Move::store) {
        __stcg(at, make_float4(s[0], s[1], s[2], s[3]));
      } else {
        float4 x = __ldcg(at);
        s[0] = kMove == Move::add ? s[0] + x.x : x.x;
        s[1] = kMove == Move::add ? s[1] + x.y : x.y;
        s[2] = kMove == Move::add ? s[2] + x.z : x.z;
        s[3] = kMove == Move::add ? s[3] + x.w : x.w;
      }
    }
  }
}

// The counter of a tile's parts in memory, by one thread for its warpgroup: what the others wrote
// before they counted is visible after, and what this warpgroup wrote before.
TC_DEVICE int count_part(int* counter) {
  int before;
  asm volatile("fence.acq_rel.gpu;" ::: "memory");
  asm volatile("atom.relaxed.gpu.global.add.s32 %0, [%1], 1;"
               : "=r"(before)
               : "l"(counter)
               : "memory");
  asm volatile("fence.acq_rel.gpu;" ::: "memory");
  return before;
}

TC_DEVICE bool wait_for_parts(const int* counter, int wanted, int polls) {
  for (;;) {
    int parts;
    asm volatile("ld.acquire.gpu.global.s32 %0, [%1];" : "=r"(parts) : "l"(counter) : "memory");
    if (parts == wanted) return true;
    if (--polls < 0) return false;
    __nanosleep(100);
  }
}

// A part of a streamed tile is in the sums. True for the warpgroup that finishes the tile: then they
// are those of the whole tile, the finisher's part first, then the others in the order of K.
template <class C>
TC_DEVICE bool join(const Sm90MatmulParams& p, const Work& w, int group, u32 word,
                    float (&sum)[C::kBlocksM][C::kTileN / 2]) {
  constexpr int kVectors = C::kTileM * C::kTileN / 4;  // of a part
  int thread = threadIdx.x % 128;
  auto parts = reinterpret_cast<float4*>(p.partial) + group * (kVectors / C::kConsumers) + thread;
  int* counter = p.counters + w.counter + group;
  // One thread decides for the warpgroup.
  auto all = [&](auto decide) {
    named_sync(kGroupBarrier + group, 128);
    if (thread == 0) {
      u32 answer = decide();
      asm volatile("st.shared.u32 [%0], %1;" ::"r"(word), "r"(answer) : "memory");
    }
    named_sync(kGroupBarrier + group, 128);
    u32 answer;
    asm volatile("ld.shared.u32 %0, [%1];" : "=r"(answer) : "r"(word) : "memory");
    return answer != 0;
  };
  if (!(w.finisher && all([&] { return wait_for_parts(counter, w.parts - 1, p.polls); }))) {
    move_part<C, Move::store>(parts + static_cast<tc_int64>(w.part) * kVectors, sum);
    if (!all([&] { return count_part(counter) == w.parts - 1; })) return false;
    if (!w.finisher) {
      move_part<C, Move::load>(parts + static_cast<tc_int64>(w.last_part) * kVectors, sum);
    }
  }
  if (thread == 0) *counter = 0;  // for the next launch
  int step = p.flags & (kSm90ShareA | kSm90ShareB) ? 4 : 2;
#pragma unroll 1
  for (int number = 0; number < w.parts - 1; ++number) {
    move_part<C, Move::add>(parts + static_cast<tc_int64>(w.first_part + number * step) * kVectors,
                            sum);
  }
  return true;
}

// Both blocks of a cluster have half of K: warpgroup g of block g (of block 0 where there is one
// warpgroup) gets the other block's sums. All threads of both blocks meet here, twice.
template <class C>
TC_DEVICE bool exchange(int group, u32 shared, float (&sum)[C::kBlocksM][C::kTileN / 2]) {
  constexpr int kVectors = C::kTileN / 8;
  int thread = threadIdx.x % 128;
  int rank = cluster_rank();
  bool keep = rank == (C::kConsumers == 1 ? 0 : group);
  u32 at = shared + thread * 16;
  cluster_sync_unaligned();  // both have read their last stage: its memory is free
  if (!keep) {
    u32 remote = map_to_rank(at, rank ^ 1);
#pragma unroll
    for (int i = 0; i < C::kBlocksM; ++i) {
#pragma unroll
      for (int j = 0; j < kVectors; ++j) {
        const float* s = sum[i] + 4 * j;
        store_remote(remote + (i * kVectors + j) * 2048, s[0], s[1], s[2], s[3]);
      }
    }
  }
  cluster_sync_unaligned();
  if (!keep) return false;
#pragma unroll
  for (int i = 0; i < C::kBlocksM; ++i) {
#pragma unroll
    for (int j = 0; j < kVectors; ++j) {
      float x[4];
      asm volatile("ld.shared.v4.f32 {%0, %1, %2, %3}, [%4];"
                   : "=f"(x[0]), "=f"(x[1]), "=f"(x[2]), "=f"(x[3])
                   : "r"(at + (i * kVectors + j) * 2048)
                   : "memory");
#pragma unroll
      for (int c = 0; c < 4; ++c) sum[i][4 * j + c] += x[c];
    }
  }
  return true;
}

template <class C>
TC_DEVICE void consume(const Sm90MatmulParams& p, u32 shared, u32 full, u32 empty, u32 word,
                       const Work* ring, int warp) {
  int stage = 0, number = 0, turn = 0;
  u32 phase = 0;
  int group = warp / 4;
  bool sharing = p.flags & (kSm90ShareA | kSm90ShareB);
  // The first warp frees a stage in this block, the second one in the other block.
  bool frees = threadIdx.x % 32 == 0 && (warp % 4 == 0 || (sharing && warp % 4 == 1));
  u32 target = cluster_rank() ^ (warp % 4);
  bool leads = C::kConsumers == 2 && group == 0 && !(p.flags & kSm90NoSkew);
  u32 staging = shared + C::kStaging + warp * C::kWarpBytes;
  u64 a0 = wgmma_descriptor(shared + group * C::kBlocksM * 8192, 8192, 1024);
  u64 b0 = wgmma_descriptor(shared + C::kABytes, 8192, 1024);

  if (C::kConsumers == 2 && group == 1 && !(p.flags & kSm90NoSkew)) named_sync(kSkewBarrier, 256);
  for (;; ++number) {
    barrier_wait(full + 8 * stage, phase);
    const Work& w = ring[number % C::kRing];
    int k_count = w.k_count;
    if (k_count == 0) break;
    float sum[C::kBlocksM][C::kTileN / 2];
    int previous = stage;
    auto next_stage = [&] {
      previous = stage;
      if (++stage == C::kStages) {
        stage = 0;
        phase ^= 1;
      }
    };
    multiply<C>(sum, a0 + stage * (C::kStageBytes >> 4), b0 + stage * (C::kStageBytes >> 4), 0);
    next_stage();
#pragma unroll 1
    while (--k_count > 0) {
      barrier_wait(full + 8 * stage, phase);
      multiply<C>(sum, a0 + stage * (C::kStageBytes >> 4), b0 + stage * (C::kStageBytes >> 4), 1);
      wgmma_wait<1>();
      if (frees) barrier_arrive_remote(map_to_rank(empty + 8 * previous, target));
      if (leads) {
        named_arrive(kSkewBarrier, 256);
        leads = false;
      }
      next_stage();
    }
    wgmma_wait<0>();
#pragma unroll
    for (int i = 0; i < C::kBlocksM; ++i) keep_in_place(sum[i]);
    if (frees) barrier_arrive_remote(map_to_rank(empty + 8 * previous, target));
    if (leads) {
      named_arrive(kSkewBarrier, 256);
      leads = false;
    }

    if (w.streamed && !join<C>(p, w, group, word + 4 * group, sum)) continue;
    if ((p.flags & kSm90SplitPair) && !exchange<C>(group, shared, sum)) continue;
#pragma unroll
    for (int i = 0; i < C::kBlocksM; ++i) {
      int m = w.m0 + (group * C::kBlocksM + i) * 64 + warp % 4 * 16;
      if (p.flags & kSm90General) {
        finish_rows<C>(p, staging, m, w, sum[i]);
      } else {
        store_rows<C>(p, staging, turn, m, w, sum[i]);
      }
    }
  }
  if (leads) named_arrive(kSkewBarrier, 256);  // there was no work
  if (threadIdx.x % 32 == 0) tma_store_wait_read<0>();
}

template <class C>
TC_DEVICE void run(const Sm90MatmulParams& p) {
  extern __shared__ __align__(1024) unsigned char memory[];
  u32 shared = address_of_shared(memory);
  u32 full = shared + C::kBarriers, empty = full + 8 * C::kStages;
  u32 word = empty + 8 * C::kStages;  // one for each warpgroup
  static_assert(sizeof(Work) == 64 && C::kRing > C::kStages);
  auto ring = reinterpret_cast<Work*>(memory + C::kBarriers + 16 * C::kStages + 16);
  int warp = __shfl_sync(~0u, threadIdx.x / 32, 0);
  bool sharing = p.flags & (kSm90ShareA | kSm90ShareB);
  bool paired = sharing || (p.flags & kSm90SplitPair);

  if (threadIdx.x == 0) {
    if (shared % 1024 != 0) asm volatile("trap;");
    prefetch_tensor_map(&p.a);
    prefetch_tensor_map(&p.b);
    if (!(p.flags & kSm90General)) prefetch_tensor_map(&p.out_map);
    for (int s = 0; s < C::kStages; ++s) {
      barrier_init(full + 8 * s, 1);
      barrier_init(empty + 8 * s, C::kConsumers * (sharing ? 2 : 1));
    }
    fence_barrier_init();
  }
  if (paired) {
    __syncwarp();
    cluster_meet();
  } else {
    __syncthreads();
  }

  // The next grid's blocks may come as soon as there is room: they wait for this one's end.
  launch_next_grid();
  if (warp < 4) {
    if constexpr (C::kConsumers == 2) fewer_registers<C::kProducerRegisters>();
    if (threadIdx.x == 0) {
      produce<C>(p, shared, full, empty, ring);
    }
    __syncwarp();
    if (p.flags & kSm90SplitPair) {
      // The meetings of `exchange`. A cluster has one tile or none.
      if (static_cast<int>(blockIdx.x >> 1) < p.whole_tiles) {
        cluster_sync_unaligned();
        cluster_sync_unaligned();
      }
    }
  } else {
    if constexpr (C::kConsumers == 2) more_registers<C::kConsumerRegisters>();
    wait_for_previous_grid();
    consume<C>(p, shared, full, empty, word, ring, warp - 4);
  }
  // No block leaves while another of its cluster may still write to its memory.
  if (paired) cluster_meet();
}

}  // namespace sm90
}  // namespace torch_cubin

extern "C" __global__ void __launch_bounds__(TC_THREADS, TC_RESIDENT)
    TC_KERNEL(const __grid_constant__ torch_cubin::Sm90MatmulParams p) {
  using namespace torch_cubin::sm90;
  using C = Config<Type::TC_TYPE, TC_A_MN, TC_B_MN, TC_TILE_M, TC_TILE_N, TC_STAGES, TC_CONSUMERS,
                   TC_RESIDENT>;
  static_assert(C::kThreads == TC_THREADS && C::kSharedBytes == TC_DYNAMIC_SHARED);
  run<C>(p);
}
