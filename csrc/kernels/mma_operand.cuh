// One operand of a tensor-core matmul: its tile in shared memory, the copies that fill the tile, and
// the loads that turn it into mma fragments. "mn" is the operand's own dimension, M for A, N for B.
//
// All mma shapes used have the same fragments when counted in words (4 bytes: two 16-bit elements or
// one tf32; 8 bytes: one double). Lane 4g + t holds words j = 0..3 of a 16 x 8-word block:
//   A: row g + 8 (j & 1), word t + 4 (j >> 1);   B (two n8 tiles): row g + 8 (j >> 1), word t + 4 (j & 1)
#pragma once

#include "matmul_tile.cuh"

namespace torch_cubin {

// How the tile lies in shared memory: rows of kRowBytes, in chunks of 16 bytes, and the chunk index
// is XORed with a function of the row, so that the reads of a warp meet every bank once:
//   ldmatrix reads one chunk of 8 consecutive rows; word loads read 2 chunks of 4 consecutive rows.
template <int kRowBytes, bool kLdmatrix>
struct Swizzle {
  static constexpr int kChunks = kRowBytes / 16;
  static_assert(kLdmatrix || kChunks >= 8, "word loads need rows of 128 bytes");

  static TC_DEVICE int row_term(int row) {
    if constexpr (!kLdmatrix) return (row & 3) << 1;
    constexpr int kRowsPerLine = kRowBytes < 128 ? 128 / kRowBytes : 1;
    return (row / kRowsPerLine) & ((kChunks < 8 ? kChunks : 8) - 1);
  }
  static TC_DEVICE int offset(int row, int chunk) {
    return row * kRowBytes + ((chunk ^ row_term(row)) << 4);
  }
};

// Everything about an operand's tile that is known at compile time.
template <DType kDType_, bool kIsA_, bool kKMajor_, bool kAnyStride_, int kTileMn_, int kTileK_,
          int kThreads_>
struct OperandTile {
  static constexpr DType kDType = kDType_;
  static constexpr bool kIsA = kIsA_;
  static constexpr bool kKMajor = kKMajor_;  // shared memory rows run along K
  static constexpr bool kAnyStride = kAnyStride_;
  static constexpr int kTileMn = kTileMn_;
  static constexpr int kTileK = kTileK_;
  static constexpr int kThreads = kThreads_;

  using Storage = typename DTypeTraits<kDType>::Storage;
  static constexpr int kElement = sizeof(Storage);
  static constexpr int kWord = kElement == 8 ? 8 : 4;
  static constexpr int kStepK = 8 * kWord / kElement;  // depth of one mma
  static constexpr int kRows = kKMajor ? kTileMn : kTileK;
  static constexpr int kRowBytes = (kKMajor ? kTileK : kTileMn) * kElement;
  static constexpr int kBytes = kRows * kRowBytes;
  // ldmatrix moves 16-bit elements; it serves 4-byte words too where they need no transposition.
  static constexpr bool kLdmatrix = kElement == 2 || (kElement == 4 && kKMajor);
  using Layout = Swizzle<kRowBytes, kLdmatrix>;
};

// cp.async of 16-byte vectors along the contiguous dimension. `k_left` is what remains of K from the
// current tile on; the copy zero-fills past it and past the operand's last row. A vector that
// straddles an end goes element by element: cp.async can zero-fill a part, but reads 16 bytes in the
// eyes of compute-sanitizer.
template <class Tile>
struct VectorCopy {
  static constexpr bool kAsync = true;
  static constexpr int kChunks = Tile::kRowBytes / 16;
  static constexpr int kRowsPerPass = Tile::kThreads / kChunks;
  static constexpr int kPasses = (Tile::kRows + kRowsPerPass - 1) / kRowsPerPass;
  static_assert(Tile::kThreads % kChunks == 0 && kRowsPerPass % (Tile::kLdmatrix ? 8 : 4) == 0,
                "the swizzle must not change from pass to pass");

  const char* global;
  tc_int64 pass_step, tile_step;  // bytes
  u32 shared;                     // offset in a stage
  int mn_left;                    // kKMajor: rows left from row0(); else bytes left from the chunk
  int mn_bytes;                   // of this tile along mn

  TC_DEVICE VectorCopy(const void* tile, tc_int64 stride_mn, tc_int64 stride_k, tc_int64 mn) {
    int chunk = threadIdx.x % kChunks;
    int row = row0();
    constexpr int kPerChunk = 16 / Tile::kElement;
    int mn_here = static_cast<int>(min(mn, static_cast<tc_int64>(Tile::kTileMn)));
    mn_bytes = mn_here * Tile::kElement;
    mn_left = Tile::kKMajor ? mn_here - row : (mn_here - chunk * kPerChunk) * Tile::kElement;
    tc_int64 row_stride = (Tile::kKMajor ? stride_mn : stride_k) * Tile::kElement;
    global = static_cast<const char*>(tile) + row * row_stride + chunk * 16;
    pass_step = kRowsPerPass * row_stride;
    tile_step = stride_k * (Tile::kTileK * Tile::kElement);
    shared = Tile::Layout::offset(row, chunk);
  }

  // Passes [kBegin, kEnd) of the tile into the stage at `stage`; leaves straddling vectors out.
  template <int kBegin, int kEnd>
  TC_DEVICE void copy(u32 stage, int k_left, bool wanted) {
    int rows = rows_left(k_left);
    int bytes = bytes_left(k_left);
    bool whole = wanted && (bytes <= 0 || bytes >= 16);
#pragma unroll
    for (int i = kBegin; i < kEnd; ++i) {
      if (!whole || outside(i)) continue;
      cp_async<16>(stage + shared + i * kRowsPerPass * Tile::kRowBytes, global + i * pass_step,
                   i * kRowsPerPass < rows && bytes > 0);
    }
  }

  // The vectors that copy() left out. The condition is the same for the whole block, nearly always
  // false, and tested once a tile.
  TC_DEVICE void copy_straddling(u32 stage, int k_left) const {
    using Storage = typename Tile::Storage;
    int ends = Tile::kKMajor ? k_left * Tile::kElement : mn_bytes;
    if (ends % 16 == 0) return;
    int bytes = bytes_left(k_left);
    if (bytes <= 0 || bytes >= 16) return;
#pragma unroll 1
    for (int i = 0; i < kPasses; ++i) {
      if (outside(i)) break;
      u32 to = stage + shared + i * kRowsPerPass * Tile::kRowBytes;
      auto from = reinterpret_cast<const Storage*>(global + i * pass_step);
      int valid = i * kRowsPerPass < rows_left(k_left) ? bytes / Tile::kElement : 0;
#pragma unroll 1
      for (int e = 0; e < 16 / Tile::kElement; ++e) {
        store_shared(to + e * Tile::kElement, e < valid ? from[e] : Storage(0));
      }
    }
  }

  // Of the operand, from this thread's first row and chunk on.
  TC_DEVICE int rows_left(int k_left) const { return Tile::kKMajor ? mn_left : k_left - row0(); }
  TC_DEVICE int bytes_left(int k_left) const {
    return Tile::kKMajor ? (k_left - chunk_k()) * Tile::kElement : mn_left;
  }
  static TC_DEVICE int chunk_k() { return threadIdx.x % kChunks * (16 / Tile::kElement); }

  // With fewer rows than a pass takes, the last threads have nothing to do.
  TC_DEVICE bool outside(int pass) const {
    return Tile::kRows % kRowsPerPass != 0 && row0() + pass * kRowsPerPass >= Tile::kRows;
  }
  static TC_DEVICE int row0() { return threadIdx.x / kChunks; }

  TC_DEVICE void next_tile() { global += tile_step; }
};

// How the words of a tile with arbitrary strides are shared out: along K or along mn, whichever has
// the smaller stride, so that the lanes of a warp read neighbours. Shared memory rows run along K.
template <class Tile>
struct WordMap {
  static constexpr int kPerWord = Tile::kWord / Tile::kElement;
  static constexpr int kRowWords = Tile::kTileK / kPerWord;
  static constexpr int kPasses = Tile::kTileMn * kRowWords / Tile::kThreads;
  static_assert(Tile::kKMajor && Tile::kThreads % kRowWords == 0 &&
                    (Tile::kThreads % Tile::kTileMn == 0 || Tile::kTileMn % Tile::kThreads == 0),
                "passes are whole rows or whole columns");

  const char* global;
  tc_int64 pass_step, tile_step, stride_k;  // bytes
  int row, word, row_step, word_step, rows_left;

  TC_DEVICE WordMap(const void* tile, tc_int64 stride_mn, tc_int64 stride_k_elements, tc_int64 mn) {
    int rows = static_cast<int>(min(mn, static_cast<tc_int64>(Tile::kTileMn)));
    static_assert(Tile::kThreads >= Tile::kTileMn, "one pass covers a column");
    if (stride_k_elements <= stride_mn) {
      row = threadIdx.x / kRowWords;
      word = threadIdx.x % kRowWords;
      row_step = Tile::kThreads / kRowWords;
      word_step = 0;
    } else {
      row = threadIdx.x % Tile::kTileMn;
      word = threadIdx.x / Tile::kTileMn;
      row_step = 0;
      word_step = Tile::kThreads / Tile::kTileMn;
    }
    rows_left = rows;
    stride_k = stride_k_elements * Tile::kElement;
    tc_int64 row_stride = stride_mn * Tile::kElement;
    global = static_cast<const char*>(tile) + row * row_stride + word * kPerWord * stride_k;
    pass_step = row_step * row_stride + word_step * kPerWord * stride_k;
    tile_step = stride_k * Tile::kTileK;
  }

  TC_DEVICE u32 shared(int pass) const {
    constexpr int kWordsPerChunk = 16 / Tile::kWord;
    int r = row + pass * row_step;
    int w = word + pass * word_step;
    return Tile::Layout::offset(r, w / kWordsPerChunk) + (w % kWordsPerChunk) * Tile::kWord;
  }

  // How many elements of this pass's word exist: 0 to kPerWord.
  TC_DEVICE int valid(int pass, int k_left) const {
    int k = (word + pass * word_step) * kPerWord;
    return row + pass * row_step < rows_left ? min(max(k_left - k, 0), kPerWord) : 0;
  }
};

// cp.async of single 4- or 8-byte elements: serves any stride.
template <class Tile>
struct ElementCopy : WordMap<Tile> {
  static constexpr bool kAsync = true;
  using Map = WordMap<Tile>;
  static constexpr int kPasses = Map::kPasses;
  using Map::Map;

  template <int kBegin, int kEnd>
  TC_DEVICE void copy(u32 stage, int k_left, bool wanted) {
#pragma unroll
    for (int i = kBegin; i < kEnd; ++i) {
      if (!wanted) continue;
      cp_async<Tile::kWord>(stage + this->shared(i), this->global + i * this->pass_step,
                            this->valid(i, k_left) != 0);
    }
  }

  TC_DEVICE void copy_straddling(u32, int) const {}  // single elements do not straddle
  TC_DEVICE void next_tile() { this->global += this->tile_step; }
};

// Two 16-bit elements at a time through registers, since cp.async moves no less than 4 bytes.
template <class Tile>
struct RegisterCopy : WordMap<Tile> {
  static constexpr bool kAsync = false;
  using Map = WordMap<Tile>;
  static constexpr int kPasses = Map::kPasses;
  using Map::Map;

  u16 low[kPasses], high[kPasses];

  TC_DEVICE void fetch(int k_left) {
#pragma unroll
    for (int i = 0; i < kPasses; ++i) {
      const char* source = this->global + i * this->pass_step;
      int valid = this->valid(i, k_left);
      low[i] = valid > 0 ? *reinterpret_cast<const u16*>(source) : u16(0);
      high[i] = valid > 1 ? *reinterpret_cast<const u16*>(source + this->stride_k) : u16(0);
    }
    this->global += this->tile_step;
  }

  TC_DEVICE void store(u32 stage) {
#pragma unroll
    for (int i = 0; i < kPasses; ++i) {
      store_shared(stage + this->shared(i), low[i] | static_cast<u32>(high[i]) << 16);
    }
  }
};

// Loads this warp's fragments, kWarpMn rows (or columns) and one mma step deep. Addresses are a
// lane's own base, XORed and added to with constants, which the row strides of 8 (or 4) allow.
template <class Tile, int kWarpMn>
struct FragmentLoader {
  static constexpr int kBlocks = kWarpMn / 16;
  static_assert(kWarpMn % 16 == 0 && (kWarpMn & (kWarpMn - 1)) == 0, "XORs need a power of two");
  using Word = std::conditional_t<Tile::kWord == 8, double, u32>;
  using Fragments = Word[kBlocks][4];

  u32 base;

  TC_DEVICE explicit FragmentLoader(int warp_mn) {
    int lane = threadIdx.x % 32;
    if constexpr (Tile::kLdmatrix) {
      int j = lane / 8;
      int mn_half = Tile::kIsA ? j & 1 : j >> 1;
      int k_half = Tile::kIsA ? j >> 1 : j & 1;
      if constexpr (Tile::kKMajor) {
        base = Tile::Layout::offset(warp_mn + lane % 8 + 8 * mn_half, k_half);
      } else {
        base = Tile::Layout::offset(lane % 8 + 8 * k_half, warp_mn / 8 + mn_half);
      }
    } else {
      int mn = warp_mn + lane / 4;
      int k = lane % 4;
      int row = Tile::kKMajor ? mn : k;
      int byte = (Tile::kKMajor ? k : mn) * Tile::kWord;
      base = Tile::Layout::offset(row, byte / 16) + byte % 16;
    }
  }

  // `bytes` along a row and `rows` down, added to the lane's base; both constants after unrolling.
  static TC_DEVICE u32 moved(u32 address, int rows, int bytes) {
    return (address ^ (bytes & 127)) + (bytes & ~127) + rows * Tile::kRowBytes;
  }

  TC_DEVICE void load(Fragments& out, u32 stage, int step) const {
    u32 address = stage + base;
#pragma unroll
    for (int i = 0; i < kBlocks; ++i) {
      if constexpr (Tile::kLdmatrix && Tile::kKMajor) {
        ldmatrix<false>(out[i], moved(address, 16 * i, 32 * step));
      } else if constexpr (Tile::kLdmatrix) {
        ldmatrix<true>(out[i], moved(address, 16 * step, 32 * i));
      } else {
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          int mn = 16 * i + 8 * (Tile::kIsA ? j & 1 : j >> 1);
          int k = 8 * step + 4 * (Tile::kIsA ? j >> 1 : j & 1);
          load_shared(out[i][j], Tile::kKMajor ? moved(address, mn, k * Tile::kWord)
                                               : moved(address, k, mn * Tile::kWord));
        }
      }
    }
  }
};

// float32 becomes tf32; the mma would truncate.
template <DType kDType, class Word, int kBlocks>
TC_DEVICE void round_fragments(Word (&fragments)[kBlocks][4]) {
  if constexpr (kDType == DType::float32) {
#pragma unroll
    for (int i = 0; i < kBlocks; ++i)
#pragma unroll
      for (int j = 0; j < 4; ++j) fragments[i][j] = round_to_tf32(fragments[i][j]);
  }
}

template <DType kDType, class Accumulator, class Word>
TC_DEVICE void mma(Accumulator (&sum)[4], const Word (&a)[4], Word b0, Word b1) {
  if constexpr (kDType == DType::float16) mma_f16(sum, a, b0, b1);
  if constexpr (kDType == DType::bfloat16) mma_bf16(sum, a, b0, b1);
  if constexpr (kDType == DType::float32) mma_tf32(sum, a, b0, b1);
  if constexpr (kDType == DType::float64) mma_f64(sum, a, b0, b1);
}

}  // namespace torch_cubin
