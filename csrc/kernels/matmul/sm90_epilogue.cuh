// Stores the sums of a tile, warp by warp: finished in registers, rounded and stored by the TMA;
// or, for outputs and addends of other types and strides, through shared memory.
//
// Over 500 lines, because the variants share the staging buffers and the accumulators' layout.
#pragma once

#include "activation.cuh"
#include "sm90_schedule.cuh"
#include "sm90_split.cuh"

namespace torch_cubin {
namespace sm90 {

template <DType kType>
TC_DEVICE float load_element(const void* from, tc_int64 index) {
  using Traits = DTypeTraits<kType>;
  return Traits::load(static_cast<const typename Traits::Storage*>(from)[index]);
}

// Starts copying the bias of a tile's columns to `bias`, the warpgroup's own kTileN elements of
// shared memory; zeros past N or without a bias. Called by all threads of the warpgroup, before the
// products: read in the epilogue, the latency once per panel cost a tenth of a product of
// 4096 x 4096 x 4096.
template <class C>
TC_DEVICE void request_bias(const Sm90MatmulParams& p, u32 bias, int group, int n) {
  named_sync(kGroupBarrier + group, kWarpgroup);  // all have read the previous tile's bias
  int own = threadIdx.x % kWarpgroup * 2;         // two columns per thread
  if (own >= C::kTileN) return;
  int count = p.bias == nullptr ? 0 : max(0, min(2, p.n - n - own));
  u32 to = bias + own * C::kElement;
  if (C::kElement == 2 && count == 1) {  // a copy of both would read past the bias
    u32 last = static_cast<const u16*>(p.bias)[n + own];
    asm volatile("st.shared.u32 [%0], %1;" ::"r"(to), "r"(last) : "memory");
    return;
  }
  auto from = static_cast<const char*>(p.bias) +
              static_cast<tc_int64>(count == 0 ? 0 : n + own) * C::kElement;
  asm volatile("cp.async.ca.shared.global [%0], [%1], %2, %3;" ::"r"(to), "l"(from),
               "n"(2 * C::kElement), "r"(count * C::kElement)
               : "memory");
}

// Waits until all threads' copies have arrived.
TC_DEVICE void wait_for_bias(int group) {
  asm volatile("cp.async.wait_all;" ::: "memory");
  named_sync(kGroupBarrier + group, kWarpgroup);
}

// The XOR of the 16-byte chunks of a panel's row: the swizzle of the TMA.
template <class C>
TC_DEVICE int panel_swizzle(int row) {
  constexpr int kRowBytes = C::kPanel * C::kElement;
  return kRowBytes == 128 ? row & 7 : kRowBytes == 64 ? row >> 1 & 3 : row >> 2 & 1;
}

// A predicated store, so that several are in flight at a time.
TC_DEVICE void store_pair_if(bool does, u16* to, u32 pair) {
  asm volatile(
      "{ .reg .pred does; setp.ne.s32 does, %2, 0; @does st.global.b32 [%0], %1; }" ::"l"(to),
      "r"(pair), "r"(static_cast<int>(does))
      : "memory");
}

TC_DEVICE void store_element_if(bool does, u16* to, u32 low) {
  asm volatile(
      "{ .reg .pred does; setp.ne.s32 does, %2, 0; @does st.global.b16 [%0], %1; }" ::"l"(to),
      "h"(static_cast<u16>(low)), "r"(static_cast<int>(does))
      : "memory");
}

// Stores one warp's panel of 16-bit elements from shared memory to unaligned rows. 32 lanes store a
// row (or several, of a narrow panel), two adjacent elements per lane, shifted by one if the row
// begins at an odd element; only a row's ends are stored by single elements. Eight rows at a time,
// without branches: sequentially a panel of 16 rows took 3,300 cycles, mostly waiting.
template <class C>
TC_DEVICE void store_panel_unaligned(u32 panel, u16* out, tc_int64 stride, int rows, int columns) {
  constexpr int kInPairs = C::kPanel / 2;   // pairs per row
  constexpr int kTogether = 32 / kInPairs;  // rows at a time
  constexpr int kPasses = 16 / kTogether;   // per panel
  constexpr int kUnrolled = kPasses < 8 ? kPasses : 8;
  static_assert(kInPairs == 32 || kInPairs == 16 || kInPairs == 8);
  int lane;  // volatile: values derived from it would stay in registers between panels
  asm volatile("mov.u32 %0, %%laneid;" : "=r"(lane));
  const int at = lane % kInPairs, first_row = lane / kInPairs;
  out += first_row * stride;
#pragma unroll 1
  for (int pass = 0; pass < kPasses; pass += kUnrolled) {
    u32 own[kUnrolled], next[kUnrolled];
#pragma unroll
    for (int i = 0; i < kUnrolled; ++i) {
      int row = (pass + i) * kTogether + first_row;
      asm volatile("ld.shared.u32 %0, [%1];"
                   : "=r"(own[i])
                   : "r"(panel + row * (C::kPanel * 2) +
                         ((at / 4 ^ panel_swizzle<C>(row)) * 16 + at % 4 * 4)));
    }
#pragma unroll
    for (int i = 0; i < kUnrolled; ++i) next[i] = __shfl_down_sync(0xffffffff, own[i], 1);
#pragma unroll
    for (int i = 0; i < kUnrolled; ++i, out += kTogether * stride) {
      bool exists = (pass + i) * kTogether + first_row < rows;
      int odd = static_cast<int>(reinterpret_cast<unsigned long long>(out) >> 1) & 1;
      int column = 2 * at + odd;
      u32 pair = __funnelshift_r(own[i], next[i], odd * 16);
      store_pair_if(exists && column + 1 < columns, out + column, pair);
      store_element_if(exists && column + 1 == columns, out + column, pair);
      store_element_if(exists && odd && at == 0, out, own[i]);
    }
  }
}

// The same of 32-bit elements, one of each lane.
template <class C>
TC_DEVICE void store_panel_unaligned(u32 panel, float* out, tc_int64 stride, int rows,
                                     int columns) {
  constexpr int kTogether = 32 / C::kPanel, kPasses = 16 / kTogether;  // rows at a time, per panel
  constexpr int kUnrolled = kPasses < 8 ? kPasses : 8;
  int lane;
  asm volatile("mov.u32 %0, %%laneid;" : "=r"(lane));
  const int at = lane % C::kPanel, first_row = lane / C::kPanel;
  out += first_row * stride + at;
#pragma unroll 1
  for (int pass = 0; pass < kPasses; pass += kUnrolled) {
    u32 own[kUnrolled];
#pragma unroll
    for (int i = 0; i < kUnrolled; ++i) {
      const int row = (pass + i) * kTogether + first_row;
      asm volatile("ld.shared.u32 %0, [%1];"
                   : "=r"(own[i])
                   : "r"(panel + row * (C::kPanel * 4) +
                         ((at / 4 ^ panel_swizzle<C>(row)) * 16 + at % 4 * 4)));
    }
#pragma unroll
    for (int i = 0; i < kUnrolled; ++i, out += kTogether * stride) {
      const bool exists = (pass + i) * kTogether + first_row < rows && at < columns;
      asm volatile(
          "{ .reg .pred does; setp.ne.s32 does, %2, 0; @does st.global.b32 [%0], %1; }" ::"l"(out),
          "r"(own[i]), "r"(static_cast<int>(exists))
          : "memory");
    }
  }
}

// Rounds columns of sums and stores them to a panel in shared memory, from `column` on. `x` has the
// accumulators' layout: a lane holds columns 8j + 2 * (lane % 4) and the next one, of rows lane / 4
// and lane / 4 + 8.
template <class C, int kColumns>
TC_DEVICE void stage_columns(u32 panel, int column, const float* x) {
  constexpr int kRowBytes = C::kPanel * C::kElement;
  int lane = threadIdx.x % 32, first = column * C::kElement / 16;  // in chunks of 16 bytes
  if constexpr (C::kElement == 2) {
    // Lanes 8j..8j+7 address matrix j: rows 0-7, then 8-15 of 8 columns, then those of the next 8.
    int row = lane % 16;
    int swizzle = panel_swizzle<C>(row);
    u32 at = panel + row * kRowBytes;
#pragma unroll
    for (int j = 0; j < kColumns / 16; ++j) {
      const float* s = x + 8 * j;
      stmatrix(at + ((first + 2 * j + lane / 16) ^ swizzle) * 16,
               DTypeTraits<C::kType>::pack(s[0], s[1]), DTypeTraits<C::kType>::pack(s[2], s[3]),
               DTypeTraits<C::kType>::pack(s[4], s[5]), DTypeTraits<C::kType>::pack(s[6], s[7]));
    }
  } else {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      int row = lane / 4 + 8 * half;
      int swizzle = panel_swizzle<C>(row);
      u32 at = panel + row * kRowBytes + lane % 2 * 8;
#pragma unroll
      for (int j = 0; j < kColumns / 8; ++j) {
        const float* s = x + 4 * j + 2 * half;
        asm volatile("st.shared.v2.f32 [%0], {%1, %2};" ::"r"(
                         at + ((first + 2 * j + lane % 4 / 2) ^ swizzle) * 16),
                     "f"(s[0]), "f"(s[1])
                     : "memory");
      }
    }
  }
}

// The warp's next staging buffer, after the TMA has read it.
template <class C>
TC_DEVICE u32 next_buffer(u32 staging, int& turn) {
  u32 buffer = staging + turn * 2048;
  turn = turn + 1 == C::kBuffers ? 0 : turn + 1;
  if (threadIdx.x % 32 == 0) tma_store_wait_read<C::kBuffers - 1>();
  __syncwarp();
  return buffer;
}

template <class C>
TC_DEVICE void store_panel(const Sm90MatmulParams& p, u32 buffer, int m, int n, const Work& w) {
  fence_async_proxy();
  __syncwarp();
  if (threadIdx.x % 32 != 0) return;
  if (m < p.m && n < p.n) {
    const bool batched = p.flags & (kSm90Batched | kSm90SplitK);
    if (C::kWidened && (p.flags & kSm90Accumulate)) {
      if (batched) {
        tma_add(&p.out_map, buffer, n, m, w.b0, w.b1, w.b2, kEvictFirst);
      } else {
        tma_add(&p.out_map, buffer, n, m, kEvictFirst);
      }
    } else {
      // Sums are read again by the next kernel.
      const u64 hint = C::kWidened || (p.flags & kSm90KeepOut) ? kEvictNormal : kEvictFirst;
      if (batched) {
        tma_store(&p.out_map, buffer, n, m, w.b0, w.b1, w.b2, hint);
      } else {
        tma_store(&p.out_map, buffer, n, m, hint);
      }
    }
  }
  tma_store_commit();
}

// Stores one panel of a warp to unaligned rows.
template <class C>
TC_DEVICE void store_unaligned(const Sm90MatmulParams& p, u32 buffer, int m, int n, const Work& w) {
  __syncwarp();
  int rows = min(16, p.m - m), columns = min(C::kPanel, p.n - n);
  if (rows <= 0 || columns <= 0) return;
  tc_int64 at = m * p.out_stride_m + n + w.b0 * p.out_batch_stride[0] +
                w.b1 * p.out_batch_stride[1] + w.b2 * p.out_batch_stride[2];
  using Storage = typename DTypeTraits<C::kType>::Storage;
  store_panel_unaligned<C>(buffer, static_cast<Storage*>(p.out) + at, p.out_stride_m, rows,
                           columns);
}

// Stores one warp's 16 rows from row m on, in all of the tile's columns. They are rounded into
// panels, which the TMA stores while the next panels are written, or the warp itself if rows are
// unaligned. (As a loop, like finish_and_store, unaligned rows took a tenth longer.) The two have
// code of their own: the unaligned stores between panels would each cost a miss of instructions.
template <class C>
TC_DEVICE void store_rows(const Sm90MatmulParams& p, u32 staging, int& turn, int m, const Work& w,
                          const float (&sum)[C::kTileN / 2]) {
  auto store_panels = [&](auto store) {
#pragma unroll
    for (int panel = 0; panel < C::kTileN / C::kPanel; ++panel) {
      u32 buffer = next_buffer<C>(staging, turn);
      stage_columns<C, C::kPanel>(buffer, 0, sum + panel * (C::kPanel / 2));
      store(buffer, w.n0 + panel * C::kPanel);
    }
  };
  if (!C::kWidened && (p.flags & kSm90OutUnaligned)) {
    if constexpr (!C::kWidened) {
      store_panels([&](u32 buffer, int n) { store_unaligned<C>(p, buffer, m, n, w); });
    }
  } else {
    store_panels([&](u32 buffer, int n) { store_panel<C>(p, buffer, m, n, w); });
  }
}

// x = alpha * sum + x, for the sums of `step`, one of kLow to kHigh - 1. A binary search by
// branches, so that the code that follows exists once: code that runs once per tile mostly waits
// for instruction fetch.
template <class C, int kColumns, int kLow, int kHigh>
TC_DEVICE void take_sums(int step, float alpha, const float (&sum)[C::kBlocksM][C::kTileN / 2],
                         float (&x)[kColumns / 2]) {
  if constexpr (kHigh - kLow == 1) {
    constexpr int kSteps = C::kTileN / kColumns;  // per block of 64 rows
    const float* s = sum[kLow / kSteps] + kLow % kSteps * (kColumns / 2);
#pragma unroll
    for (int i = 0; i < kColumns / 2; ++i) {
      asm volatile("fma.rn.f32 %0, %1, %2, %0;" : "+f"(x[i]) : "f"(alpha), "f"(s[i]));
    }
  } else {
    constexpr int kMiddle = (kLow + kHigh) / 2;
    if (step < kMiddle) {
      take_sums<C, kColumns, kLow, kMiddle>(step, alpha, sum, x);
    } else {
      take_sums<C, kColumns, kMiddle, kHigh>(step, alpha, sum, x);
    }
  }
}

// Loads the bias of two adjacent columns from shared memory.
template <class C>
TC_DEVICE void load_bias_pair(u32 at, float& low, float& high) {
  if constexpr (C::kElement == 4) {
    asm volatile("ld.shared.v2.f32 {%0, %1}, [%2];" : "=f"(low), "=f"(high) : "r"(at));
  } else {
    u32 pair;
    asm volatile("ld.shared.u32 %0, [%1];" : "=r"(pair) : "r"(at));
    low = DTypeTraits<C::kType>::load(static_cast<u16>(pair));
    high = DTypeTraits<C::kType>::load(static_cast<u16>(pair >> 16));
  }
}

// Loads the bias of kColumns columns from `bias` in shared memory, in the accumulators' layout.
template <class C, int kColumns>
TC_DEVICE void load_bias(u32 bias, float (&x)[kColumns / 2]) {
  u32 at = bias + threadIdx.x % 4 * (2 * C::kElement);
#pragma unroll
  for (int j = 0; j < kColumns / 8; ++j) {
    float low, high;
    load_bias_pair<C>(at + j * 8 * C::kElement, low, high);
    x[4 * j] = x[4 * j + 2] = low;
    x[4 * j + 1] = x[4 * j + 3] = high;
  }
}

// Adds the bias and applies ReLU if requested; the sums are then stored like others. Straight code:
// finish_and_store's loop took about 7,000 cycles more for a block of 128 x 256.
template <class C>
TC_DEVICE void add_bias(const Sm90MatmulParams& p, u32 bias,
                        float (&sum)[C::kBlocksM][C::kTileN / 2]) {
  u32 at = bias + threadIdx.x % 4 * (2 * C::kElement);
#pragma unroll
  for (int j = 0; j < C::kTileN / 8; ++j) {
    float low, high;
    load_bias_pair<C>(at + j * 8 * C::kElement, low, high);
#pragma unroll
    for (int i = 0; i < C::kBlocksM; ++i) {
      sum[i][4 * j] += low;
      sum[i][4 * j + 1] += high;
      sum[i][4 * j + 2] += low;
      sum[i][4 * j + 3] += high;
    }
  }
  if constexpr (C::kElement == 2) {
    if ((p.flags >> kSm90Activation & 7) == kActivationRelu) {
#pragma unroll
      for (int i = 0; i < C::kBlocksM; ++i) {
#pragma unroll
        for (int j = 0; j < C::kTileN / 2; ++j) {
          asm("max.NaN.f32 %0, %0, 0f00000000;" : "+f"(sum[i][j]));
        }
      }
    }
  }
}

template <int kCount>
TC_DEVICE void activate_all(const ActivationCurve& curve, int activation, float (&x)[kCount]) {
  auto follow = [&](auto exponent) {
#pragma unroll
    for (int i = 0; i < kCount; ++i) x[i] = divide_by_exponential(x[i], exponent(x[i]));
  };
  if (activation == kActivationSilu) {
    follow([&](float value) { return curve_exponent<0>(value, curve); });
  } else if (activation == kActivationGeluTanh) {
    follow([&](float value) { return curve_exponent<1>(value, curve); });
  } else if (activation == kActivationGelu) {
    follow([&](float value) { return curve_exponent<5>(value, curve); });
  } else if (activation == kActivationRelu) {
#pragma unroll
    for (int i = 0; i < kCount; ++i) x[i] = x[i] < 0.0f ? 0.0f : x[i];
  }
}

// Adds beta times the addend, from row m and column n on, two columns at a time.
template <class C, int kColumns>
TC_DEVICE void add_addend(const Sm90MatmulParams& p, const Work& w, int m, int n,
                          float (&x)[kColumns / 2]) {
  m += threadIdx.x % 32 / 4;
  n += threadIdx.x % 4 * 2;
  tc_int64 at = m * p.addend_stride_m + n + w.b0 * p.addend_batch_stride[0] +
                w.b1 * p.addend_batch_stride[1] + w.b2 * p.addend_batch_stride[2];
  auto from = static_cast<const u16*>(p.addend) + at;
#pragma unroll
  for (int half = 0; half < 2; ++half, m += 8, from += 8 * p.addend_stride_m) {
    int columns = m < p.m ? p.n - n : 0;  // remaining
#pragma unroll
    for (int j = 0; j < kColumns / 8; ++j) {
      u32 pair = 0;
      if (8 * j < columns) pair = *reinterpret_cast<const u32*>(from + 8 * j);
      float* s = x + 4 * j + 2 * half;
      s[0] = __fmaf_rn(p.beta, DTypeTraits<C::kType>::load(static_cast<u16>(pair)), s[0]);
      s[1] = __fmaf_rn(p.beta, DTypeTraits<C::kType>::load(static_cast<u16>(pair >> 16)), s[1]);
    }
  }
}

// kSm90Finish: store_rows with bias, activation and addend, for all of a warp's rows (m0 is the
// first), in a loop over kColumns columns at a time.
template <class C>
TC_DEVICE void finish_and_store(const Sm90MatmulParams& p, u32 staging, u32 bias, int& turn, int m0,
                                const Work& w, const float (&sum)[C::kBlocksM][C::kTileN / 2]) {
  // Half a panel if the accumulators leave few registers.
  constexpr int kColumns =
      C::kBlocksM * C::kTileN > 256 && C::kPanel == 64 ? C::kPanel / 2 : C::kPanel;
  constexpr int kSteps = C::kTileN / kColumns, kInPanel = C::kPanel / kColumns;
  int activation = p.flags >> kSm90Activation & 7;
  u32 buffer = 0;
#pragma unroll 1
  for (int step = 0; step < C::kBlocksM * kSteps; ++step) {
    int block = C::kBlocksM == 1 ? 0 : step / kSteps;
    int in_rows = step - block * kSteps, m = m0 + block * 64, column = in_rows * kColumns;
    float x[kColumns / 2];
    load_bias<C, kColumns>(bias + column * C::kElement, x);
    take_sums<C, kColumns, 0, C::kBlocksM * kSteps>(step, p.alpha, sum, x);
    if constexpr (C::kElement == 2) {
      activate_all(p.curve, activation, x);
      if (p.addend != nullptr) add_addend<C, kColumns>(p, w, m, w.n0 + column, x);
    }
    if (in_rows % kInPanel == 0) buffer = next_buffer<C>(staging, turn);
    stage_columns<C, kColumns>(buffer, in_rows % kInPanel * kColumns, x);
    if (in_rows % kInPanel != kInPanel - 1) continue;
    int n = w.n0 + in_rows / kInPanel * C::kPanel;
    if (C::kElement == 2 && (p.flags & kSm90OutUnaligned)) {
      store_unaligned<C>(p, buffer, m, n, w);
    } else {
      store_panel<C>(p, buffer, m, n, w);
    }
  }
}

// kSm90Sums: a Config whose tiles are stored as float32.
template <class C>
struct Widened : C {
  static constexpr bool kWidened = true;
  static constexpr int kElement = 4;
  static constexpr int kPanel = C::kTileN % 32 == 0 ? 32 : 16;
};

// kSm90General: bias, activation, addend, any output type and any alignment. The sums go through
// shared memory as floats, 16 rows x kChunk columns at a time, after which a lane has adjacent
// columns of one row. So global memory is accessed in vectors where its alignment allows, and this
// code exists once, not once per register.
template <class C>
TC_DEVICE void finish_rows(const Sm90MatmulParams& p, u32 staging, int m, const Work& w,
                           const float (&sum)[C::kTileN / 2]) {
  constexpr int kChunks = (C::kTileN + C::kChunk - 1) / C::kChunk;
  constexpr int kRowBytes = C::kChunk * 4, kVectors = C::kChunk / 4;  // per row
  int lane = threadIdx.x % 32;
  int activation = p.flags >> kSm90Activation & 7;
  tc_int64 out_at =
      w.b0 * p.out_batch_stride[0] + w.b1 * p.out_batch_stride[1] + w.b2 * p.out_batch_stride[2];
  tc_int64 add_at = w.b0 * p.addend_batch_stride[0] + w.b1 * p.addend_batch_stride[1] +
                    w.b2 * p.addend_batch_stride[2];
#pragma unroll 1
  for (int chunk = 0; chunk < kChunks; ++chunk) {
    __syncwarp();
#pragma unroll
    for (int c = 0; c < kChunks; ++c) {
      if (c != chunk) continue;
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        int row = lane / 4 + 8 * half;
        u32 at = staging + row * kRowBytes + lane % 2 * 8;
#pragma unroll
        for (int j = 0; j < C::kChunk / 8; ++j) {
          if (C::kChunk * c + 8 * j < C::kTileN) {
            const float* s = sum + C::kChunk / 2 * c + 4 * j + 2 * half;
            asm volatile("st.shared.v2.f32 [%0], {%1, %2};" ::"r"(
                             at + ((2 * j + lane % 4 / 2) ^ (row % 4 * 2)) * 16),
                         "f"(s[0]), "f"(s[1])
                         : "memory");
          }
        }
      }
    }
    __syncwarp();
    bool vector = p.flags & kSm90OutVector;
    int width = vector ? 4 : 1;                        // adjacent columns per lane
    int column = vector ? lane % kVectors * 4 : lane;  // within the chunk
    int first_row = vector ? lane / kVectors : 0;
    int n = w.n0 + chunk * C::kChunk + column;
    int end = min(p.n, w.n0 + C::kTileN);
#pragma unroll 1
    for (int pass = 0; pass < (vector ? 1 : C::kChunk / 32); ++pass, column += 32, n += 32) {
      if (n >= end) continue;
      float bias[4] = {0.0f, 0.0f, 0.0f, 0.0f};
      if (p.bias != nullptr && !(p.flags & kSm90BiasRow)) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          if (i < width && n + i < end)
            bias[i] = load_element<C::kType>(p.bias, (n + i) * p.bias_stride);
        }
      }
#pragma unroll 2
      for (int row = first_row; row < 16; row += vector ? 32 / kVectors : 1) {
        if (m + row >= p.m) break;
        u32 at = staging + row * kRowBytes + ((column / 4 ^ row % 4 * 2) * 16) + column % 4 * 4;
        float x[4];
        if (vector) {
          asm volatile("ld.shared.v4.f32 {%0, %1, %2, %3}, [%4];"
                       : "=f"(x[0]), "=f"(x[1]), "=f"(x[2]), "=f"(x[3])
                       : "r"(at)
                       : "memory");
        } else {
          asm volatile("ld.shared.f32 %0, [%1];" : "=f"(x[0]) : "r"(at) : "memory");
          x[1] = x[2] = x[3] = 0.0f;
        }
        if (p.bias != nullptr && (p.flags & kSm90BiasRow)) {
          bias[0] = load_element<C::kType>(p.bias, (m + row) * p.bias_stride);
          bias[1] = bias[2] = bias[3] = bias[0];
        }
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          x[i] =
              activate<(C::kElement > 2)>(__fmaf_rn(p.alpha, x[i], bias[i]), activation, p.curve);
        }
        if (p.addend != nullptr) {
          tc_int64 from = add_at + (m + row) * p.addend_stride_m + n * p.addend_stride_n;
          if ((p.flags & kSm90AddVector) && vector) {
            if constexpr (C::kElement == 2) {
              uint2 bits =
                  *reinterpret_cast<const uint2*>(static_cast<const u16*>(p.addend) + from);
              u16 parts[4] = {static_cast<u16>(bits.x), static_cast<u16>(bits.x >> 16),
                              static_cast<u16>(bits.y), static_cast<u16>(bits.y >> 16)};
#pragma unroll
              for (int i = 0; i < 4; ++i) {
                x[i] = __fmaf_rn(p.beta, load_element<C::kType>(parts, i), x[i]);
              }
            } else {
              float4 more =
                  *reinterpret_cast<const float4*>(static_cast<const float*>(p.addend) + from);
              x[0] = __fmaf_rn(p.beta, more.x, x[0]);
              x[1] = __fmaf_rn(p.beta, more.y, x[1]);
              x[2] = __fmaf_rn(p.beta, more.z, x[2]);
              x[3] = __fmaf_rn(p.beta, more.w, x[3]);
            }
          } else {
#pragma unroll
            for (int i = 0; i < 4; ++i) {
              if (i < width && n + i < end) {
                x[i] = __fmaf_rn(
                    p.beta, load_element<C::kType>(p.addend, from + i * p.addend_stride_n), x[i]);
              }
            }
          }
        }
        tc_int64 to = out_at + (m + row) * p.out_stride_m + n;
        if (C::kElement == 4 || (p.flags & kSm90OutFloat)) {
          auto out = static_cast<float*>(p.out) + to;
          if (vector) {
            *reinterpret_cast<float4*>(out) = make_float4(x[0], x[1], x[2], x[3]);
          } else {
            out[0] = x[0];
          }
        } else if constexpr (C::kElement == 2) {
          auto out = static_cast<u16*>(p.out) + to;
          if (vector) {
            *reinterpret_cast<uint2*>(out) = make_uint2(DTypeTraits<C::kType>::pack(x[0], x[1]),
                                                        DTypeTraits<C::kType>::pack(x[2], x[3]));
          } else {
            out[0] = static_cast<u16>(DTypeTraits<C::kType>::pack(x[0], 0.0f));
          }
        }
      }
    }
  }
  __syncwarp();
}

}  // namespace sm90
}  // namespace torch_cubin
