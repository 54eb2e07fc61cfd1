// Operands whose rows begin anywhere, read by the eight warps of a block to shared memory, in the
// layout that wgmma takes (anywhere.cu).
#pragma once

#include "common/hopper.cuh"
#include "common/wgmma.cuh"
#include "matmul_params.h"

namespace torch_cubin {
namespace sm90 {

// One thread's part of a tile of an operand: of kParts times 128 bytes of K, requested together,
// vectors of 16 bytes of kTile / 32 lines, 32 lines apart. A line is a row of the tile (a column of
// B), or, where these are not contiguous along K, 128 bytes of them at one k. A warp's lines are
// eight apart: all of them begin equally far behind 16 bytes, so that a warp shifts all that it
// reads alike.
template <class Element, int kTile, int kParts = 1>
struct LineReader {
  static constexpr bool kTf32 = std::is_same_v<Element, float>;
  static constexpr int kSize = sizeof(Element), kVector = 16 / kSize, kPartK = 128 / kSize;
  static constexpr int kPasses = kTile / 32;
  static_assert(kTile % 64 == 0);

  uint4 low[kParts][kPasses], high[kParts][kPasses];
  tc_int64 at;         // of the next part: the address of the first pass's vector, rounded down
  tc_int64 odd, even;  // bytes to the next pass, and to the one after it
  tc_int64 step;       // to the next part
  tc_int64 first_byte,
      last_byte;  // the operand's addresses: of its first byte, behind its last one
  u32 shift;      // bytes from `at` to the vector's first element, of all of the warp's
  u32 elsewhere;  // 16 bits: 1 a pass and part whose vectors are partly outside the operand
  int left;       // rows of the tile that exist
  bool along_k;
  bool apart;                // rows are a vector apart, at least
  bool not_first, not_last;  // the tile is neither at the operand's begin nor near its end
  bool whole;                // the operand begins and ends with whole vectors

  static TC_DEVICE int vector() { return threadIdx.x % 8; }
  static TC_DEVICE int line() { return threadIdx.x / 32 + threadIdx.x % 32 / 8 * 8; }

  // `first`: of `rows` rows; `k`: of `all_k` elements, where the first part begins.
  TC_DEVICE void set(const void* data, tc_int64 batch, tc_int64 own_stride, tc_int64 k_stride,
                     tc_int64 first, tc_int64 rows, int k, tc_int64 all_k) {
    along_k = k_stride == 1;
    const tc_int64 stride = along_k ? own_stride : k_stride;
    const auto begin = reinterpret_cast<tc_int64>(static_cast<const Element*>(data) + batch);
    const tc_int64 last = ((along_k ? rows : all_k) - 1) * stride;
    first_byte = begin + min(last, tc_int64(0)) * kSize;
    last_byte = begin + (max(last, tc_int64(0)) + (along_k ? all_k : rows)) * kSize;
    whole = ((first_byte | last_byte) & 15) == 0;
    const tc_int64 own = along_k ? (first + line()) * stride + k + vector() * kVector
                                 : (k + line()) * stride + first + vector() * kVector;
    at = begin + own * kSize;
    shift = __shfl_sync(~0u, static_cast<u32>(at) & 15, 0);
    at -= shift;
    const tc_int64 lines = 32 * stride * kSize;
    odd = along_k || !kTf32 ? lines : 128;
    even = along_k ? 2 * lines : kTf32 ? 256 : 128;
    step = along_k ? tc_int64(128) : kPartK * stride * kSize;
    left = static_cast<int>(min(rows - first, tc_int64(1) << 20));
    apart = stride >= 16;
    not_first = first > 0;
    not_last = left >= kTile + 16;
  }

  // Of pass i: the first of the vector's rows, and its element of K.
  TC_DEVICE int own(int i) const {
    return along_k ? line() + 32 * i : (kTf32 ? i : i / 2) * kPartK + vector() * kVector;
  }
  TC_DEVICE int k_of(int i) const {
    return along_k ? vector() * kVector : line() + (kTf32 ? 0 : i % 2 * 32);
  }
  TC_DEVICE bool exists(int i, int k_left) const { return own(i) < left && k_of(i) < k_left; }
  TC_DEVICE tc_int64 address(int i) const { return at + i % 2 * odd + i / 2 * even; }

  // Requests `count` parts, the first of which begins at `k`, where `k_left` elements of K are
  // left.
  TC_DEVICE void request(int k, int k_left, int count = 1) {
    elsewhere = 0;
    const bool inside =
        apart && (not_first || k > 0) && (not_last || k_left >= kParts * kPartK + kVector);
#pragma unroll
    for (int u = 0; u < kParts; ++u) {
      if (u > 0 && u >= count) break;
      const int left_here = k_left - u * kPartK;
      if (inside) {
#pragma unroll
        for (int i = 0; i < kPasses; ++i) {
          if (!exists(i, left_here)) continue;
          low[u][i] = __ldg(reinterpret_cast<const uint4*>(address(i)));
          high[u][i] = __ldg(reinterpret_cast<const uint4*>(address(i)) + 1);
        }
      } else if (whole) {
        // Nothing outside the operand is read: of a vector at its end no second one.
#pragma unroll
        for (int i = 0; i < kPasses; ++i) {
          if (!exists(i, left_here)) continue;
          const auto vector = reinterpret_cast<const uint4*>(address(i));
          low[u][i] = __ldg(vector);
          if (address(i) + 16 < last_byte) high[u][i] = __ldg(vector + 1);
        }
      } else {
#pragma unroll
        for (int i = 0; i < kPasses; ++i) {
          if (!exists(i, left_here)) continue;
          if (address(i) >= first_byte && address(i) + 32 <= last_byte) {
            low[u][i] = __ldg(reinterpret_cast<const uint4*>(address(i)));
            high[u][i] = __ldg(reinterpret_cast<const uint4*>(address(i)) + 1);
          } else if constexpr (kTf32) {
            low[u][i] = inside_of(address(i), first_byte, last_byte);
            high[u][i] = inside_of(address(i) + 16, first_byte, last_byte);
          } else {
            elsewhere |= 1u << (u * kPasses + i);
          }
        }
      }
      at += step;
    }
  }

  // Where element j of a vector lies. wgmma takes TF32 along K alone.
  TC_DEVICE u32 place(int i, int j) const {
    if (kTf32 && !along_k) {
      const int row = own(i) + j, k = k_of(i);
      return row * 128 + ((k / 4 ^ (row & 7)) * 16) + k % 4 * 4;
    }
    return (line() + 32 * i) * 128 + ((vector() ^ (line() & 7)) * 16) + j * kSize;
  }

  // Stores what was requested last at `to`, parts `part_bytes` apart, with zeros in place of
  // elements of K that do not exist.
  TC_DEVICE void store(u32 to, int k_left, int count = 1, u32 part_bytes = 0) const {
    if (k_left < count * kPartK) {
      shift_and_store<true>(to, k_left, count, part_bytes);
    } else {
      shift_and_store<false>(to, k_left, count, part_bytes);
    }
  }

 private:
  // Of a vector that is partly outside the operand: the words in [first, last).
  static TC_DEVICE uint4 inside_of(tc_int64 vector, tc_int64 first, tc_int64 last) {
    u32 words[4] = {};
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const tc_int64 word = vector + 4 * j;
      if (word >= first && word + 4 <= last) words[j] = __ldg(reinterpret_cast<const u32*>(word));
    }
    return make_uint4(words[0], words[1], words[2], words[3]);
  }

  template <bool kTail>
  TC_DEVICE void shift_and_store(u32 to, int k_left, int count, u32 part_bytes) const {
    if (shift < 4) {
      store_words<kTail, 0>(to, k_left, count, part_bytes);
    } else if (shift < 8) {
      store_words<kTail, 1>(to, k_left, count, part_bytes);
    } else if (shift < 12) {
      store_words<kTail, 2>(to, k_left, count, part_bytes);
    } else {
      store_words<kTail, 3>(to, k_left, count, part_bytes);
    }
    if constexpr (!kTf32) {
      if (elsewhere != 0) store_elements(to, k_left, count, part_bytes);
    }
  }

  // The operand's first and last vectors of 16-bit elements, one by one.
  TC_DEVICE void store_elements(u32 to, int k_left, int count, u32 part_bytes) const {
#pragma unroll 1
    for (int bit = 0; bit < kParts * kPasses; ++bit) {
      if ((elsewhere >> bit & 1) == 0) continue;
      const int u = bit / kPasses, i = bit % kPasses;
      const auto from = reinterpret_cast<const Element*>(address(i) - (count - u) * step + shift);
      const int exist = min(along_k ? k_left - u * kPartK - k_of(i) : left - own(i), kVector);
      Element value[kVector];
#pragma unroll
      for (int j = 0; j < kVector; ++j) value[j] = j < exist ? __ldg(from + j) : Element(0);
#pragma unroll
      for (int j = 0; j < kVector; ++j) {
        store_shared(to + u * part_bytes + place(i, j), value[j]);
      }
    }
  }

  template <bool kTail, int kWords>
  TC_DEVICE void store_words(u32 to, int k_left, int count, u32 part_bytes) const {
    const u32 bits = (shift & 2) * 8;
#pragma unroll
    for (int u = 0; u < kParts; ++u) {
      if (u > 0 && u >= count) break;
      u32 keep[4] = {~0u, ~0u, ~0u, ~0u};
      if (kTail && along_k) {
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          const int exist = k_left - u * kPartK - k_of(0) - j * (4 / kSize);
          keep[j] = exist >= 4 / kSize ? ~0u : exist == 1 && !kTf32 ? 0xffffu : 0u;
        }
      }
#pragma unroll
      for (int i = 0; i < kPasses; ++i) {
        const uint4 x = low[u][i], y = high[u][i];
        const u32 w[8] = {x.x, x.y, x.z, x.w, y.x, y.y, y.z, y.w};
        u32 out[4];
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          out[j] = kTf32 ? round_to_tf32(w[j + kWords])
                         : __funnelshift_r(w[j + kWords], w[j + kWords + 1], bits);
          if (kTail) {
            out[j] = along_k ? out[j] & keep[j] : k_of(i) < k_left - u * kPartK ? out[j] : 0;
          }
        }
        if (kTf32 && !along_k) {
#pragma unroll
          for (int j = 0; j < 4; ++j) store_shared(to + u * part_bytes + place(i, j), out[j]);
        } else {
          store_shared(to + u * part_bytes + place(i, 0), out);
        }
      }
    }
  }
};

}  // namespace sm90
}  // namespace torch_cubin
