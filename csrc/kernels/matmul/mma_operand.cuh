// One operand of a tensor-core matmul: its tile in shared memory, the copies that fill it, and the
// loads of mma fragments from it. "mn" is the operand's own dimension, M for A, N for B.
// common/mma.cuh describes the fragments.
#pragma once

#include "common/mma.cuh"

namespace torch_cubin {

// The compile-time properties of an operand's tile.
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
  static constexpr int kStepK = 8 * kWord / kElement;  // K of one mma
  static constexpr int kRows = kKMajor ? kTileMn : kTileK;
  static constexpr int kRowBytes = (kKMajor ? kTileK : kTileMn) * kElement;
  static constexpr int kBytes = kRows * kRowBytes;
  // ldmatrix moves 16-bit elements, and 4-byte words that need no transposition.
  static constexpr bool kLdmatrix = kElement == 2 || (kElement == 4 && kKMajor);
  using Layout = Swizzle<kRowBytes, kLdmatrix>;
};

// cp.async of 16-byte vectors along the contiguous dimension. A thread has kPasses rows of a tile,
// and in each row kVectors vectors kVectorStep bytes apart, which share one pointer. `k_left` is
// the rest of K from the current tile on; past that, and past the operand's last row, the tile is
// filled with zeros and nothing is read. A vector that straddles an end is copied by
// copy_straddling(): cp.async can zero-fill a part, but compute-sanitizer treats it as a read of 16
// bytes.
template <class Tile>
struct VectorCopy {
  static constexpr bool kAsync = true;
  static constexpr int kPerVector = 16 / Tile::kElement;

  // Threads per row. A warp that reads 512 bytes of one row at once, rather than 128 bytes of each
  // of four rows, gains 1.4% (H200, 4096^3 nn). A pass has a multiple of 8 rows: see below.
  static constexpr int lanes() {
    int lanes = Tile::kRowBytes / 16 < 32 ? Tile::kRowBytes / 16 : 32;
    while (lanes > 8 && Tile::kThreads / lanes % 8 != 0) lanes /= 2;
    return lanes;
  }
  static constexpr int kLanes = lanes();
  static constexpr int kVectorStep = kLanes * 16;
  static constexpr int kVectors = Tile::kRowBytes / 16 / kLanes;
  static constexpr int kRowsPerPass = Tile::kThreads / kLanes;
  static constexpr int kPasses = (Tile::kRows + kRowsPerPass - 1) / kRowsPerPass;
  static_assert(kRowsPerPass % 8 == 0, "the swizzle must not change from pass to pass");

  const char* global;             // this thread's first vector of the tile to copy next
  tc_int64 pass_step, tile_step;  // bytes; tile_step from the end of the last pass
  u32 shared;                     // offset of that vector in a stage
  int mn_left;                    // rows (kKMajor) or elements from that vector on

  TC_DEVICE VectorCopy(const void* tile, tc_int64 stride_mn, tc_int64 stride_k, tc_int64 mn) {
    int mn_here = static_cast<int>(min(mn, static_cast<tc_int64>(Tile::kTileMn)));
    mn_left = mn_here - (Tile::kKMajor ? row() : vector() * kPerVector);
    tc_int64 row_stride = (Tile::kKMajor ? stride_mn : stride_k) * Tile::kElement;
    global = static_cast<const char*>(tile) + row() * row_stride + vector() * 16;
    pass_step = kRowsPerPass * row_stride;
    tile_step = stride_k * (Tile::kTileK * Tile::kElement) - kPasses * pass_step;
    shared = Tile::Layout::offset(row(), vector());
  }

  static TC_DEVICE int vector() { return threadIdx.x % kLanes; }
  static TC_DEVICE int row() { return threadIdx.x / kLanes; }

  // The remaining rows of this thread, and the remaining elements of its vector v.
  TC_DEVICE int rows_left(int k_left) const { return Tile::kKMajor ? mn_left : k_left - row(); }
  TC_DEVICE int elements_left(int k_left, int v) const {
    return (Tile::kKMajor ? k_left - vector() * kPerVector : mn_left) - v * kLanes * kPerVector;
  }

  static constexpr int kCopies = kPasses * kVectors;

  // Issues copies [kBegin, kEnd), in order, to the stage at `stage`. kWhole: no bounds tests.
  template <bool kWhole, int kBegin, int kEnd>
  TC_DEVICE void copy(u32 stage, int k_left) {
#pragma unroll
    for (int c = kBegin; c < kEnd; ++c) {
      int pass = c / kVectors, v = c % kVectors;
      // If the tile has fewer rows than a pass, the last threads are idle.
      if (Tile::kRows % kRowsPerPass == 0 || row() + pass * kRowsPerPass < Tile::kRows) {
        bool exists =
            elements_left(k_left, v) >= kPerVector && pass * kRowsPerPass < rows_left(k_left);
        cp_async<16>(shared + (stage + pass * kRowsPerPass * Tile::kRowBytes + v * kVectorStep),
                     global + v * kVectorStep, kWhole || exists);
      }
      if (v == kVectors - 1) global = advance(global, pass_step);
    }
    if constexpr (kEnd == kCopies) global += tile_step;
  }

  // Whether vectors straddle an end: that of K (in the last k tile), that of mn (in every k tile).
  static TC_DEVICE bool straddles_k(tc_int64 k) { return Tile::kKMajor && k % kPerVector != 0; }
  static TC_DEVICE bool straddles_mn(tc_int64 mn) {
    return !Tile::kKMajor && mn < Tile::kTileMn && mn % kPerVector != 0;
  }

  // Copies the straddling vectors of a tile element by element.
  static TC_DEVICE void copy_straddling(const void* tile, tc_int64 stride_mn, tc_int64 stride_k,
                                        tc_int64 mn, int k_left, u32 stage) {
    using Storage = typename Tile::Storage;
    VectorCopy self(tile, stride_mn, stride_k, mn);
#pragma unroll 1
    for (int v = 0; v < kVectors; ++v) {
      int elements = self.elements_left(k_left, v);
      if (elements <= 0 || elements >= kPerVector) continue;
#pragma unroll 1
      for (int i = 0; i * kRowsPerPass < self.rows_left(k_left) && i < kPasses; ++i) {
        u32 to = stage + self.shared + i * kRowsPerPass * Tile::kRowBytes + v * kVectorStep;
        auto from =
            reinterpret_cast<const Storage*>(self.global + i * self.pass_step + v * kVectorStep);
#pragma unroll 1
        for (int e = 0; e < elements; ++e) store_shared(to + e * Tile::kElement, from[e]);
      }
    }
  }
};

// Maps the words of a tile with arbitrary strides to threads: along K or along mn, whichever has
// the smaller stride, so that the lanes of a warp read nearby addresses. Shared memory rows run
// along K.
template <class Tile>
struct WordMap {
  static constexpr int kPerWord = Tile::kWord / Tile::kElement;
  static constexpr int kRowWords = Tile::kTileK / kPerWord;
  static constexpr int kPasses = Tile::kTileMn * kRowWords / Tile::kThreads;
  static_assert(Tile::kKMajor && Tile::kThreads % kRowWords == 0 &&
                    (Tile::kThreads % Tile::kTileMn == 0 || Tile::kTileMn % Tile::kThreads == 0),
                "passes are whole rows or whole columns");

  const char* global;
  tc_int64 pass_step, tile_step, stride_k;  // bytes; tile_step from the end of the last pass
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
    tile_step = stride_k * Tile::kTileK - kPasses * pass_step;
  }

  TC_DEVICE u32 shared(int pass) const {
    constexpr int kWordsPerChunk = 16 / Tile::kWord;
    int r = row + pass * row_step;
    int w = word + pass * word_step;
    return Tile::Layout::offset(r, w / kWordsPerChunk) + (w % kWordsPerChunk) * Tile::kWord;
  }

  // The number of elements of this pass's word that exist: 0 to kPerWord.
  TC_DEVICE int valid(int pass, int k_left) const {
    int k = (word + pass * word_step) * kPerWord;
    return row + pass * row_step < rows_left ? min(max(k_left - k, 0), kPerWord) : 0;
  }
};

// cp.async of single 4- or 8-byte elements, for any stride.
template <class Tile>
struct ElementCopy : WordMap<Tile> {
  static constexpr bool kAsync = true;
  using Map = WordMap<Tile>;
  static constexpr int kCopies = Map::kPasses;
  using Map::Map;

  template <bool kWhole, int kBegin, int kEnd>
  TC_DEVICE void copy(u32 stage, int k_left) {
#pragma unroll
    for (int i = kBegin; i < kEnd; ++i) {
      cp_async<Tile::kWord>(stage + this->shared(i), this->global, this->valid(i, k_left) != 0);
      this->global = advance(this->global, this->pass_step);
    }
    if constexpr (kEnd == kCopies) this->global += this->tile_step;
  }

  // Single elements never straddle an end.
  static TC_DEVICE bool straddles_k(tc_int64) { return false; }
  static TC_DEVICE bool straddles_mn(tc_int64) { return false; }
  static TC_DEVICE void copy_straddling(const void*, tc_int64, tc_int64, tc_int64, int, u32) {}
};

// Copies two 16-bit elements at a time through registers, since cp.async moves at least 4 bytes.
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
      const char* source = this->global;
      int valid = this->valid(i, k_left);
      low[i] = valid > 0 ? *reinterpret_cast<const u16*>(source) : u16(0);
      high[i] = valid > 1 ? *reinterpret_cast<const u16*>(source + this->stride_k) : u16(0);
      this->global = advance(this->global, this->pass_step);
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

// Loads this warp's fragments of one mma step, for kWarpMn rows (or columns). An address is the
// lane's base, XORed with one constant and offset by another, which works because fragments are 8
// (or 4) rows apart.
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

  // The lane's base moved by `bytes` along a row and by `rows` rows. Both are constants after
  // unrolling, so that few registers hold all addresses of a stage.
  TC_DEVICE u32 moved(u32 stage, int rows, int bytes) const {
    return (base ^ (bytes & 127)) + (stage + (bytes & ~127) + rows * Tile::kRowBytes);
  }

  TC_DEVICE void load(Fragments& out, u32 stage, int step) const {
#pragma unroll
    for (int i = 0; i < kBlocks; ++i) load_block(out, stage, step, i);
  }

  // One of the kBlocks blocks of 16.
  TC_DEVICE void load_block(Fragments& out, u32 stage, int step, int i) const {
    if constexpr (Tile::kLdmatrix && Tile::kKMajor) {
      ldmatrix<false>(out[i], moved(stage, 16 * i, 32 * step));
    } else if constexpr (Tile::kLdmatrix) {
      ldmatrix<true>(out[i], moved(stage, 16 * step, 32 * i));
    } else {
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        int mn = 16 * i + 8 * (Tile::kIsA ? j & 1 : j >> 1);
        int k = 8 * step + 4 * (Tile::kIsA ? j >> 1 : j & 1);
        load_shared(out[i][j], Tile::kKMajor ? moved(stage, mn, k * Tile::kWord)
                                             : moved(stage, k, mn * Tile::kWord));
      }
    }
  }
};

}  // namespace torch_cubin
