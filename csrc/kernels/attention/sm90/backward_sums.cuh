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

  TC_DEVICE void store_all() const {
    store(0);
    store(1);
  }

  // Stores rows 0 to 7 (`half` 0) or 8 to 15, by ordinary stores.
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

  // The same through the warp's `staging` buffer in shared memory, from which the TMA copies them
  // while the warp continues. Each row's first thread waits until the previous rows have been
  // copied.
  TC_DEVICE void send(int half, u32 staging) const {
    int row = own_ + 8 * half, t = threadIdx.x % 4;
    u32 from = staging + threadIdx.x % 32 / 4 * (C::kD * 2);
    if (t == 0) tma_store_wait_read<0>();
    __syncwarp();
#pragma unroll
    for (int a = 0; a < C::kD / 32; ++a) {
      u32 word[4];
      pack(word, half, a);
      store_shared(from + 64 * a + 16 * t, word);
    }
    fence_async_proxy();
    __syncwarp();
    if (t != 0) return;
    if (row < end_) bulk_store(base_ + row * row_stride_, from, width_ * 2);
    tma_store_commit();
  }

 private:
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
