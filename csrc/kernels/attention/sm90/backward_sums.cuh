// dk and dv of attention's backward on Hopper, from a warpgroup's accumulators to the tensors'
// rows.
#pragma once

#include "attention/quad.cuh"
#include "backward_parts.cuh"
#include "common/dtype.cuh"

namespace torch_cubin {
namespace sm90 {

// Stores a warp's dk or dv, of 16 keys and C::kD columns, to global memory.
template <class C>
class SumRows {
 public:
  // `width`: columns of `out`. `own`: this thread's first key.
  TC_DEVICE SumRows(const float (&sum)[C::kD / 2], float factor, void* out,
                    const tc_int64 (&stride)[3], int width, const KeyTile& of, int own)
      : sum_(sum), factor_(factor), width_(width), own_(own), end_(of.sequence.columns) {
    row_stride_ = stride[2];
    base_ = static_cast<u16*>(out) + of.batch * stride[0] + of.head * stride[1] +
            of.sequence.k_row * row_stride_;
  }

  TC_DEVICE void store() const {
    store(0);
    store(1);
  }

 private:
  // Stores rows 0 to 7 (`half` 0) or 8 to 15.
  TC_DEVICE void store(int half) const {
    int row = own_ + 8 * half, t = threadIdx.x % 4;
    u16* to = base_ + row * row_stride_ + 8 * t;
#pragma unroll
    for (int a = 0; a < C::kD / 32; ++a) {
      u32 word[4];
      pack(word, half, a);
      if (row < end_ && 32 * a + 8 * t < width_) {
        *reinterpret_cast<uint4*>(to + 32 * a) = make_uint4(word[0], word[1], word[2], word[3]);
      }
    }
  }

  // Columns 32 a + 8 t to 32 a + 8 t + 7 of a row.
  TC_DEVICE void pack(u32 (&word)[4], int half, int a) const {
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      int at = 16 * a + 4 * j + 2 * half;
      word[j] = DTypeTraits<C::kDType>::pack(sum_[at] * factor_, sum_[at + 1] * factor_);
    }
    quad_transpose(word);
  }

  const float (&sum_)[C::kD / 2];
  float factor_;
  int width_, own_, end_;
  tc_int64 row_stride_;
  u16* base_;
};

}  // namespace sm90
}  // namespace torch_cubin
