// A mask's numbers for a lane's scores of a tile of decode.cu. They are requested a tile ahead,
// from addresses computed once for all tiles: otherwise a mask took a third of a call's time.
#pragma once

#include "attention/portable/score.cuh"

namespace torch_cubin {

template <DType kDType, int kTileN>
class MaskNumbers {
 public:
  // `column`: of the lane's first score in the first tile.
  TC_DEVICE MaskNumbers(const AttentionParams& p, int column)
      : step_(p.mask_stride[3] * ScoreRule<kDType>::mask_element(p)), flags_(p.flags) {
    row_[0] = row_[1] = nullptr;
    begin_ = column * step_;
  }

  // Row g or g + 8 of the tile (h) exists, and is query row `row` of the sequence's head.
  TC_DEVICE void set_row(const AttentionParams& p, const Sequence& s, int h, int row) {
    const ScoreRule<kDType> rule(p, s);
    row_[h] = rule.mask + row * p.mask_stride[2] * rule.mask_element(p) + begin_;
  }

  // Of a tile with `left` columns from the lane's first score on. Others are not read. The next
  // tile's numbers go to the L1 cache: one tile takes less time than the L2 cache's latency.
  TC_DEVICE void request(int left) {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      if (row_[h] == nullptr) continue;
      if (left > kTileN) asm volatile("prefetch.global.L1 [%0];" ::"l"(row_[h] + kTileN * step_));
      if (flags_ & kAttendBoolMask) {
        read<unsigned char>(h, left);
      } else if (flags_ & kAttendFloatMask) {
        read<u32>(h, left);
      } else {
        read<u16>(h, left);
      }
    }
  }

  // The same for the next tile.
  TC_DEVICE void request_next(int left) {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      if (row_[h] != nullptr) row_[h] += kTileN * step_;
    }
    request(left);
  }

  // Adds what was requested. Scores of columns that do not exist become -inf.
  TC_DEVICE void add(float (&score)[2][4], int left) const {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      if (row_[h] == nullptr) continue;
      if (flags_ & kAttendBoolMask) {
        add(score, h, left, [](u32 bits) { return bits != 0 ? 0.0f : -kInfinity; });
      } else if (flags_ & kAttendFloatMask) {
        add(score, h, left, [](u32 bits) { return __uint_as_float(bits); });
      } else {
        add(score, h, left,
            [](u32 bits) { return DTypeTraits<kDType>::load(static_cast<u16>(bits)); });
      }
    }
  }

 private:
  static TC_DEVICE int offset(int i) { return i / 2 * 8 + i % 2; }

  template <class Number>
  TC_DEVICE void read(int h, int left) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if (offset(i) < left) {
        bits_[h][i] = __ldg(reinterpret_cast<const Number*>(row_[h] + offset(i) * step_));
      }
    }
  }

  template <class Value>
  TC_DEVICE void add(float (&score)[2][4], int h, int left, Value&& value) const {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      float& x = score[i / 2][2 * h + i % 2];
      x = offset(i) < left ? x + value(bits_[h][i]) : -kInfinity;
    }
  }

  tc_int64 step_, begin_;
  const char* row_[2];
  u32 bits_[2][4];
  int flags_;
};

}  // namespace torch_cubin
