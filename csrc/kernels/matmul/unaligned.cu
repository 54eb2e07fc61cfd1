// Matrix product on Hopper of operands with unaligned rows, in one kernel without a copy: for
// products of a few microseconds, where launching a copy would take a third of the time.
//
// A block of eight warps computes a tile of kTileM x kTileN. Each row of a k tile is copied to
// shared memory unchanged, by one bulk copy of the aligned 16-byte vectors that hold it. The bytes
// before the row's first element (its shift) are the same in every k tile, since k tiles are whole
// vectors apart (64 rows or more, if rows run along N). The shift is removed when words are read
// for mma.sync: of 16-bit types two adjacent words and a funnel shift give two elements. mma.sync
// allows any order of K, so a thread reads nearby elements:
//
//   B along K:  of 64 elements those from 16 * (lane % 4) on
//   B along N:  every 8th pair, the order of mma.sync; a thread's columns are contiguous
//
// TF32 (B along K) is read word by word, in the order of mma.sync, and rounded then.
//
// If a tile has fewer than eight parts of 32 x 32, groups of warps divide each stretch of K. A long
// K is also divided over the blocks of a cluster (splits). All groups leave their sums in shared
// memory, and each block adds, rounds and stores a part of the tile's rows, in a fixed order.
//
// Shared memory: kStages x (A's rows, B's rows) | one barrier per stage. The sums reuse the stages.
//
// Measured on an H200: cp.async in place of bulk copies takes up to 1.7 times as long (a
// multiprocessor reads only 6 to 9 bytes per cycle of unaligned rows, regardless of the number of
// copies in flight). So do k tiles of 64, since a warp issues the copies of its rows sequentially;
// one lane that issues them all, without a loop over lanes, is no quicker.
// benchmarks/NOTES.md has more.
// It is over 500 lines because rows along either dim, and words of two elements or one, have
// readers of their own.
#include "common/hopper.cuh"
#include "common/mma.cuh"
#include "pairs.cuh"
#include "tile.cuh"

namespace torch_cubin::TC_KERNEL {

using namespace sm90;

constexpr DType kDType = DType::TC_DTYPE;
constexpr bool kTf32 = kDType == DType::float32;
constexpr bool kBAlongK = Layout::TC_LAYOUT == Layout::nt;
// Each warp has all of K for fewer outputs, so that the results have the bits of other kernels.
constexpr bool kInOrder = TC_IN_ORDER != 0;
constexpr bool kNear = kBAlongK && !kTf32 && !kInOrder;  // a thread reads neighbours along K
static_assert(kBAlongK || !kTf32);
static_assert(TC_TILE_N % TC_TILE_M == 0);
using Element = std::conditional_t<kTf32, u32, u16>;
constexpr int kSize = sizeof(Element), kVector = 16 / kSize, kOfWord = 4 / kSize;
constexpr int kTileM = TC_TILE_M, kTileN = TC_TILE_N, kTileK = TC_TILE_K, kStages = TC_STAGES;
constexpr int kThreads = TC_THREADS;
constexpr int kWarpM = kInOrder ? 16 : 32, kWarpN = kInOrder ? kTileM / 2 : 32;
constexpr int kWarpsM = kTileM / kWarpM, kWarpsN = kTileN / kWarpN;
constexpr int kGroups =
    kThreads / 32 / (kWarpsM * kWarpsN);  // groups of warps that divide a k tile
constexpr int kSteps = 4 / kGroups;       // mma.sync along K, per group and stretch
constexpr int kBlocksM = kWarpM / 16, kBlocksN = kWarpN / 8;
// kPitchA, kPitchB: bytes per row of a stage. A k tile is multiplied in stretches of 128 bytes.
constexpr int kStretch = 128 / kSize, kStretches = kTileK / kStretch;
constexpr int kPitchA = kTileK * kSize + 16, kPitchB = kBAlongK ? kPitchA : kTileN * kSize + 16;
constexpr int kRowsA = kTileM, kRowsB = kBAlongK ? kTileN : kTileK;
constexpr int kBytesA = kRowsA * kPitchA, kStageBytes = kBytesA + kRowsB * kPitchB;
constexpr int kRowsEach = (kRowsA + kRowsB) / 8;  // per warp
constexpr int kMostSplits = 8;                    // blocks of a cluster
constexpr int kSumPitch = kTileN + 8;             // floats
constexpr int kSums = kTileM * kSumPitch;         // floats per group
static_assert(kThreads == 256 && kTileK % kStretch == 0 && kTileN % 32 == 0);
static_assert(kGroups * kWarpsM * kWarpsN == 8 && (kGroups & (kGroups - 1)) == 0 && kGroups <= 4);
static_assert((kRowsA + kRowsB) % 8 == 0 && kRowsEach <= 32);
static_assert(kStages * (kStageBytes + 8) == TC_DYNAMIC_SHARED, "the kernel table's shared memory");
static_assert(kGroups * kSums * 4 <= kStages * kStageBytes, "the sums fit into the stages");

// The host passes sizes below 2^30 only.
TC_DEVICE int to_int(tc_int64 size) { return static_cast<int>(size); }

// An operand as rows of contiguous elements.
struct Rows {
  const char* tile;        // the block's first element
  tc_int64 stride;         // bytes
  tc_int64 advance;        // bytes from a k tile to the next
  const char *low, *high;  // the operand's address range; nothing outside is read

  // `count` rows of `elements` elements each, the first at `data`. The block begins at `row` and
  // `column`.
  TC_DEVICE void set(const Element* data, tc_int64 row_stride, tc_int64 count, tc_int64 elements,
                     tc_int64 row, tc_int64 column, bool along_k) {
    stride = kSize * row_stride;
    advance = along_k ? tc_int64(kSize * kTileK) : kTileK * stride;
    tile = reinterpret_cast<const char*>(data) + row * stride + kSize * column;
    tc_int64 last = (count - 1) * stride;
    low = reinterpret_cast<const char*>(data) + min(last, tc_int64(0));
    high = reinterpret_cast<const char*>(data) + max(last, tc_int64(0)) + kSize * elements;
  }
};

// One row of a stage, copied by one thread: a bulk copy of the vectors that hold it, except vectors
// partly outside the operand (the first or the last one), which are copied by element.
struct RowCopy {
  const char* from;  // the row's first element, in the k tile to copy next
  tc_int64 advance;
  const char *low, *high;
  u32 target;     // offset in a stage
  int row, most;  // row in the operand's part of the stage; elements per row

  // Copies one vector element by element, by ordinary loads.
  TC_DEVICE void copy_elements(const char* at, u32 to) const {
    Element elements[kVector];
#pragma unroll
    for (int j = 0; j < kVector; ++j) {
      const char* element = at + kSize * j;
      bool exists = element >= low && element < high;
      elements[j] = exists ? *reinterpret_cast<const Element*>(element) : Element(0);
    }
#pragma unroll
    for (int j = 0; j < kVector; ++j) store_shared(to + kSize * j, elements[j]);
    fence_async_proxy();  // bulk copies of a later k tile will overwrite these bytes
  }

  // Copies the row, and arrives at `full`. The k tile has `rows` rows of `columns` elements; with
  // `zeros` the other rows are filled with zeros.
  TC_DEVICE void copy(int rows, int columns, bool zeros, u32 stage, u32 full) {
    const char* first_element = from;
    from += advance;
    u32 to = stage + target, bytes = 0;
    if (row < rows) {
      int shift = static_cast<int>(reinterpret_cast<u64>(first_element) & 15);
      const char* at = first_element - shift;
      int end = (shift + kSize * min(columns, most) + 15) / 16, first = 0;
      bool whole_first = at >= low, whole_last = at + 16 * end <= high;
      if (!whole_first) first = 1;
      bytes = max(end - first - (whole_last ? 0 : 1), 0) * 16;
      if (bytes > 0) bulk_load(to + 16 * first, at + 16 * first, bytes, full);
      if (!whole_first) copy_elements(at, to);
      if (!whole_last && (end > 1 || whole_first)) {
        copy_elements(at + 16 * (end - 1), to + 16 * (end - 1));
      }
    } else if (zeros) {
      const u32 none[4] = {};
#pragma unroll 1
      for (int i = 0; i <= most / kVector; ++i) store_shared(to + 16 * i, none);
      fence_async_proxy();
    }
    barrier_expect(full, bytes);
  }
};

TC_DEVICE u32 shifted(u32 low, u32 high, u32 bits) { return __funnelshift_r(low, high, bits); }

TC_DEVICE u32 load_word(u32 shared) {
  u32 word;
  asm volatile("ld.shared.b32 %0, [%1];" : "=r"(word) : "r"(shared));
  return word;
}

// Zeroes those of a word's elements that do not exist.
TC_DEVICE u32 masked(u32 word, int exist) {
  return exist >= kOfWord ? word : exist == 1 ? word & 0xffff : 0;
}

// The address at which a thread reads a row along K, and the shift of its elements.
struct RowReader {
  u32 at, bits;

  TC_DEVICE void set(const Rows& x, int row, u32 first, int group) {  // also B's pitch is kPitchA
    u32 shift = static_cast<u32>(reinterpret_cast<tc_int64>(x.tile) + row * x.stride) & 15;
    int t = threadIdx.x % 4;
    at = first + row * kPitchA + (shift & ~3u) + (kNear ? t * 32 : t * 4) +
         group * (kNear ? 32 : 128) / kGroups;
    bits = (shift & 2) * 8;
  }

  // Loads the group's elements of the stretch at `stage`, of which `k_left` exist. out[i] is a word
  // of mma step i / 2.
  template <bool kTail>
  TC_DEVICE void load(u32 (&out)[2 * kSteps], u32 stage, int k_left, int group) const {
    int t = threadIdx.x % 4;
    if constexpr (kTf32) {
#pragma unroll
      for (int i = 0; i < 2 * kSteps; ++i) out[i] = round_to_tf32(load_word(stage + at + 16 * i));
    } else if constexpr (kNear) {
      u32 words[2 * kSteps + 1];
#pragma unroll
      for (int i = 0; i <= 2 * kSteps; ++i) words[i] = load_word(stage + at + 4 * i);
#pragma unroll
      for (int i = 0; i < 2 * kSteps; ++i) out[i] = shifted(words[i], words[i + 1], bits);
    } else {
#pragma unroll
      for (int i = 0; i < 2 * kSteps; ++i) {
        out[i] = shifted(load_word(stage + at + 16 * i), load_word(stage + at + 16 * i + 4), bits);
      }
    }
    if constexpr (kTail) {
      int first = kOfWord * (kNear ? 8 * t + group * 2 * kSteps : t + group * 8 * kSteps);
#pragma unroll
      for (int i = 0; i < 2 * kSteps; ++i) {
        out[i] = masked(out[i], k_left - first - kOfWord * (kNear ? i : 4 * i));
      }
    }
  }
};

struct Multiplier {
  RowReader a[2 * kBlocksM];
  RowReader b[kBAlongK ? kBlocksN : 1];
  u32 b_at[2], b_bits[2];  // B along N: for an even and an odd row
  int group;
  float sum[kBlocksM][kBlocksN][4];

  // `a_at`: where A's rows begin in a stage.
  TC_DEVICE Multiplier(const Rows& rows_a, const Rows& rows_b, int warp_m, int warp_n, int group,
                       u32 a_at)
      : group(group) {
    int g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
#pragma unroll
    for (int i = 0; i < 2 * kBlocksM; ++i) a[i].set(rows_a, warp_m + 8 * i + g, a_at, group);
    if constexpr (kBAlongK) {
#pragma unroll
      for (int j = 0; j < kBlocksN; ++j) b[j].set(rows_b, warp_n + 8 * j + g, kBytesA, group);
    } else {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        u32 shift = static_cast<u32>(reinterpret_cast<tc_int64>(rows_b.tile) +
                                     (2 * t + i) * rows_b.stride) &
                    15;
        b_at[i] = kBytesA + (16 * kSteps * group + 2 * t + i) * kPitchB + (shift & ~3u) +
                  2 * (warp_n + kBlocksN * g);
        b_bits[i] = (shift & 2) * 8;
      }
    }
#pragma unroll
    for (int i = 0; i < kBlocksM; ++i)
#pragma unroll
      for (int j = 0; j < kBlocksN; ++j)
#pragma unroll
        for (int r = 0; r < 4; ++r) sum[i][j][r] = 0;
  }

  // Multiplies one stretch of the k tile at `tile`. With kTail only k_left of its elements exist.
  template <bool kTail>
  TC_DEVICE void multiply(u32 tile, int stretch, int k_left) {
    u32 stage = tile + stretch * 128, b_stage = tile + stretch * (kStretch * kPitchB);
    u32 rows[2 * kBlocksM][2 * kSteps];
#pragma unroll
    for (int i = 0; i < 2 * kBlocksM; ++i) a[i].template load<kTail>(rows[i], stage, k_left, group);
    u32 columns[kBAlongK ? kBlocksN : 1][2 * kSteps];
    if constexpr (kBAlongK) {
#pragma unroll
      for (int j = 0; j < kBlocksN; ++j)
        b[j].template load<kTail>(columns[j], stage, k_left, group);
    }
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
      u32 low[kBlocksN], high[kBlocksN];
      if constexpr (kBAlongK) {
#pragma unroll
        for (int j = 0; j < kBlocksN; ++j) {
          low[j] = columns[j][2 * step];
          high[j] = columns[j][2 * step + 1];
        }
      } else {
        pairs_of(low, b_stage + 16 * step * kPitchB);
        pairs_of(high, b_stage + (16 * step + 8) * kPitchB);
      }
#pragma unroll
      for (int i = 0; i < kBlocksM; ++i) {
        u32 words[4] = {rows[2 * i][2 * step], rows[2 * i + 1][2 * step], rows[2 * i][2 * step + 1],
                        rows[2 * i + 1][2 * step + 1]};
#pragma unroll
        for (int j = 0; j < kBlocksN; ++j) mma<kDType>(sum[i][j], words, low[j], high[j]);
      }
    }
  }

  // B along N: loads pairs along K (two rows) of this thread's kBlocksN columns.
  TC_DEVICE void pairs_of(u32 (&out)[kBlocksN], u32 stage) const {
    u32 even[kBlocksN / 2 + 1], odd[kBlocksN / 2 + 1];
#pragma unroll
    for (int i = 0; i < kBlocksN / 2 + 1; ++i) {
      even[i] = load_word(stage + b_at[0] + 4 * i);
      odd[i] = load_word(stage + b_at[1] + 4 * i);
    }
#pragma unroll
    for (int i = 0; i < kBlocksN / 2; ++i) {
      u32 x = shifted(even[i], even[i + 1], b_bits[0]);
      u32 y = shifted(odd[i], odd[i + 1], b_bits[1]);
      out[2 * i] = __byte_perm(x, y, 0x5410);
      out[2 * i + 1] = __byte_perm(x, y, 0x7632);
    }
  }

  // Stores the sums to shared memory, with rows kSumPitch floats apart.
  TC_DEVICE void store(u32 shared, int warp_m, int warp_n) const {
    int g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
#pragma unroll
    for (int i = 0; i < kBlocksM; ++i) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        u32 row = shared + ((warp_m + 16 * i + 8 * half + g) * kSumPitch + warp_n) * 4;
        if constexpr (kBAlongK) {
#pragma unroll
          for (int j = 0; j < kBlocksN; ++j) {
            const float* s = sum[i][j] + 2 * half;
            asm volatile("st.shared.v2.f32 [%0], {%1, %2};" ::"r"(row + (8 * j + 2 * t) * 4),
                         "f"(s[0]), "f"(s[1])
                         : "memory");
          }
        } else {
#pragma unroll
          for (int c = 0; c < 2; ++c) {
#pragma unroll
            for (int j = 0; j < kBlocksN; j += 4) {
              const u32 to = row + (kBlocksN * (2 * t + c) + j) * 4;
              const int s = 2 * half + c;
              if constexpr (kBlocksN < 4) {
                asm volatile("st.shared.v2.f32 [%0], {%1, %2};" ::"r"(to), "f"(sum[i][j][s]),
                             "f"(sum[i][j + 1][s])
                             : "memory");
              } else {
                float values[4] = {sum[i][j][s], sum[i][j + 1][s], sum[i][j + 2][s],
                                   sum[i][j + 3][s]};
                store_shared(to, values);
              }
            }
          }
        }
      }
    }
  }
};

// Adds the sums of the tile's rows [first, last), of all splits or (with kSplit false) of this
// block, and stores them to C.
template <bool kSplit>
TC_DEVICE void finish(const MatmulParams& p, u32 shared, Element* c, int first, int last,
                      int columns, tc_int64 n0) {
  constexpr int kLanes = kTileN / 2;  // per row
  constexpr int kSplits = kSplit ? kMostSplits : 1;
  int column = threadIdx.x % kLanes * 2;
  if (column >= columns) return;
  bool both = column + 1 < columns;
  float bias[2] = {};
  if (p.bias != nullptr) {
    bias[0] = load_bias<kDType>(p, n0 + column);
    if (both) bias[1] = load_bias<kDType>(p, n0 + column + 1);
  }
  bool pairs = p.n % 2 == 0 && reinterpret_cast<u64>(c) % (2 * kSize) == 0;
  u32 from[kSplits];
#pragma unroll
  for (int s = 0; s < kSplits; ++s) {
    from[s] = shared + column * 4;
    if (kSplit) from[s] = map_to_rank(from[s], s < p.splits ? s : 0);
  }
#pragma unroll 2
  for (int row = first + threadIdx.x / kLanes; row < last; row += kThreads / kLanes) {
    float x[kSplits][kGroups][2] = {};
#pragma unroll
    for (int s = 0; s < kSplits; ++s) {
#pragma unroll
      for (int g = 0; g < kGroups; ++g) {
        u32 at = from[s] + (row * kSumPitch + g * kSums) * 4;
        if (s < 2 || s < p.splits) load_pair<kSplit>(x[s][g], at);
      }
    }
    float sums[2] = {kInOrder ? -0.0f : 0.0f, kInOrder ? -0.0f : 0.0f};
#pragma unroll
    for (int s = 0; s < kSplits; ++s) {
#pragma unroll
      for (int g = 0; g < kGroups; ++g) {
        sums[0] += x[s][g][0];
        sums[1] += x[s][g][1];
      }
    }
    const float first_of_pair = sums[0] + bias[0], second = sums[1] + bias[1];
    const u32 pair = packed<kDType>(first_of_pair, second);
    Element* to = c + row * p.n + column;
    if (pairs) {
      if constexpr (kTf32) {
        *reinterpret_cast<uint2*>(to) = make_uint2(pair, __float_as_uint(second));
      } else {
        *reinterpret_cast<u32*>(to) = pair;
      }
    } else {
      to[0] = static_cast<Element>(pair);
      if (both) to[1] = kTf32 ? __float_as_uint(second) : static_cast<Element>(pair >> 16);
    }
  }
}

extern "C" __global__ void __launch_bounds__(kThreads, 2)
    TC_KERNEL(const __grid_constant__ MatmulParams p) {
  extern __shared__ __align__(1024) unsigned char memory[];
  u32 shared = shared_address(memory);
  int splits = p.splits;
  int rank = splits > 1 ? static_cast<int>(cluster_rank()) : 0;
  TileIndex index = tile_index<kTileM>(p, blockIdx.x / splits);

  tc_int64 m0 = static_cast<tc_int64>(index.m) * kTileM,
           n0 = static_cast<tc_int64>(index.n) * kTileN;
  tc_int64 k_begin = min(rank * p.k_tiles_per_split * kTileK, p.k);
  tc_int64 k_end = min(k_begin + p.k_tiles_per_split * kTileK, p.k);
  tc_int64 a_batch = 0, b_batch = 0;
  u32 rest = index.batch;
#pragma unroll
  for (int i = 0; i < kMaxBatchDims; ++i) {
    if (rest == 0) break;
    u32 size = static_cast<u32>(p.batch_size[i]), next = rest / size;
    a_batch += (rest - next * size) * p.a_batch_stride[i];
    b_batch += (rest - next * size) * p.b_batch_stride[i];
    rest = next;
  }
  int rows = to_int(p.m - m0), columns = to_int(p.n - n0), all_k = to_int(p.k - k_begin);
  int count = static_cast<int>((k_end - k_begin + kTileK - 1) / kTileK);
  Rows a, b;
  a.set(static_cast<const Element*>(p.a) + a_batch, p.a_stride_m, p.m, p.k, m0, k_begin, true);
  if constexpr (kBAlongK) {
    b.set(static_cast<const Element*>(p.b) + b_batch, p.b_stride_n, p.n, p.k, n0, k_begin, true);
  } else {
    b.set(static_cast<const Element*>(p.b) + b_batch, p.b_stride_k, p.k, p.n, k_begin, n0, false);
  }

  int warp = __shfl_sync(~0u, threadIdx.x / 32, 0), lane = threadIdx.x % 32;
  int group = warp / (kWarpsM * kWarpsN);
  int warp_m = warp / kWarpsN % kWarpsM * kWarpM, warp_n = warp % kWarpsN * kWarpN;
  // Of x @ x.t(): where the tile's rows are among its columns, these are copied once.
  const bool same = kBAlongK && p.a == p.b && p.m == p.n && a_batch == b_batch &&
                    p.a_stride_m == p.b_stride_n && n0 <= m0 && m0 < n0 + kTileN;
  Multiplier math(a, b, warp_m, warp_n, group,
                  same ? kBytesA + static_cast<u32>(m0 - n0) * kPitchB : 0);
  bool computes = warp_m < rows && warp_n < columns;

  // Every warp copies the same number of rows of a stage.
  bool copies = lane < kRowsEach;
  RowCopy copy;
  int row = warp * kRowsEach + lane;
  bool of_a = row < kRowsA;
  copy.row = of_a ? row : row - kRowsA;
  copy.most = of_a || kBAlongK ? kTileK : kTileN;
  copy.target = of_a ? copy.row * kPitchA : kBytesA + copy.row * kPitchB;
  copy.advance = of_a ? a.advance : b.advance;
  copy.low = of_a ? a.low : b.low;
  copy.high = of_a ? a.high : b.high;
  copy.from = (of_a ? a.tile : b.tile) + copy.row * (of_a ? a.stride : b.stride);

  u32 full = shared + kStages * kStageBytes;
  if (threadIdx.x == 0) {
    for (int s = 0; s < kStages; ++s) barrier_init(full + 8 * s, kRowsA + kRowsB);
    fence_barrier_init();
  }
  __syncthreads();

  wait_for_previous_grid();
  int read = 0, write = 0;
  u32 phase = 0;
#pragma unroll 1
  for (int i = 1 - kStages; i < count; ++i) {
    if (i > 0) __syncthreads();  // all threads have read the stage that is filled next
    int next = i + kStages - 1;
    if (next < count && copies) {
      int k_left = all_k - next * kTileK;
      int copied_rows = of_a ? (same ? 0 : rows) : kBAlongK ? columns : k_left;
      int copied_columns = of_a || kBAlongK ? k_left : columns;
      copy.copy(copied_rows, copied_columns, !kBAlongK && !of_a, shared + write * kStageBytes,
                full + 8 * write);
    }
    if (next + 1 == max(min(count, kStages), 1)) launch_next_grid();
    if (++write == kStages) write = 0;
    if (i < 0) continue;
    barrier_wait(full + 8 * read, phase);
    if (computes) {
      int k_left = all_k - i * kTileK;
      u32 stage = shared + read * kStageBytes;
#pragma unroll 1
      for (int stretch = 0; stretch < kStretches && k_left > 0; ++stretch, k_left -= kStretch) {
        if (k_left >= kStretch) {
          math.multiply<false>(stage, stretch, kStretch);
        } else {
          math.multiply<true>(stage, stretch, k_left);
        }
      }
    }
    if (++read == kStages) {
      read = 0;
      phase ^= 1;
    }
  }
  __syncthreads();  // all threads have read the last tile: its memory is free

  math.store(shared + group * (kSums * 4), warp_m, warp_n);
  Element* c =
      static_cast<Element*>(p.c) + (static_cast<tc_int64>(index.batch) * p.m + m0) * p.n + n0;
  if (splits == 1) {
    __syncthreads();
    finish<false>(p, shared, c, 0, min(rows, kTileM), columns, n0);
    return;
  }
  cluster_sync_unaligned();
  int each = (kTileM + splits - 1) / splits, first = rank * each;
  finish<true>(p, shared, c, first, min(min(first + each, kTileM), rows), columns, n0);
  cluster_meet();  // a block must not exit while another reads its sums
}

}  // namespace torch_cubin::TC_KERNEL

/* torch_cubin kernels
{"virtual_arch": ["90a"],
 "defaults": {
  "kind": "unaligned", "layout": "{layout}", "tile": "{t.tile}", "block": [256, 1, 1],
  "stages": "{t.stages}", "dynamic_shared": "{t.shared_{layout}}",
  "defines": {"TC_DTYPE": "{d.dtype}", "TC_LAYOUT": "{layout}", "TC_IN_ORDER": 0}},
 "kernels": [
  {"name": "unaligned_matmul_{d.short}_{layout}_{t.tile.0}x{t.tile.1}", "alignment": 2,
   "cost": {"later": 1, "later_in_large": 1.5},
   "for": {
    "d": "bf16 f16", "layout": ["nn"],
    "t": [{"tile": [32, 64, 128], "stages": 4, "shared_nn": 108576}]}},
  {"name": "unaligned_matmul_{d.short}_{layout}_{t.tile.0}x{t.tile.1}", "alignment": 2,
   "cost": {"later": 0.7, "later_in_large": 0.7},
   "for": {
    "d": "bf16 f16", "layout": ["nt"],
    "t": [{"tile": [32, 64, 256], "stages": 2, "shared_nt": 101392}]}},
  {"name": "unaligned_matmul_{d.short}_{layout}_{t.tile.0}x{t.tile.1}", "alignment": 2,
   "cost": {"later": 1, "later_in_large": 1.5},
   "for": {
    "d": "bf16 f16", "layout": ["nt"],
    "t": [{"tile": [64, 64, 128], "stages": 3, "shared_nt": 104472}]}},
  {"name": "unaligned_matmul_{d.short}_{layout}_in_order_{t.tile.0}x{t.tile.1}", "alignment": 2,
   "cost": {"first": 1.35, "later": 1.27, "later_in_large": 1.27}, "in_order": 1,
   "defines": {"TC_IN_ORDER": 1},
   "for": {
    "d": "bf16 f16", "layout": ["nt"],
    "t": [{"tile": [32, 64, 256], "stages": 2, "shared_nt": 101392}]}},
  {"name": "unaligned_matmul_{d.short}_{layout}_in_order_{t.tile.0}x{t.tile.1}", "alignment": 2,
   "cost": {"later": 1.2, "later_in_large": 1.2}, "in_order": 1, "defines": {"TC_IN_ORDER": 1},
   "for": {
    "d": "bf16 f16", "layout": ["nn"],
    "t": [{"tile": [32, 64, 128], "stages": 4, "shared_nn": 108576}]}},
  {"name": "unaligned_matmul_tf32_{layout}_{t.tile.0}x{t.tile.1}", "alignment": 4,
   "cost": {"later": 0.6, "later_in_large": 0.6},
   "for": {
    "d": "tf32", "layout": ["nt"],
    "t": [{"tile": [32, 64, 128], "stages": 2, "shared_nt": 101392}]}}]}
*/
