// Matrix product on Hopper of operands whose rows begin at any address, without a copy, by the
// tensor cores at nearly the speed of aligned ones.
//
// The TMA reads 16-byte vectors alone. But of a matrix whose rows begin anywhere, every V-th row (V
// elements are 16 bytes) begins equally far behind a multiple of 16 bytes: these rows of one
// residue are a matrix that the TMA can describe, if its columns begin at that multiple, up to
// V - 1 elements (the shift) before the rows. So a block computes rows of S of one residue, all
// with one shift, which wgmma reads from shared memory as the TMA wrote them. The other operand, R,
// goes through registers: its elements of K are taken the same shift earlier, from rows that lie in
// shared memory as they do in memory, by words and a funnel shift.
//
//   shared memory: kStages x (S's rows of 128 bytes, R's rows) | barriers
//   R along K: rows of a residue lie together, 16 bytes longer than those of S
//
// Elements before a row's first one and behind its last one belong to other rows. They may be
// infinite, so that both operands are zeroed there, in the first and last k blocks alone.
//
// K of few tiles is divided over the blocks of a cluster, which add their sums through shared
// memory, in a fixed order.
//
// What a block computes, loads, multiplies and stores depends on the residues alike: the file is
// over 500 lines for that.
#include "common/dtype.cuh"
#include "common/hopper.cuh"
#include "common/wgmma.cuh"
#include "residues_params.h"
#include "sm90_block.cuh"

namespace torch_cubin::TC_KERNEL {

using namespace sm90;

constexpr DType kDType = DType::TC_DTYPE;
constexpr int kTileR = TC_TILE_M, kTileS = TC_TILE_N, kStages = TC_STAGES;
constexpr int kConsumers = TC_THREADS / kWarpgroup - 1, kBlocks = kTileR / 64 / kConsumers;
constexpr int kElement = 2, kVector = 16 / kElement, kTileK = 128 / kElement;
static_assert(kTileK == TC_TILE_K, "128 bytes of K");
// A k block is multiplied in parts, so that R's next part and this one fit into the registers.
constexpr int kParts = kBlocks, kSteps = 4 / kParts;  // wgmma along a part
constexpr int kPartK = kTileK / kParts;
constexpr int kBytesS = kTileS * 128, kBytesR = kTileR * 128;
constexpr int kStageBytes = kBytesS + kBytesR;
constexpr int kSharedBytes = kStages * (kStageBytes + 16);
constexpr int kThreads = kWarpgroup * (1 + kConsumers);
constexpr int kPitchS = kTileR + 1, kPitchR = kTileS + 4;  // floats of a row of sums
static_assert(kTileR % (64 * kConsumers) == 0 && kTileS % 8 == 0 && kThreads == TC_THREADS);
static_assert(kTileS * kPitchS * 4 <= kStages * kStageBytes);
static_assert(kTileR * kPitchR * 4 <= kStages * kStageBytes);
static_assert(kSharedBytes == TC_DYNAMIC_SHARED, "the kernel table's shared memory");
constexpr int kConsumerBarrier = 1;

using Element = u16;

TC_DEVICE u32 load_word(u32 shared) {
  u32 word;
  asm volatile("ld.shared.b32 %0, [%1];" : "=r"(word) : "r"(shared) : "memory");
  return word;
}

TC_DEVICE void store_element(u32 shared, u16 x) {
  asm volatile("st.shared.u16 [%0], %1;" ::"r"(shared), "h"(x) : "memory");
}

TC_DEVICE void store_sum(u32 shared, float x) {
  asm volatile("st.shared.f32 [%0], %1;" ::"r"(shared), "f"(x) : "memory");
}

template <bool kRemote>
TC_DEVICE float load_sum(u32 shared) {
  float value;
  if constexpr (kRemote) {
    asm volatile("ld.shared::cluster.f32 %0, [%1];" : "=f"(value) : "r"(shared) : "memory");
  } else {
    asm volatile("ld.shared.f32 %0, [%1];" : "=f"(value) : "r"(shared) : "memory");
  }
  return value;
}

// What a block computes, and of which elements of K. Element j of its k block i is k = i * kTileK +
// j - shift.
struct Tile {
  int batch;
  int residue, first_s, first_r;  // the first row of S among those of the residue; of R
  int own_residue, own_row;  // of S's matrix of all batches: residue, and row of the TMA's view
  int shift;
  int begin, end;  // k blocks
  int blocks;      // of all of K

  TC_DEVICE Tile(const ResidueParams& p, int rank) {
    int index = static_cast<int>(blockIdx.x) / p.splits;
    int of_s = index / p.tiles_r;
    first_r = (index - of_s * p.tiles_r) * kTileR;
    residue = of_s % kVector;
    of_s /= kVector;
    batch = p.batch > 1 ? of_s / p.tiles_s : 0;
    first_s = (of_s - batch * p.tiles_s) * kTileS;
    const int base = batch * p.s.batch_rows + residue;
    own_residue = base % kVector;
    own_row = base / kVector + first_s;
    shift = (own_residue * p.s.stride + p.s.offset) % kVector;
    blocks = (shift + p.k + kTileK - 1) / kTileK;
    int each = (blocks + p.splits - 1) / p.splits;
    begin = min(rank * each, blocks);
    end = min(begin + each, blocks);
  }

  // Those of k block i's elements that are elements of K.
  TC_DEVICE int low(int i) const { return i == 0 ? shift : 0; }
  TC_DEVICE int high(const ResidueParams& p, int i) const {
    return min(kTileK, shift + p.k - i * kTileK);
  }
  TC_DEVICE bool is_whole(const ResidueParams& p, int i) const {
    return low(i) == 0 && high(p, i) == kTileK;
  }
};

TC_DEVICE const Sm90TensorMap& map_of(const ResidueRows& rows, int residue) {
  return rows.map[residue < rows.rows % kVector];
}

// R's rows of a residue, as they lie in shared memory: kTileR / V rows of 128 bytes, which begin up
// to V - 1 elements before the k block's. `place` counts residues from the first row of the tile.
struct ResidueOfR {
  const Sm90TensorMap* map;
  int row, column;  // of the TMA's view, in the first k block
  int shift;        // elements before the first one wanted

  TC_DEVICE ResidueOfR(const ResidueParams& p, const Tile& tile, int place) {
    const int first = tile.batch * p.r.batch_rows + place + tile.first_r;
    const int residue = first % kVector;
    row = (first - residue) / kVector;
    map = &map_of(p.r, residue);
    const int begin = residue * p.r.stride + p.r.offset - tile.shift;
    shift = (begin + kVector) % kVector;
    column = begin - shift;
  }
};

// ---- producers: each warp loads a quarter of R's residues, and the first one S

constexpr int kProducers = 4;
constexpr int kResidues = kVector / kProducers;
constexpr int kBoxBytes = kTileR / kVector * 128;

TC_DEVICE void produce(const ResidueParams& p, const Tile& tile, int warp, u32 shared, u32 full,
                       u32 empty) {
  const Sm90TensorMap* const map = &map_of(p.s, tile.own_residue);
  int column = tile.own_residue * p.s.stride + p.s.offset - tile.shift + tile.begin * kTileK;
  const Sm90TensorMap* maps[kResidues];
  int columns[kResidues], rows[kResidues];
#pragma unroll
  for (int j = 0; j < kResidues; ++j) {
    const ResidueOfR r(p, tile, warp * kResidues + j);
    maps[j] = r.map;
    columns[j] = r.column + tile.begin * kTileK;
    rows[j] = r.row;
  }
  // What R has of a k block ends in the next one.
  const int last = tile.begin < tile.end ? tile.end + 1 : tile.end;
  int stage = 0;
  u32 phase = 1;
#pragma unroll 1
  for (int i = tile.begin; i < last; ++i) {
    barrier_wait_bounded(empty + 8 * stage, phase);
    const u32 to = shared + stage * kStageBytes, arrived = full + 8 * stage;
    const bool of_s = warp == 0 && i < tile.end;
    barrier_expect(arrived, kBytesR / kProducers + (of_s ? kBytesS : 0));
    if (of_s) tma_load(to, map, arrived, column, tile.own_row);
    column += kTileK;
#pragma unroll
    for (int j = 0; j < kResidues; ++j) {
      const int place = warp * kResidues + j;
      tma_load(to + kBytesS + place * kBoxBytes, maps[j], arrived, columns[j], rows[j]);
      columns[j] += kTileK;
    }
    if (++stage == kStages) {
      stage = 0;
      phase ^= 1;
    }
  }
}

// ---- consumers ----------------------------------------------------------------------------------

// Zeroes those elements of S's tile that are of other rows.
TC_DEVICE void zero_outside(u32 tile, int low, int high) {
#pragma unroll 1
  for (int i = threadIdx.x - kWarpgroup; i < kTileS * 8; i += kWarpgroup * kConsumers) {
    const int row = i / 8, vector = i % 8;
    const u32 to = tile + row * 128 + ((vector ^ (row & 7)) * 16);
#pragma unroll
    for (int j = 0; j < kVector; ++j) {
      const int element = vector * kVector + j;
      if (element >= low && element < high) continue;
      store_element(to + kElement * j, Element(0));
    }
  }
}

// R's elements as wgmma takes them: of the rows row(h) of 64.
struct Reader {
  static constexpr int kRows = 2 * kBlocks;
  // Of rows g and g + 8, of a word and the next one; `ahead`: the word is of the next vector.
  u32 at[kRows][2], ahead[kRows][2];
  u32 bits[kRows];  // to shift words by

  TC_DEVICE Reader(const ResidueParams& p, const Tile& tile, int warp) {
    const int g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      const int own = place(warp, i / 2, i % 2);
      const int shift = kElement * ResidueOfR(p, tile, own / (kTileR / kVector)).shift;
      bits[i] = shift % 4 * 8;
#pragma unroll
      for (int w = 0; w < 2; ++w) {
        const int byte = (shift & ~3) + 4 * (t + w);
        at[i][w] = kBytesS + own * 128 + g * 16 + byte % 16;
        ahead[i][w] = byte >= 16 ? 0x70 : 0;
      }
    }
  }

  // The word of row i, or the one behind it, in vector k of its 128 bytes, whose swizzle is that of
  // the TMA. The vector behind the last one is the first of the next stage.
  TC_DEVICE u32 word(int i, int w, int k, u32 stage, u32 next) const {
    const u32 is_ahead = ahead[i][w];
    if (k == 7) return load_word(((is_ahead ? next : stage) + at[i][w]) ^ (0x70 ^ is_ahead));
    const u32 flips = k % 2 == 0 ? 0x10 : k == 3 ? 0x70 : 0x30;  // from vector k to k + 1
    return load_word((stage + at[i][w]) ^ (k * 16) ^ (is_ahead & flips));
  }

  // The first of a warp's 16 rows in a block of 64.
  static TC_DEVICE int first(int warp, int block) {
    return (warp / 4 * kBlocks + block) * 64 + warp % 4 * 16;
  }
  // The place in shared memory of rows g and g + 8 of wgmma, along K.
  static TC_DEVICE int place(int warp, int block, int half) {
    return first(warp, block) + half * 8 + threadIdx.x % 32 / 4;
  }
  // The row of the tile.
  static TC_DEVICE int row(int warp, int block, int half) {
    const int at = place(warp, block, half);
    return at % (kTileR / kVector) * kVector + at / (kTileR / kVector);
  }

  TC_DEVICE void load(u32 (&a)[kBlocks][kSteps][4], u32 stage, u32 next, int part) const {
#pragma unroll
    for (int i = 0; i < kBlocks; ++i) {
#pragma unroll
      for (int j = 0; j < kSteps; ++j) {
#pragma unroll
        for (int h = 0; h < 2; ++h) {
          const int k = 2 * (part * kSteps + j) + h;
#pragma unroll
          for (int x = 0; x < 2; ++x) {
            a[i][j][2 * h + x] =
                __funnelshift_r(word(2 * i + x, 0, k, stage, next),
                                word(2 * i + x, 1, k, stage, next), bits[2 * i + x]);
          }
        }
      }
    }
  }

  static TC_DEVICE void mask(u32 (&a)[kBlocks][kSteps][4], int part, int low, int high) {
    const int t = threadIdx.x % 4, first = part * kPartK;
#pragma unroll
    for (int j = 0; j < kSteps; ++j) {
#pragma unroll
      for (int x = 0; x < 4; ++x) {
        const int k = first + 16 * j + 2 * t + 8 * (x / 2);
        const u32 keep =
            (k >= low && k < high ? 0xffffu : 0) | (k + 1 >= low && k + 1 < high ? 0xffff0000u : 0);
#pragma unroll
        for (int i = 0; i < kBlocks; ++i) a[i][j][x] &= keep;
      }
    }
  }
};

template <DType kOf, int kN>
TC_DEVICE void multiply(float (&sum)[kBlocks][kN / 2], const u32 (&a)[kBlocks][kSteps][4], u64 s,
                        int add) {
  wgmma_fence();
#pragma unroll
  for (int k = 0; k < kSteps; ++k) {
#pragma unroll
    for (int i = 0; i < kBlocks; ++i) {
      constexpr WgmmaType kType = kOf == DType::bfloat16 ? WgmmaType::bf16 : WgmmaType::f16;
      WgmmaRegisters<kN>::template run<kType, 0>(sum[i], a[i][k], advance(s, k * 32),
                                                 k == 0 ? add : 1);
    }
  }
  wgmma_commit();
}

// Where the sums of S's row `s` and R's row `r` lie, in floats: by rows of S if D is C. Eight rows
// of a residue, 8 apart, then lie in different banks.
TC_DEVICE int place_by_s(int s, int r) { return s * kPitchS + (r ^ (r / 8 % 8)); }

TC_DEVICE void consume(const ResidueParams& p, const Tile& tile, u32 shared, u32 full, u32 empty,
                       int warp) {
  const Reader reader(p, tile, warp);
  const u64 s0 = wgmma_descriptor(shared, 8192, 1024);
  float sum[kBlocks][kTileS / 2];
#pragma unroll
  for (int i = 0; i < kBlocks; ++i)
#pragma unroll
    for (int j = 0; j < kTileS / 2; ++j) sum[i][j] = 0;
  u32 even[kBlocks][kSteps][4], odd[kBlocks][kSteps][4];
  int stage = 0, i = tile.begin, waited = 0, previous = 0;
  u32 phase = 0;
  const bool frees = threadIdx.x % 32 == 0;
  const auto wait = [&] {
    barrier_wait(full + 8 * waited, phase);
    if (++waited == kStages) {
      waited = 0;
      phase ^= 1;
    }
  };
  const auto stage_at = [&](int place) { return shared + place * kStageBytes; };
  const auto load = [&](u32(&to)[kBlocks][kSteps][4], auto part) {
    constexpr int kPart = decltype(part)::value;
    if (kPart == 0) wait();
    reader.load(to, stage_at(stage), stage_at(stage + 1 == kStages ? 0 : stage + 1), kPart);
    if (!tile.is_whole(p, i)) {
      Reader::mask(to, kPart, tile.low(i), tile.high(p, i));
      if (kPart == 0) {
        zero_outside(stage_at(stage), tile.low(i), tile.high(p, i));
        fence_async_proxy();
        named_sync(kConsumerBarrier, kWarpgroup * kConsumers);
      }
    }
  };
  // Multiplies the part whose R is in `own`, and loads the next part's R to `next`. `ended`: the
  // part before was the last one of its k block, in stage `previous`.
  const auto step = [&](const u32(&own)[kBlocks][kSteps][4], u32(&next)[kBlocks][kSteps][4],
                        auto part, bool ended) {
    constexpr int kPart = decltype(part)::value;
    constexpr bool kEnds = kPart == kParts - 1;
    multiply<kDType, kTileS>(sum, own, s0 + stage * (kStageBytes >> 4) + kPart * (kSteps * 32 >> 4),
                             1);
    const int current = stage;
    if (kEnds) {
      ++i;
      if (++stage == kStages) stage = 0;
    }
    if (i < tile.end) {
      wgmma_wait<1>();  // for the previous part: `next` may be overwritten
      if (ended && frees) barrier_arrive(empty + 8 * previous);
      load(next, Constant<kEnds ? 0 : kPart + 1>{});
    }
    previous = current;
  };
  if (i < tile.end) {
    wait();  // the next stage's R belongs to a k block, too: it is waited for one block ahead
    load(even, Constant<0>{});
    bool first = true;
#pragma unroll 1
    for (;;) {
      if constexpr (kParts == 2) {
        step(even, odd, Constant<0>{}, !first);
        step(odd, even, Constant<1>{}, false);
        if (i >= tile.end) break;
      } else {
        step(even, odd, Constant<0>{}, !first);
        if (i >= tile.end) break;
        step(odd, even, Constant<0>{}, true);
        if (i >= tile.end) break;
      }
      first = false;
    }
    wgmma_wait<0>();
  }
#pragma unroll
  for (int b = 0; b < kBlocks; ++b) keep_in_place(sum[b]);
  named_sync(kConsumerBarrier, kWarpgroup * kConsumers);  // all have read the last stages

  const bool by_s = p.out_stride_r == 1;
  const int t = threadIdx.x % 4;
#pragma unroll
  for (int b = 0; b < kBlocks; ++b) {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int row = Reader::row(warp, b, h), place = Reader::place(warp, b, h);
      if (by_s) {
#pragma unroll
        for (int j = 0; j < kTileS / 8; ++j) {
#pragma unroll
          for (int c = 0; c < 2; ++c) {
            store_sum(shared + 4 * place_by_s(8 * j + 2 * t + c, row), sum[b][4 * j + 2 * h + c]);
          }
        }
      } else {
#pragma unroll
        for (int j = 0; j < kTileS / 8; ++j) {
          asm volatile("st.shared.v2.f32 [%0], {%1, %2};" ::"r"(
                           shared + 4 * (place * kPitchR + 8 * j + 2 * t)),
                       "f"(sum[b][4 * j + 2 * h]), "f"(sum[b][4 * j + 2 * h + 1])
                       : "memory");
        }
      }
    }
  }
}

// ---- the end: sums of the cluster's blocks, added and stored

constexpr int kMostSplits = 2;
constexpr int kAtOnce = 8;  // sums of a thread that are loaded before the first one is used

template <bool kSplit>
TC_DEVICE void total(float (&sums)[kAtOnce], const u32 (&from)[kMostSplits], int splits,
                     const int (&places)[kAtOnce]) {
  constexpr int kMost = kSplit ? kMostSplits : 1;
  float x[kMost][kAtOnce];
#pragma unroll
  for (int s = 0; s < kMost; ++s) {
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) x[s][i] = 0;
    if (s == 0 || s < splits) {
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) x[s][i] = load_sum<kSplit>(from[s] + 4 * places[i]);
    }
  }
#pragma unroll
  for (int i = 0; i < kAtOnce; ++i) {
    sums[i] = x[0][i];
#pragma unroll
    for (int s = 1; s < kMost; ++s) sums[i] += x[s][i];
  }
}

// Of two elements, those that exist; 16-bit ones to an address that is a multiple of 4.
template <DType kOf>
TC_DEVICE void store_pair(Element* to, float x, float y, bool first, bool second) {
  const u32 pair = DTypeTraits<kOf>::pack(x, y);
  if (first && second) {
    *reinterpret_cast<u32*>(to) = pair;
  } else {
    if (first) to[0] = static_cast<u16>(pair);
    if (second) to[1] = static_cast<u16>(pair >> 16);
  }
}

template <bool kSplit>
TC_DEVICE void finish(const ResidueParams& p, const Tile& tile, u32 shared, int rank) {
  using Traits = DTypeTraits<kDType>;
  const auto bias = static_cast<const Element*>(p.bias);
  const auto bias_of = [&](int column) {
    return bias == nullptr ? 0.0f : Traits::load(bias[column * p.bias_stride]);
  };
  u32 from[kMostSplits];
#pragma unroll
  for (int s = 0; s < (kSplit ? kMostSplits : 1); ++s) {
    from[s] = kSplit ? map_to_rank(shared, s < p.splits ? s : 0) : shared;
  }
  const int warp = (threadIdx.x - kWarpgroup) / 32, lane = threadIdx.x % 32;
  constexpr int kWarps = kConsumers * 4;
  const int rows_s = min(kTileS, (p.rows_s - tile.residue + kVector - 1) / kVector - tile.first_s);
  const int rows_r = min(kTileR, p.rows_r - tile.first_r);
  const auto out = static_cast<Element*>(p.out) + tile.batch * p.out_batch_stride;
  float x[kAtOnce];
  int places[kAtOnce];
  if (p.out_stride_r == 1) {
    const int each = (rows_s + p.splits - 1) / p.splits;
    const int last = min(rows_s, (rank + 1) * each);
#pragma unroll 1
    for (int first = rank * each + warp; first < last; first += kWarps * kAtOnce / 2) {
      Element* to[kAtOnce / 2];
      int lead[kAtOnce / 2], end[kAtOnce / 2];  // elements before pairs of 4 bytes; of the row
#pragma unroll
      for (int i = 0; i < kAtOnce / 2; ++i) {
        const int s = min(first + i * kWarps, last - 1);
        const int row = (tile.first_s + s) * kVector + tile.residue;
        to[i] = out + row * p.out_stride_s + tile.first_r;
        lead[i] = reinterpret_cast<u64>(to[i]) / 2 % 2;
        end[i] = rows_r;
      }
#pragma unroll 1
      for (int r = 2 * lane; r < kTileR + 2; r += 64) {
#pragma unroll
        for (int i = 0; i < kAtOnce / 2; ++i) {
          const int s = min(first + i * kWarps, last - 1);
#pragma unroll
          for (int c = 0; c < 2; ++c) {
            places[2 * i + c] = place_by_s(s, min(max(r + c - lead[i], 0), kTileR - 1));
          }
        }
        total<kSplit>(x, from, p.splits, places);
#pragma unroll
        for (int i = 0; i < kAtOnce / 2; ++i) {
          if (first + i * kWarps >= last) break;
          const int at = r - lead[i];
          const bool low = at >= 0 && at < end[i], high = at + 1 < end[i];
          if (bias != nullptr) {
            if (low) x[2 * i] += bias_of(tile.first_r + at);
            if (high) x[2 * i + 1] += bias_of(tile.first_r + at + 1);
          }
          store_pair<kDType>(to[i] + at, x[2 * i], x[2 * i + 1], low, high);
        }
      }
    }
  } else {
    const int each = kTileR / p.splits;
    const auto row_at = [](int place) {
      return place % (kTileR / kVector) * kVector + place / (kTileR / kVector);
    };
#pragma unroll 1
    for (int first = rank * each + warp; first < (rank + 1) * each; first += kWarps * kAtOnce) {
#pragma unroll 1
      for (int s = lane; s < rows_s; s += 32) {
#pragma unroll
        for (int i = 0; i < kAtOnce; ++i) {
          places[i] = min(first + i * kWarps, kTileR - 1) * kPitchR + s;
        }
        total<kSplit>(x, from, p.splits, places);
        const int column = (tile.first_s + s) * kVector + tile.residue;
        const float own_bias = bias_of(column);
#pragma unroll
        for (int i = 0; i < kAtOnce; ++i) {
          const int place = first + i * kWarps, r = row_at(place);
          if (place >= (rank + 1) * each || r >= rows_r) continue;
          out[(tile.first_r + r) * p.out_stride_r + column] = Traits::round(x[i] + own_bias);
        }
      }
    }
  }
}

extern "C" __global__ void __launch_bounds__(kThreads, 1)
    TC_KERNEL(const __grid_constant__ ResidueParams p) {
  extern __shared__ __align__(1024) unsigned char memory[];
  const u32 shared = shared_address(memory);
  const u32 full = shared + kStages * kStageBytes, empty = full + 8 * kStages;
  const int warp = __shfl_sync(~0u, threadIdx.x / 32, 0);
  const int rank = p.splits > 1 ? static_cast<int>(cluster_rank()) : 0;
  const Tile tile(p, rank);
  if (threadIdx.x == 32) {
    prefetch_tensor_map(&p.s.map[0]);
    if (p.s.rows % kVector != 0) prefetch_tensor_map(&p.s.map[1]);
    prefetch_tensor_map(&p.r.map[0]);
    if (p.r.rows % kVector != 0) prefetch_tensor_map(&p.r.map[1]);
  }
  if (threadIdx.x == 0) {
    for (int s = 0; s < kStages; ++s) {
      barrier_init(full + 8 * s, kProducers);
      barrier_init(empty + 8 * s, 4 * kConsumers);
    }
    fence_barrier_init();
  }
  __syncthreads();
  wait_for_previous_grid();
  launch_next_grid();
  if (warp < 4) {
    if constexpr (kConsumers == 2) fewer_registers<72>();
    if (elect_one()) produce(p, tile, warp, shared, full, empty);
    __syncwarp();
    if (p.splits > 1) {
      cluster_sync_unaligned();
      cluster_meet();
    }
    return;
  }
  // NOTE: what follows stands in this branch: behind both, ptxas has the producers' registers.
  if constexpr (kConsumers == 2) more_registers<216>();
  consume(p, tile, shared, full, empty, warp - 4);
  if (p.splits > 1) {
    cluster_sync_unaligned();
    finish<true>(p, tile, shared, rank);
    __syncwarp();
    cluster_meet();  // a block must not exit while another reads its sums
  } else {
    named_sync(kConsumerBarrier, kWarpgroup * kConsumers);
    finish<false>(p, tile, shared, rank);
  }
}

}  // namespace torch_cubin::TC_KERNEL

/* torch_cubin kernels
{"virtual_arch": ["90a"],
 "kernels": [
  {"name": "residues_matmul_{d.short}_nt_{t.tile.0}x{t.tile.1}", "kind": "residues", "layout": "nt",
   "alignment": 2, "tile": "{t.tile}", "block": ["{t.threads}", 1, 1], "stages": "{t.stages}",
   "dynamic_shared": "{t.shared}",
   "cost": {"fixed": 18000, "of_a": 6000, "splits": 1000, "k_block": 830},
   "defines": {"TC_DTYPE": "{d.dtype}"},
   "for": {
    "d": "bf16 f16",
    "t": [{"tile": [128, 128, 64], "stages": 6, "threads": 384, "shared": 196704}]}}]}
*/
