// Attention forward for few query rows and many columns: decoding with a KV cache. Bound by the
// memory bandwidth of k and v.
//
// The rows of a tile are (query row, head of the group), so that the heads that share k and v read
// them once: tile row r of KV head h is query row r / group of head h * group + r % group. grid.x =
// ceil(seqlen_q * group / 16) * (heads / group) * batch, and grid.y splits the columns.
//
// Keys and values may be a cache (decode_params.h): its lengths and pages are read on the device,
// and each sequence is split by its own length. Blocks past its parts write an empty part and exit.
//
// All warps of a block have the same 16 rows and take 16 columns of a tile each, in rings of their
// own: they do not wait for each other until they combine their results, in the order of the warps.
// Every feature of AttentionParams is supported; an unused one costs a branch.
//
// Caches of e4m3 (decode_params.h) are converted to float16, which is exact, before they reach the
// tensor cores, and so are queries of bfloat16, each row scaled by a power of two so that it fits.
// ldmatrix moves 16-bit elements, so with bytes a lane gets four adjacent columns of a key, and the
// depth of q . k is permuted in both operands; of values it gets two adjacent columns of two keys,
// so the even and the odd columns of 16 make an n8 tile each. The file is long because both kinds
// of keys share everything else.
#include "attention/portable/epilogue.cuh"
#include "attention/portable/equal_sequence.cuh"
#include "attention/portable/score.cuh"
#include "attention/portable/softmax.cuh"
#include "columns.cuh"
#include "common/dropout.cuh"
#include "mask_numbers.cuh"

namespace torch_cubin::TC_KERNEL {

struct Config {
  static constexpr DType kDType = DType::TC_DTYPE;
  static constexpr int kTileM = TC_TILE_M, kTileN = TC_TILE_N, kTileK = TC_TILE_K;
  static constexpr int kStages = TC_STAGES, kThreads = TC_THREADS, kMinBlocks = TC_MIN_BLOCKS;
  static constexpr int kDynamicShared = TC_DYNAMIC_SHARED;
#ifdef TC_E4M3
  static constexpr bool kE4m3 = true;  // of keys and values
#else
  static constexpr bool kE4m3 = false;
#endif
};

constexpr DType kDType = Config::kDType;
using Traits = DTypeTraits<kDType>;
using Storage = Traits::Storage;
constexpr int kWarps = Config::kThreads / 32;
constexpr int kElement = Config::kE4m3 ? 1 : 2;  // bytes of a key's or value's element
constexpr int kRowBytes = Config::kTileK * kElement;
constexpr int kTileBytes = 16 * kRowBytes;
constexpr int kStageBytes = 2 * kTileBytes;  // k, then v
constexpr int kSteps = Config::kTileK / 16;
constexpr int kOutTiles = Config::kTileK / 8;
static_assert(Config::kTileM == 16 && Config::kTileN == 16 * kWarps, "a warp takes 16 columns");
static_assert(kWarps * Config::kStages * kStageBytes == Config::kDynamicShared,
              "the kernel table's memory");
// Floats from one row of a warp's results to the next: so that stores have no bank conflicts.
constexpr int kResultRow = Config::kTileK + (Config::kE4m3 ? 16 : 8);
static_assert(Config::kStages * kStageBytes >= 16 * kResultRow * 4,
              "a warp's results fit into its ring");

// The row of a tile: a query row of one head.
struct PackedRow {
  int row, head;

  TC_DEVICE PackedRow(const AttentionParams& p, int kv_head, int packed) {
    row = static_cast<u32>(packed) / static_cast<u32>(p.group);
    head = kv_head * p.group + packed - row * p.group;
  }
};

// This warp's 16 columns of tiles of k or v.
struct WarpCopy {
  static constexpr int kLanes = kRowBytes < 128 ? kRowBytes / 16 : 8;  // lanes of a row
  static constexpr int kRows = 32 / kLanes, kPasses = 16 / kRows;
  const char* global;  // this lane's vector of the first row; in the pool, for paged caches
  tc_int64 row_bytes;
  int bytes_left;

  WarpCopy() = default;
  TC_DEVICE WarpCopy(const void* first_row, tc_int64 row_bytes_, int column_bytes, bool paged)
      : row_bytes(row_bytes_) {
    int lane = threadIdx.x % kLanes;
    global = static_cast<const char*>(first_row) + (paged ? 0 : row() * row_bytes) + lane * 16;
    bytes_left = column_bytes - lane * 16;
  }
  static TC_DEVICE int row() { return threadIdx.x % 32 / kLanes; }

  // Copies this lane's row of a pass, `offset` bytes after `global`.
  TC_DEVICE void copy_row(u32 stage, int pass, int rows_left, tc_int64 offset) const {
#pragma unroll
    for (int v = 0; v < (kRowBytes + 127) / 128; ++v) {
      u32 to =
          Swizzle<kRowBytes, true>::offset(row() + kRows * pass, threadIdx.x % kLanes) + v * 128;
      cp_async<16>(stage + to, global + offset + v * 128,
                   row() + kRows * pass < rows_left && v * 128 < bytes_left);
    }
  }

  TC_DEVICE void copy_next(u32 stage, int rows_left) {
#pragma unroll
    for (int pass = 0; pass < kPasses; ++pass) {
      copy_row(stage, pass, rows_left, kRows * pass * row_bytes);
    }
    global += Config::kTileN * row_bytes;
  }
};

// The addresses of the 16 rows that the warp copies next. Pages are requested ahead, because they
// come from memory. Pages of a multiple of 16 rows contain all 16: lane l has the page of the l-th
// tile from here on, and then that of 32 tiles later. Of other pages lane l has that of row l % 16,
// and then that of the next tile; so do wider heads, for which registers are short.
struct PagedRows {
  static constexpr bool kIsWide = Config::kTileK > 128;
  static constexpr int kAhead = kIsWide ? 1 : 2, kTiles = 32;
  u32 page[kAhead];
  int tile;  // of kTiles

  static TC_DEVICE bool has_one_page(const DecodeParams& p) {
    return !kIsWide && p.page_size % 16 == 0;
  }

  TC_DEVICE void begin(const DecodeParams& p, int batch, int column, int columns) {
    tile = 0;
    if (p.block_table == nullptr || !p.cache) return;
    int step = has_one_page(p) ? kTiles * Config::kTileN : Config::kTileN;
#pragma unroll
    for (int i = 0; i < kAhead; ++i) page[i] = fetch(p, batch, column + i * step, columns);
  }

  // Call after the copy of the tile at `column`.
  TC_DEVICE void step(const DecodeParams& p, int batch, int column, int columns) {
    int ahead = kAhead * Config::kTileN;
    if (has_one_page(p)) {
      if (++tile < kTiles) return;
      tile = 0;
      ahead = (kTiles + 1) * Config::kTileN;
    }
    if (kAhead == 2) page[0] = page[1];
    page[kAhead - 1] = fetch(p, batch, column + ahead, columns);
  }

  static TC_DEVICE u32 fetch(const DecodeParams& p, int batch, u32 column, int columns) {
    const int* table = p.block_table + batch * p.block_table_stride;
    u32 own = column + (has_one_page(p) ? threadIdx.x % 32 * Config::kTileN : threadIdx.x % 16);
    return own < static_cast<u32>(columns) ? __ldg(table + own / p.page_size) : 0;
  }

  TC_DEVICE void copy(const DecodeParams& p, const WarpCopy& k, const WarpCopy& v, u32 stage,
                      int column, int columns) const {
    u32 row = (column + threadIdx.x % 16) % p.page_size;
#pragma unroll
    for (int pass = 0; pass < WarpCopy::kPasses; ++pass) {
      int lane = WarpCopy::row() + WarpCopy::kRows * pass;
      int from = has_one_page(p) ? tile : lane;
      tc_int64 its_page = min(__shfl_sync(~0u, page[0], from), p.pages - 1u);
      tc_int64 its_row = __shfl_sync(~0u, row, lane);
      k.copy_row(stage, pass, columns - column,
                 its_page * (p.k_stride[0] * kElement) + its_row * (p.k_stride[2] * kElement));
      v.copy_row(stage + kTileBytes, pass, columns - column,
                 its_page * (p.v_stride[0] * kElement) + its_row * (p.v_stride[2] * kElement));
    }
  }
};

// The factor of e4m3 keys or values.
TC_DEVICE float descale_of(const float* descale, const tc_int64 (&stride)[2], const Sequence& s) {
  return descale != nullptr ? descale[s.batch * stride[0] + s.kv_head * stride[1]] : 1.0f;
}

// Whether MaskNumbers adds a mask's numbers. Wider heads lack the registers for it, and no call has
// a mask and keys of e4m3.
constexpr bool kMaskAhead = Config::kTileK <= 128 && !Config::kE4m3;

struct DecodeRule : ScoreRule<kDType> {
  using ScoreRule<kDType>::ScoreRule;
  static TC_DEVICE bool reads_mask(const AttentionParams& p) {
    return !kMaskAhead && p.mask != nullptr;
  }
  TC_DEVICE bool has_mask() const { return reads_mask(p); }
};

// This lane's elements of q: of each of its rows the first, and how many columns follow.
struct QueryRows {
  const Storage* row[2];
  int columns[2];

  TC_DEVICE QueryRows(const DecodeParams& p, const Sequence& s, const PackedRow (&rows)[2]) {
    int first = threadIdx.x % 4 * (Config::kE4m3 ? 4 : 2);  // adjacent columns of a lane
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      columns[h] = rows[h].row < s.rows ? p.head_dim - first : 0;
      Sequence of_head = s;
      of_head.head = rows[h].head;
      row[h] = static_cast<const Storage*>(p.q) +
               of_head.q_offset(p, p.q_stride, columns[h] > 0 ? rows[h].row : 0) + first;
    }
  }
};

struct Decode {
  u32 q[kSteps][4];
  float out[kOutTiles][4];
  float score[2][4];
  float reference[2], sum[2];  // of rows g and g + 8; natural units
  float unit[2];               // e4m3: the factor of those rows' products

  // Requests q, all of it before the first use.
  TC_DEVICE void request(const QueryRows& from) {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
#pragma unroll
      for (int step = 0; step < kSteps; ++step) {
        if constexpr (Config::kE4m3) {
          uint2 words = make_uint2(0, 0);
          if (16 * step < from.columns[h]) {
            words = *reinterpret_cast<const uint2*>(from.row[h] + 16 * step);
          }
          q[step][h] = words.x;
          q[step][h + 2] = words.y;
        } else {
#pragma unroll
          for (int half = 0; half < 2; ++half) {
            int column = 16 * step + 8 * half;
            u32& word = q[step][h + 2 * half];
            word = 0;
            if (column < from.columns[h]) {
              word = *reinterpret_cast<const u32*>(from.row[h] + column);
            }
          }
        }
      }
    }
  }

  TC_DEVICE void begin(const DecodeParams& p, const Sequence& s) {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      reference[h] = kLowest;
      sum[h] = 0.0f;
      if constexpr (Config::kE4m3) {
        unit[h] = p.bfloat16 ? fit_into_f16(h) : 1.0f;
        unit[h] *= descale_of(p.k_descale, p.k_descale_stride, s);
      }
    }
#pragma unroll
    for (int n = 0; n < kOutTiles; ++n)
#pragma unroll
      for (int e = 0; e < 4; ++e) out[n][e] = 0.0f;
  }

  // Converts a row of q from bfloat16 to float16, scaling its largest element to [2^14, 2^15).
  // Returns the power of two to multiply the products with. Exact for elements of at least 2^-28 of
  // the largest.
  TC_DEVICE float fit_into_f16(int h) {
    u32 most = 0;
#pragma unroll
    for (int step = 0; step < kSteps; ++step)
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        u32 word = q[step][h + 2 * half];
        most = max(most, max(word & 0x7fffu, (word >> 16) & 0x7fffu));
      }
    most = max(most, __shfl_xor_sync(~0u, most, 1));
    most = max(most, __shfl_xor_sync(~0u, most, 2));
    u32 exponent = min(268 - (most >> 7), 253u);  // of the factor, as float32 stores it
    float factor = __uint_as_float(exponent << 23);
#pragma unroll
    for (int step = 0; step < kSteps; ++step)
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        u32& word = q[step][h + 2 * half];
        word = pack_f16(__uint_as_float(word << 16) * factor,
                        __uint_as_float(word & 0xffff0000u) * factor);
      }
    return __uint_as_float((254 - exponent) << 23);
  }

  TC_DEVICE void multiply_qk(const FragmentAddress<Fragment::b, kRowBytes>& k_address, u32 stage) {
    float odd[2][4];  // a second sum, so that an mma need not wait for the previous one
#pragma unroll
    for (int n = 0; n < 2; ++n)
#pragma unroll
      for (int e = 0; e < 4; ++e) score[n][e] = odd[n][e] = 0.0f;
    if constexpr (Config::kE4m3) {
#pragma unroll
      for (int step = 0; step < kSteps; step += 2) {
        u32 k[4];
        k_address.load(k, stage, 0, 8 * step);
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          mma<kDType>(i % 2 ? odd[i / 2] : score[i / 2], q[step + i % 2], e4m3_to_f16(k[i]),
                      e4m3_to_f16(k[i] >> 16));
        }
      }
    } else {
#pragma unroll
      for (int step = 0; step < kSteps; ++step) {
        u32 k[4];
        k_address.load(k, stage, 0, 16 * step);
        mma<kDType>(step % 2 ? odd[0] : score[0], q[step], k[0], k[1]);
        mma<kDType>(step % 2 ? odd[1] : score[1], q[step], k[2], k[3]);
      }
    }
#pragma unroll
    for (int n = 0; n < 2; ++n)
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        score[n][e] += odd[n][e];
        if (Config::kE4m3) score[n][e] *= unit[e / 2];
      }
  }

  // Scores to weights; the references follow the maxima as in portable/mma.cu.
  TC_DEVICE void exponentiate() {
    float most[2];
    bool exceeds = false;
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      most[h] = fmaxf(fmaxf(score[0][2 * h], score[0][2 * h + 1]),
                      fmaxf(score[1][2 * h], score[1][2 * h + 1]));
      exceeds |= most[h] - reference[h] > kSlack * kLn2;
    }
    if (__any_sync(~0u, exceeds)) {
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        float moved = fmaxf(reference[h], quad_max(most[h]));
        float factor = exp2_approx((reference[h] - moved) * kLog2e);
        reference[h] = moved;
        sum[h] *= factor;
#pragma unroll
        for (int n = 0; n < kOutTiles; ++n) {
          out[n][2 * h] *= factor;
          out[n][2 * h + 1] *= factor;
        }
      }
    }
#pragma unroll
    for (int n = 0; n < 2; ++n)
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        score[n][e] = exp2_approx((score[n][e] - reference[e / 2]) * kLog2e);
        sum[e / 2] += score[n][e];
      }
  }

  TC_DEVICE void multiply_pv(const FragmentAddress<Fragment::b_transposed, kRowBytes>& v_address,
                             u32 stage) {
    u32 weights[4];
    pack_fragment<kDType>(weights, score[0], score[1]);
    if constexpr (Config::kE4m3) {
#pragma unroll
      for (int n = 0; n < kOutTiles; n += 4) {
        u32 v[4];
        v_address.load(v, stage, 0, 4 * n);
        // Bytes 0 and 2 of a lane's word are the even column of two values, 1 and 3 the odd one.
#pragma unroll
        for (int i = 0; i < 4; ++i) v[i] = __byte_perm(v[i], 0, 0x3120);
#pragma unroll
        for (int i = 0; i < 4; i += 2) {
          mma<kDType>(out[n + i], weights, e4m3_to_f16(v[i]), e4m3_to_f16(v[i + 1]));
          mma<kDType>(out[n + i + 1], weights, e4m3_to_f16(v[i] >> 16),
                      e4m3_to_f16(v[i + 1] >> 16));
        }
      }
    } else {
#pragma unroll
      for (int n = 0; n < kOutTiles / 2; ++n) {
        u32 v[4];
        v_address.load(v, stage, 0, 16 * n);
        mma<kDType>(out[2 * n], weights, v[0], v[1]);
        mma<kDType>(out[2 * n + 1], weights, v[2], v[3]);
      }
    }
  }
};

// Whether a block plans its part, and finds its addresses, before the previous kernel has ended.
// After the wait it requests at once what it has planned, and reads meanwhile whether the lengths
// still are what they were; nearly always they are. Older architectures cannot start a kernel
// early. NOTE: in the other kernels ptxas 13.0 spills with it.
#if __CUDA_ARCH__ >= 900
constexpr bool kPlansEarly = Config::kTileK <= 128;
#else
constexpr bool kPlansEarly = false;
#endif
// Whether the part's first tiles are prefetched, too.
constexpr bool kPrefetches = kPlansEarly && (!Config::kE4m3 || kWarps == 8);

extern "C" __global__ void __launch_bounds__(Config::kThreads, Config::kMinBlocks)
    TC_KERNEL(const __grid_constant__ DecodeParams p) {
  extern __shared__ __align__(1024) unsigned char shared_memory[];
  __shared__ float2 statistics[kWarps][16];  // reference and sum

  const bool cache = Config::kE4m3 || p.cache;
  bool paged = cache && p.block_table != nullptr;
  BlockPlace place(p);
  int batch = uniform(place.batch);
  int packed = uniform(place.tile) * 16, kv_head = uniform(place.kv_head);
  int warp = uniform(threadIdx.x / 32), lane = threadIdx.x % 32;
  PackedRow rows[2] = {PackedRow(p, kv_head, packed + lane / 4),
                       PackedRow(p, kv_head, packed + lane / 4 + 8)};
  auto group = static_cast<u32>(p.group);
  int first_row = packed / group;
  u32 ring = shared_address(shared_memory) + warp * (Config::kStages * kStageBytes);
  if constexpr (!kPlansEarly) wait_for_previous_kernel();

  // The first plan knows no lengths of packed sequences: it is made again once they are read.
  bool unread = kPlansEarly && !has_equal_lengths(p);
  Sequence s = kPlansEarly ? equal_sequence(p, batch, kv_head * p.group)
                           : Sequence(p, batch, kv_head * p.group);
  Decode decode;
  if constexpr (!kPlansEarly) decode.request(QueryRows(p, s, rows));
  Part<Config::kTileN> part{};
  WarpCopy k_copy, v_copy;
  PagedRows pages;
  int last_packed, last_row, column;
  auto copy = [&](int at, u32 stage) {
    if (at < part.end) {
      if (__builtin_expect(!paged, 1)) {
        k_copy.copy_next(stage, s.columns - at);
        v_copy.copy_next(stage + kTileBytes, s.columns - at);
      } else {
        pages.copy(p, k_copy, v_copy, stage, at, s.columns);
        pages.step(p, batch, at, s.columns);
      }
    }
    cp_async_commit();
  };
#pragma unroll 1
  for (;;) {
    CacheLengths lengths(p, cache, batch);
    Sequence of_cache = s;  // the sequence as the cache stores it
    if (cache) {
      of_cache.batch = uniform(lengths.in_cache(p, batch));
      s.columns = uniform(lengths.columns(p));
      int shift = p.flags & kAttendBottomRight ? s.columns - s.rows : 0;
      s.first = p.first == -kNoBound ? -kNoBound : p.first + shift;
      s.last = p.last == kNoBound ? kNoBound : p.last + shift;
    }
    last_packed = min(packed + 16, s.rows * p.group) - 1;
    last_row = static_cast<u32>(last_packed) / group;  // of all rows
    part = Part<Config::kTileN>::of(p, cache, lengths, max(0, first_row + s.first),
                                    min(s.columns, last_row + s.last + 1));
    column = part.begin + 16 * warp;
    int first_column = paged ? 0 : column;
    k_copy = WarpCopy(
        static_cast<const char*>(p.k) + of_cache.k_offset(p, p.k_stride, first_column) * kElement,
        p.k_stride[2] * kElement, p.head_dim * kElement, paged);
    v_copy = WarpCopy(
        static_cast<const char*>(p.v) + of_cache.k_offset(p, p.v_stride, first_column) * kElement,
        p.v_stride[2] * kElement, p.head_dim_v * kElement, paged);
    const QueryRows query(p, s, rows);
    if constexpr (kPrefetches) {
      prefetch_part<Config::kTileN, kElement>(p, cache, place, of_cache.batch, part);
    }
    if constexpr (kPlansEarly) wait_for_previous_kernel();  // it has ended

    if (last_packed < packed) return;
    if (!unread) {
      CacheLengths now(p, kPlansEarly && cache, batch);
      if constexpr (kPlansEarly) decode.request(query);
      if (paged) pages.begin(p, batch, column, s.columns);
      if (!part.none) {
#pragma unroll 1  // unrolled, it would be half of the kernel's code
        for (int i = 0; i < Config::kStages - 1; ++i) {
          copy(column + i * Config::kTileN, ring + i * kStageBytes);
        }
      }
      if constexpr (kPlansEarly) decode.begin(p, s);
      if (!kPlansEarly || lengths.same(now)) break;
    }
    if (unread) {
      const Sequence read(p, batch, kv_head * p.group);
      s.q_row = read.q_row;
      s.k_row = read.k_row;
      s.rows = read.rows;
      s.columns = read.columns;
      s.first = read.first;
      s.last = read.last;
    }
    unread = false;
    cp_async_wait<0>();
    __syncwarp();
  }
  if (__builtin_expect(part.none, 0)) {
    PackedRow row(p, kv_head, packed + threadIdx.x);
    if (threadIdx.x < 16 && row.row < s.rows) {
      Sequence of_head = s;
      of_head.head = row.head;
      *RowOutput<kDType>(p, of_head, row.row).logsumexp = -kInfinity;
    }
    return;
  }
  const int end = part.end;
  if constexpr (!kPlansEarly) decode.begin(p, s);
  const bool adds_mask = kMaskAhead && p.mask != nullptr;
  MaskNumbers<kDType, Config::kTileN> mask(p, column + lane % 4 * 2);
  if (adds_mask) {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      Sequence of_head = s;
      of_head.head = rows[h].head;
      if (rows[h].row < s.rows) mask.set_row(p, of_head, h, rows[h].row);
    }
    mask.request(s.columns - column - lane % 4 * 2);
  }
  // One branch around the code of what few calls have, whose instructions then are not fetched.
  // Wider heads lack a register for it.
  const bool has_rule = Config::kTileK > 128 || p.softcap != 0.0f || p.alibi_slopes != nullptr ||
                        DecodeRule::reads_mask(p);
  FragmentAddress<Fragment::b, kRowBytes> k_address(0);
  FragmentAddress<Fragment::b_transposed, kRowBytes> v_address(0);
#pragma unroll 1
  for (u32 read = ring; column < end; column += Config::kTileN) {
    __syncwarp();  // all lanes have read the stage that is written next
    constexpr int kAhead = Config::kStages - 1;
    copy(column + kAhead * Config::kTileN,
         read == ring ? ring + kAhead * kStageBytes : read - kStageBytes);
    cp_async_wait<Config::kStages - 1>();
    __syncwarp();
    decode.multiply_qk(k_address, read);
    int j = column + lane % 4 * 2;
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      if (!__builtin_expect(has_rule, 0)) break;
      auto each = [&](auto&& function) {
#pragma unroll
        for (int n = 0; n < 2; ++n)
#pragma unroll
          for (int e = 0; e < 2; ++e) {
            float no_grad = 0.0f;
            function(decode.score[n][2 * h + e], no_grad, rows[h].row, j + 8 * n + e, 0);
          }
      };
      Sequence of_head = s;
      int head = rows[h].head;
      if constexpr (!kMaskAhead) {  // it and addresses would be spilled
        head = packed + lane / 4 + 8 * h;
        forget(head);
        forget(of_head.batch);
        head += s.head - rows[h].row * p.group;
      }
      of_head.head = rows[h].row < s.rows ? head : s.head;
      apply_rule(DecodeRule(p, of_head), each, each);
    }
    if (__builtin_expect(!has_rule, 1)) {
#pragma unroll
      for (int n = 0; n < 2; ++n)
#pragma unroll
        for (int e = 0; e < 4; ++e) decode.score[n][e] *= p.scale;
    }
    if (adds_mask) {
      mask.add(decode.score, s.columns - j);
      mask.request_next(s.columns - j - Config::kTileN);
    }
    int its_last = column + 15;
    if constexpr (!kPlansEarly) forget(its_last);  // 15 - first_row would be spilled
    bool whole = column - last_row >= s.first && its_last - first_row <= s.last &&
                 its_last < s.columns;  // visible to all rows
    if (__builtin_expect(!whole, 0)) {
#pragma unroll
      for (int n = 0; n < 2; ++n)
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          SeenColumns seen(s, rows[e / 2].row, 0);
          if (!seen(j + 8 * n + e % 2)) decode.score[n][e] = -kInfinity;
        }
    }
    decode.exponentiate();
    if (!Config::kE4m3 && p.flags & kAttendDropout) {
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        DropoutBits bits(*p.dropout_seed, s.batch * p.heads + rows[h].head, rows[h].row,
                         column / 32, lane % 4);
#pragma unroll
        for (int n = 0; n < 2; ++n)
#pragma unroll
          for (int e = 0; e < 2; ++e) {
            bool kept =
                column % 32 ? bits.kept(2 + n, e, p.drop_below) : bits.kept(n, e, p.drop_below);
            if (!kept) decode.score[n][2 * h + e] = 0.0f;
          }
      }
    }
    decode.multiply_pv(v_address, read + kTileBytes);
    read += kStageBytes;
    if (read == ring + Config::kStages * kStageBytes) read = ring;
  }

  // Each warp's results go to its own ring, as they are; then a thread joins four columns of a row.
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    float sum = quad_sum(decode.sum[h]);
    if (lane % 4 == 0) {
      statistics[warp][lane / 4 + 8 * h] = make_float2(decode.reference[h], sum);
    }
  }
  float descale = 1.0f;
  if constexpr (Config::kE4m3) descale = descale_of(p.v_descale, p.v_descale_stride, s);
  cp_async_wait<0>();
  __syncwarp();  // of this ring the other lanes have read all
  auto mine = reinterpret_cast<float*>(shared_memory + warp * (Config::kStages * kStageBytes));
  int existing = min(16, s.rows * p.group - packed);  // rows
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    if (lane / 4 + 8 * h >= existing) break;
    float* to = mine + (lane / 4 + 8 * h) * kResultRow;
    if constexpr (Config::kE4m3) {
#pragma unroll
      for (int n = 0; n < kOutTiles; n += 2) {
        const auto &even = decode.out[n], &odd = decode.out[n + 1];
        *reinterpret_cast<float4*>(to + 8 * n + lane % 4 * 4) =
            make_float4(even[2 * h], odd[2 * h], even[2 * h + 1], odd[2 * h + 1]);
      }
    } else {
#pragma unroll
      for (int n = 0; n < kOutTiles; ++n) {
        *reinterpret_cast<float2*>(to + 8 * n + lane % 4 * 2) =
            make_float2(decode.out[n][2 * h], decode.out[n][2 * h + 1]);
      }
    }
  }
  __syncthreads();
  constexpr int kParts = Config::kTileK / 4;  // of a row
#pragma unroll 1
  for (int i = threadIdx.x; i < existing * kParts; i += Config::kThreads) {
    int r = i / kParts, first = i % kParts * 4;
    if (first >= p.head_dim_v) continue;
    float2 of_warp[kWarps];
    float reference = kLowest, sum = 0.0f;
#pragma unroll
    for (int w = 0; w < kWarps; ++w) {
      of_warp[w] = statistics[w][r];
      reference = fmaxf(reference, of_warp[w].x);
    }
    float4 total = {};
#pragma unroll
    for (int w = 0; w < kWarps; ++w) {
      float factor = exp2_approx((of_warp[w].x - reference) * kLog2e);
      sum += of_warp[w].y * factor;
      float4 x = *reinterpret_cast<const float4*>(
          shared_memory + w * (Config::kStages * kStageBytes) + (r * kResultRow + first) * 4);
      total.x += x.x * factor;
      total.y += x.y * factor;
      total.z += x.z * factor;
      total.w += x.w * factor;
    }
    PackedRow row(p, kv_head, packed + r);
    Sequence of_head = s;
    of_head.head = row.head;
    RowOutput<kDType> output(p, of_head, row.row);
    float factor = output.finish_joined(p, row.head, 0, first == 0, reference, sum);
    // A row that attends to no key stays 0 for any factor.
    if (Config::kE4m3 && factor != 0.0f) factor *= descale;
    total.x *= factor;
    total.y *= factor;
    total.z *= factor;
    total.w *= factor;
    if (p.splits > 1) {
      *reinterpret_cast<float4*>(output.partial_out + first) = total;
    } else {
      uint2 words;
      if (Config::kE4m3 && p.bfloat16) {
        words = make_uint2(pack_bf16(total.x, total.y), pack_bf16(total.z, total.w));
      } else {
        words = make_uint2(Traits::pack(total.x, total.y), Traits::pack(total.z, total.w));
      }
      *reinterpret_cast<uint2*>(output.out + first) = words;
    }
  }
}

}  // namespace torch_cubin::TC_KERNEL
/* torch_cubin kernels
{"defaults": {
  "kind": "decode",
  "takes": ["plain", "unmasked", "bool_mask", "added_alone", "added_mask", "float_mask", "sinks",
            "rule", "large_softcap"], "tile": "{t.tile}", "block": ["{t.threads}", 1, 1],
  "stages": "{t.stages}", "dynamic_shared": "{t.shared}", "accepted_spill": "{t.spill}",
  "cost": {"k_tile": "{t.k_tile}", "fixed": "{t.fixed}"}, "saturating_blocks": "{t.fill}",
  "defines": {"TC_MIN_BLOCKS": "{t.blocks}"}},
 "kernels": [
  {"name": "decode_attention_{d.short}_{t.tile.0}x{t.tile.1}x{t.tile.2}", "archs": "{t.archs}",
   "defines": {"TC_DTYPE": "{d.dtype}"},
   "for": {
    "d": "f16 bf16",
    "t": [
     ["tile", "stages", "threads", "shared", "blocks", "spill", "fill", "archs", "k_tile", "fixed"],
     [[16, 64, 64],  4, 128, 65536, 3, {},              2, null,       700,  8000],
     [[16, 32, 128], 3,  64, 49152, 4, {},              2, null,       900, 11900],
     [[16, 64, 128], 3, 128, 98304, 2, {},              1, ["sm_90a"], 900, 11900],
     [[16, 32, 256], 3,  64, 98304, 2, {"sm_120a": 64}, 2, null,       900,  8000]]}},
  {"name": "decode_attention_e4m3_{t.tile.0}x{t.tile.1}x{t.tile.2}", "dtype": "float8_e4m3fn",
   "math": "float16", "archs": ["sm_90a"], "defines": {"TC_DTYPE": "float16", "TC_E4M3": 1},
   "for": {
    "t": [
     ["tile", "stages", "threads", "shared", "blocks", "spill", "fill", "k_tile", "fixed"],
     [[16, 64, 64],   8, 128,  65536, 3, {}, 2, 700, 6000],
     [[16, 64, 128],  6, 128,  98304, 3, {}, 2, 900, 7000],
     [[16, 128, 128], 4, 256, 131072, 1, {}, 1, 900, 7000],
     [[16, 32, 256],  3,  64,  49152, 4, {}, 2, 900, 8000]]}}]}
*/
