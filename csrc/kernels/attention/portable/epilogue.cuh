// The end of a forward kernel: from a row's maximum, sum and accumulators to out and logsumexp, or
// to one split's partial results.
#pragma once

#include "attention/quad.cuh"
#include "tile.cuh"

namespace torch_cubin {

// Where the results of one head are written, from one row on.
template <DType kDType>
struct RowOutput {
  using Traits = DTypeTraits<kDType>;
  using Storage = typename Traits::Storage;

  Storage* out;
  float* partial_out;  // instead of out, with splits
  float* logsumexp;    // or null

  TC_DEVICE RowOutput(const AttentionParams& p, const Sequence& s, int row) {
    if (p.splits > 1) {
      tc_int64 heads = (static_cast<tc_int64>(blockIdx.y) * p.batch + s.batch) * p.heads + s.head;
      tc_int64 index = heads * p.seqlen_q + row;
      out = nullptr;
      partial_out = p.partial_out + index * p.head_dim_v;
      logsumexp = p.partial_logsumexp + index;
    } else {
      out = static_cast<Storage*>(p.out) + s.q_offset(p, p.out_stride, row);
      partial_out = nullptr;
      logsumexp = p.logsumexp ? p.logsumexp + s.row_index(p, row) : nullptr;
    }
  }

  // Adds the quad's sums of the row `down` rows below, writes its logsumexp if it exists, and
  // returns the factor that turns accumulators into outputs. `maximum` is in natural units. Called
  // by every lane of the warp.
  TC_DEVICE float finish(const AttentionParams& p, int head, int down, bool exists, float maximum,
                         float sum) const {
    return finish_joined(p, head, down, exists && threadIdx.x % 4 == 0, maximum, quad_sum(sum));
  }

  // The same for a row's complete sum, in one thread or several; `writes`: this one writes.
  TC_DEVICE float finish_joined(const AttentionParams& p, int head, int down, bool writes,
                                float maximum, float sum) const {
    float factor = 1.0f;
    if (p.sinks != nullptr && p.splits == 1) {
      float sink = p.sinks[head];
      float joined = fmaxf(maximum, sink);
      factor = exp2_approx((maximum - joined) * kLog2e);
      sum = sum * factor + exp2_approx((sink - joined) * kLog2e);
      maximum = joined;
    }
    if (writes && logsumexp != nullptr) {
      logsumexp[down] = sum == 0.0f ? -kInfinity : maximum + logf(sum);
    }
    factor = sum == 0.0f ? 0.0f : factor / sum;
    return p.flags & kAttendDropout ? factor * p.keep_scale : factor;
  }

  // Writes columns, from `first` on, of the row `down` rows below: elements 2 kHalf and 2 kHalf + 1
  // of kTiles n8 tiles. Called by every lane of the warp.
  template <int kHalf, int kTiles>
  TC_DEVICE void store(const AttentionParams& p, int down, bool exists,
                       const float (&sum)[kTiles][4], float factor, int first = 0) const {
    int t = threadIdx.x % 4;
    if (p.splits > 1) {
      float* to = partial_out + down * p.head_dim_v + first + 2 * t;
#pragma unroll
      for (int n = 0; n < kTiles; ++n) {
        if (exists && first + 8 * n < p.head_dim_v) {
          *reinterpret_cast<float2*>(to + 8 * n) =
              make_float2(sum[n][2 * kHalf] * factor, sum[n][2 * kHalf + 1] * factor);
        }
      }
      return;
    }
    Storage* to = out + down * p.out_stride[2];
#pragma unroll
    for (int n = 0; n < kTiles; n += 4) {
      u32 word[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const auto& tile = sum[n + i];
        word[i] = Traits::pack(tile[2 * kHalf] * factor, tile[2 * kHalf + 1] * factor);
      }
      quad_transpose(word);
      int column = first + 8 * (n + t);
      if (exists && column < p.head_dim_v) {
        *reinterpret_cast<uint4*>(to + column) = make_uint4(word[0], word[1], word[2], word[3]);
      }
    }
  }
};

}  // namespace torch_cubin
