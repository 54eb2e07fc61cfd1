// Rows that begin at any element and have any length, read once by vectors of 16 bytes.
//
// A vector's elements are those that it has in aligned rows, so that where a row begins changes no
// bits. Threads read the aligned vectors that have them, and take the last elements of theirs from
// the next thread.
#pragma once

#include "exponential.cuh"

namespace torch_cubin {

// As Lane of StreamedVectors. Elements past the end of the row are -inf.
template <int kDtype>
struct ShiftedLane : Lane<StreamedVectors<kDtype>> {
  using Access = Vectors<kDtype>;
  static constexpr int kElements = Access::kElements;
  static constexpr int kParts = Access::kParts;
  static constexpr int kOfPart = kElements / kParts;  // elements of 16 bytes
  static constexpr int kBits = 128 / kOfPart;         // of an element
  using Base = Lane<StreamedVectors<kDtype>>;
  using Base::Base;
  using Base::columns;
  using Base::lane;
  using Base::threads;

  struct Raw {
    FourWords parts[kParts + 1];
  };

  // Calls body(x, column) for the row's vectors, each while the next ones are loaded. It begins to
  // load before it asks skip() whether to.
  template <class Skip, class Body>
  TC_DEVICE void stream(const RowOf& row, Skip&& skip, Body&& body) const {
    // The elements that precede the row's first one in its 16 bytes.
    const int before = static_cast<int>(reinterpret_cast<tc_int64>(row.data) & 15) / (kBits / 8);
    const int own = lane * kElements, step = threads * kElements;
    // The threads of the row in this warp, which skip it together.
    const int others = min(threads, 32);
    const u32 mask = (~0u >> (32 - others)) << (threadIdx.x & 31 & ~(others - 1));
    const bool is_last = (lane & (others - 1)) == others - 1;
    // Also where only the thread before it has elements there.
    const auto load = [&](Raw& to, int column) {
      if (column - before < columns) load_raw(to, row, column - before, is_last);
    };
    const auto take = [&](Raw& from, int column) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const u32 next = __shfl_down_sync(mask, from.parts[0].words[i], 1);
        if (!is_last) from.parts[kParts].words[i] = next;
      }
      const int left = columns - column;
      if (left <= 0) return;
      float x[kElements];
      unpack(x, from, before * kBits);
      if (left < kElements) {
#pragma unroll
        for (int j = 0; j < kElements; ++j) x[j] = j < left ? x[j] : -kInfinity;
      }
      body(x, column);
    };
    Raw raw[2];
    load(raw[0], own);
    if (skip()) return;
#pragma unroll 1
    for (int first = 0; first < columns; first += 2 * step) {
      load(raw[1], first + own + step);
      take(raw[0], first + own);
      load(raw[0], first + own + 2 * step);
      take(raw[1], first + own + step);
    }
  }

 private:
  // The aligned vectors from element `begin` on, which may be negative.
  TC_DEVICE void load_raw(Raw& raw, const RowOf& row, int begin, bool is_last) const {
    const auto whole = static_cast<u32>(max(columns - kOfPart + 1, 0));
#pragma unroll
    for (int i = 0; i <= kParts; ++i) {
      if (i == kParts && !is_last) continue;
      const int first = begin + i * kOfPart;
      if (static_cast<u32>(first) < whole) {
        load_once(raw.parts[i], row.data + first * tc_int64(kBits / 8));
      } else {
        load_edge(raw.parts[i], row, first);
      }
    }
  }

  // Those of the row alone: the others are another row's, or no one's.
  TC_DEVICE void load_edge(FourWords& part, const RowOf& row, int first) const {
    part = {};
#pragma unroll
    for (int j = 0; j < kOfPart; ++j) {
      if (first + j < 0 || first + j >= columns) continue;
      const u32 bits = Singles<kDtype>::bits_at(row, kDtype, first + j);
      part.words[j * kBits / 32] |= bits << j * kBits % 32;
    }
  }

  // `bits`: of the elements that precede the vector.
  static TC_DEVICE void unpack(float (&x)[kElements], const Raw& raw, int bits) {
    constexpr int kWords = 4 * kParts;
    u32 words[kWords + 4];
#pragma unroll
    for (int i = 0; i < kWords + 4; ++i) words[i] = raw.parts[i / 4].words[i % 4];
#pragma unroll
    for (int i = 0; i < kWords + 2; ++i) words[i] = bits & 64 ? words[i + 2] : words[i];
#pragma unroll
    for (int i = 0; i < kWords + 1; ++i) words[i] = bits & 32 ? words[i + 1] : words[i];
    typename Access::Raw own;
#pragma unroll
    for (int i = 0; i < kWords; ++i) {
      own.parts[i / 4].words[i % 4] =
          kBits == 32 ? words[i] : __funnelshift_r(words[i], words[i + 1], bits);
    }
    Access::unpack(x, own);
  }
};

}  // namespace torch_cubin
