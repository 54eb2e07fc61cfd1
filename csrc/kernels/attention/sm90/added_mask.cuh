// Adds a mask's numbers to the logits of a warp's 16 queries and a block of keys, in wgmma's
// layout, for the `added` kernels of sm90/forward.cu.
//
// If each thread read its own elements, eight rows of 16 bytes at a time, the L1 cache could not
// serve the requests fast enough next to products of 64 columns: with one batch's mask at head_dim
// 64 a call took 1840 us, cuDNN's takes 1030. So a warp copies its part of the mask to shared
// memory, in rows of 16-byte pieces, before it issues the block's products, and reads it as a
// matrix when they are done. If there are not enough registers for that, it reads pairs, which is
// fast enough at head_dim 256.
#pragma once

#include "common/dtype.cuh"
#include "forward_params.h"

namespace torch_cubin {
namespace sm90 {

// A warp's part of the mask: its first query and the block's first key, and the sizes of the mask.
struct MaskPart {
  int batch, head, query, queries, key, keys;
};

template <DType kDType, int kN, int kBytes>
class AddedMask {
 public:
  // p must outlive this object. `shared`: kBytes for this warp only.
  TC_DEVICE AddedMask(const Sm90AddedMask& p, u32 shared) : p_(p), shared_(shared) {}

  // Requests the numbers, if they go to shared memory. All lanes must have added the previous ones.
  TC_DEVICE void load(const MaskPart& part) const {
    if (p_.floats) {
      load_rows<float>(part);
    } else {
      load_rows<u16>(part);
    }
  }

  // load() and add() where the numbers have 16 bits.
  TC_DEVICE void load_16_bit(const MaskPart& part) const { load_rows<u16>(part); }
  TC_DEVICE void add_16_bit(float (&s)[kN / 2], const MaskPart& part, float scale) const {
    if constexpr (kIsCopied<2>) {
      cp_async_wait<0>();
      __syncwarp();
    }
    add_halves(s, part, scale);
  }

  // s becomes scale * s plus the mask's numbers.
  TC_DEVICE void add(float (&s)[kN / 2], const MaskPart& part, float scale) const {
    if constexpr (kIsCopied<2>) {  // floats may be copied too
      cp_async_wait<0>();
      __syncwarp();
    }
    if (p_.floats) {
      add_floats(s, part, scale);
    } else {
      add_halves(s, part, scale);
    }
  }

 private:
  template <int kSize>  // bytes of a number
  static constexpr bool kIsCopied = 16 * kN * kSize <= kBytes;

  // Whether all queries have the same numbers. Sixteen requests of one row by every warp took a
  // third of the time of calls with a mask of the keys alone.
  TC_DEVICE bool one_row() const { return p_.stride[2] == 0; }

  // The offset of a piece of a row. Pieces are permuted so that eight rows of one piece, or four of
  // two, cover all banks.
  static TC_DEVICE int place(int size, int row, int piece) {
    return row * kN * size + (size == 2 ? piece ^ row % 8 : piece ^ row % 4 * 2) * 16;
  }

  template <class Number>
  TC_DEVICE const Number* row_of(const MaskPart& part, int row) const {
    return static_cast<const Number*>(p_.values) + part.batch * p_.stride[0] +
           part.head * p_.stride[1] + min(part.query + row, part.queries - 1) * p_.stride[2];
  }

  // Rows are multiples of 16 bytes, except for their last piece.
  template <class Number>
  TC_DEVICE void load_rows(const MaskPart& part) const {
    constexpr int kSize = sizeof(Number);
    if constexpr (kIsCopied<kSize>) {
      constexpr int kPieces = kN * kSize / 16, kTogether = 32 / kPieces;
      int lane = threadIdx.x % 32, piece = lane % kPieces;
      int key = part.key + piece * (16 / kSize);
      int bytes = min(max((part.keys - key) * kSize, 0), 16);
#pragma unroll
      for (int first = 0; first < 16; first += kTogether) {
        if (first > 0 && one_row()) break;
        int row = first + lane / kPieces;
        cp_async_bytes(shared_ + place(kSize, row, piece),
                       row_of<Number>(part, row) + (bytes > 0 ? key : 0), bytes);
      }
      cp_async_commit();
    }
  }

  // Numbers of keys that do not exist are hidden afterwards.
  TC_DEVICE void add_halves(float (&s)[kN / 2], const MaskPart& part, float scale) const {
    if constexpr (kIsCopied<2>) {
      int row = one_row() ? 0 : threadIdx.x % 16, right = threadIdx.x % 32 / 16;
#pragma unroll
      for (int j = 0; j < kN / 16; ++j) {
        u32 pair[4];  // of rows g and g + 8, and again of the next eight keys
        ldmatrix<false>(pair, shared_ + place(2, row, 2 * j + right));
#pragma unroll
        for (int i = 0; i < 4; ++i) add_pair(s, 8 * j + 2 * i, pair[i], scale);
      }
    } else {
      add_pairs<u16, u32>(s, part, scale);
    }
  }

  TC_DEVICE void add_floats(float (&s)[kN / 2], const MaskPart& part, float scale) const {
    if constexpr (kIsCopied<4>) {
      int lane = threadIdx.x % 4, row = one_row() ? 0 : threadIdx.x % 32 / 4;
      int below = one_row() ? 0 : 8;
#pragma unroll
      for (int i = 0; i < kN / 4; ++i) {
        float pair[2];
        load_shared(pair,
                    shared_ + place(4, row + i % 2 * below, i / 2 * 2 + lane / 2) + lane % 2 * 8);
        add_pair(s, 2 * i, pair, scale);
      }
    } else {
      add_pairs<float, float[2]>(s, part, scale);
    }
  }

  // Requests a few pairs at a time.
  template <class Number, class Pair>
  TC_DEVICE void add_pairs(float (&s)[kN / 2], const MaskPart& part, float scale) const {
    constexpr int kTogether = kN % 32 == 0 ? 8 : 10;
    static_assert(kN / 4 % kTogether == 0);
    int key = part.key + threadIdx.x % 4 * 2, left = part.keys - key;
    const Number* row[2];
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      row[h] = row_of<Number>(part, threadIdx.x % 32 / 4 + 8 * h) + (left > 0 ? key : 0);
    }
#pragma unroll
    for (int first = 0; first < kN / 4; first += kTogether) {
      Pair pair[kTogether];
#pragma unroll
      for (int i = 0; i < kTogether; ++i) {
        int column = (first + i) / 2 * 8;
        read(pair[i], row[i % 2] + (column < left ? column : 0));
      }
#pragma unroll
      for (int i = 0; i < kTogether; ++i) add_pair(s, 2 * (first + i), pair[i], scale);
    }
  }

  static TC_DEVICE void add_pair(float (&s)[kN / 2], int at, const float (&pair)[2], float scale) {
    s[at] = fmaf(s[at], scale, pair[0]);
    s[at + 1] = fmaf(s[at + 1], scale, pair[1]);
  }
  static TC_DEVICE void add_pair(float (&s)[kN / 2], int at, u32 pair, float scale) {
    s[at] = fmaf(s[at], scale, DTypeTraits<kDType>::load(static_cast<u16>(pair)));
    s[at + 1] = fmaf(s[at + 1], scale, DTypeTraits<kDType>::load(static_cast<u16>(pair >> 16)));
  }

  // In memory order: all at once would need too many registers.
  static TC_DEVICE void read(float (&out)[2], const float* from) {
    asm volatile("ld.global.nc.v2.f32 {%0, %1}, [%2];" : "=f"(out[0]), "=f"(out[1]) : "l"(from));
  }
  static TC_DEVICE void read(u32& out, const u16* from) {
    asm volatile("ld.global.nc.u32 %0, [%1];" : "=r"(out) : "l"(from));
  }

  const Sm90AddedMask& p_;
  u32 shared_;
};

}  // namespace sm90
}  // namespace torch_cubin
