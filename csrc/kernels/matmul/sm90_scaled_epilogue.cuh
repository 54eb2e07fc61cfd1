// The epilogue of sm90_scaled.cu: scales, bias, rounding and stores of a warp's sums, and what it
// reads before the products, so that its latency is hidden.
#pragma once

#include "sm90_epilogue.cuh"
#include "sm90_scaled_params.h"

namespace torch_cubin {
namespace sm90 {

// A Config that stores outputs of a type, for sm90_epilogue.cuh.
template <class C, DType kTypeValue>
struct Output : C {
  static constexpr DType kType = kTypeValue;
  static constexpr int kElement = kType == DType::float32 ? 4 : 2;
  static constexpr int kFull = 128 / kElement;
  static constexpr int kPanel = scaled_panel(C::kTileN, kFull, C::kPromoted);
  static constexpr int kPanels = (C::kTileN + kPanel - 1) / kPanel;
  static constexpr int kPanelBytes = 16 * kPanel * kElement;
  // The first column of a panel, of the tile's.
  static TC_DEVICE constexpr int column(int panel) {
    if constexpr (C::kTileN % kPanel == 0) return panel * kPanel;
    return panel == kPanels - 1 ? C::kTileN - kPanel : panel * kPanel;
  }
};

TC_DEVICE float shuffled(float value, int lane) { return __shfl_sync(~0u, value, lane); }

// The scales of a lane's two rows: row m, and the one 8 below, of those before m_end. kPlain: they
// are no scales of blocks.
template <bool kPlain>
TC_DEVICE void load_rows(float (&rows)[2], const Sm90ScaledParams& p, int m, int m_end) {
  const bool blocks = !kPlain && p.flags & kScaledBlocks;
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const int own = m + 8 * i;
    rows[i] = blocks || own >= m_end ? 1.0f : p.scale_a[own * p.a_stride];
  }
}

// Scales and bias of a tile's columns: a lane holds every 32nd column, from its own number on.
template <int kTileN>
struct Columns {
  static constexpr int kOwn = (kTileN + 31) / 32;
  float scale[kOwn], bias[kOwn];

  TC_DEVICE void set_to_one() {
#pragma unroll
    for (int i = 0; i < kOwn; ++i) {
      scale[i] = 1.0f;
      bias[i] = 0.0f;
    }
  }

  // kPlain: no scales of blocks, and no bias.
  template <bool kPlain>
  TC_DEVICE void load(const Sm90ScaledParams& p, const float* scales, int n0) {
    const bool blocks = !kPlain && p.flags & kScaledBlocks;
#pragma unroll
    for (int i = 0; i < kOwn; ++i) {
      const int n = n0 + 32 * i + threadIdx.x % 32;
      const bool exists = n < p.n;
      scale[i] = blocks || !exists ? 1.0f : scales[n * p.b_stride];
      bias[i] = 0.0f;
    }
    if (kPlain || p.bias == nullptr) return;
    if (p.bias_type == kScaledFloat32) {
      load_bias<DType::float32>(p, n0);
    } else if (p.bias_type == kScaledFloat16) {
      load_bias<DType::float16>(p, n0);
    } else {
      load_bias<DType::bfloat16>(p, n0);
    }
  }

  template <DType kType>
  TC_DEVICE void load_bias(const Sm90ScaledParams& p, int n0) {
#pragma unroll
    for (int i = 0; i < kOwn; ++i) {
      const int n = n0 + 32 * i + threadIdx.x % 32;
      if (n < p.n) bias[i] = load_element<kType>(p.bias, n * p.bias_stride);
    }
  }

  // Scales the sums of columns `from` to `from` + kCount - 1, in the accumulators' layout, and adds
  // the bias if there is one.
  template <int kCount, bool kBias>
  TC_DEVICE void apply(float (&x)[kCount / 2], int from, const float (&rows)[2]) const {
#pragma unroll
    for (int j = 0; j < kCount / 8; ++j) {
      const int column = from + 8 * j;
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const int source = column % 32 + threadIdx.x % 4 * 2 + i;
        const float factor = shuffled(scale[column / 32], source);
        const float addend = kBias ? shuffled(bias[column / 32], source) : 0.0f;
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          float& own = x[4 * j + 2 * half + i];
          own = __fmaf_rn(own * rows[half], factor, addend);
        }
      }
    }
  }
};

// Stores a panel of floats from its buffer, as floats or as e4m3, at any address: up to `rows` rows
// and `columns` columns.
template <class O>
TC_DEVICE void store_elements(u32 buffer, const Sm90ScaledParams& p, tc_int64 at, int rows,
                              int columns) {
  static_assert(O::kElement == 4);
  constexpr int kInRow = O::kPanel / 2;  // lanes
  const int lane = threadIdx.x % 32, column = lane % kInRow * 2;
  const bool both = column + 1 < columns;
#pragma unroll 4
  for (int row = lane / kInRow; row < 16; row += 32 / kInRow) {
    float x[2];
    load_shared(x, buffer + row * (O::kPanel * 4) + ((column / 4) ^ panel_swizzle<O>(row)) * 16 +
                       column % 4 * 4);
    if (row >= rows || column >= columns) continue;
    const tc_int64 place = at + row * p.out_stride + column;
    if (p.out_type == kScaledFloat32) {
      float* to = static_cast<float*>(p.out) + place;
      to[0] = x[0];
      if (both) to[1] = x[1];
      continue;
    }
    unsigned char* to = static_cast<unsigned char*>(p.out) + place;
    const u16 pair = pack_e4m3(x[0], x[1]);
    if (p.out_stride % 2 == 0) {  // so does n, and both exist
      *reinterpret_cast<u16*>(to) = pair;
    } else {
      to[0] = static_cast<unsigned char>(pair);
      if (both) to[1] = static_cast<unsigned char>(pair >> 8);
    }
  }
}

// Rounds and stores one warp's 16 rows from row m on by the TMA.
template <class O>
TC_DEVICE void store_aligned(const Sm90ScaledParams& p, int n0, u32 staging, int& turn, int m,
                             const float (&sum)[O::kTileN / 2]) {
#pragma unroll
  for (int panel = 0; panel < O::kPanels; ++panel) {
    const u32 buffer = next_buffer<O>(staging, turn);
    stage_columns<O, O::kPanel>(buffer, 0, sum + O::column(panel) / 2);
    fence_async_proxy();
    __syncwarp();
    if (threadIdx.x % 32 == 0) {
      const int n = n0 + O::column(panel);
      if (n < p.n) tma_store(&p.out_map, buffer, n, m, kEvictFirst);
      tma_store_commit();
    }
  }
}

// stage_columns() of floats, each by a store of its own. NOTE: stores of two keep neighbouring sums
// in pairs of registers, as parts are, and an addition then reads two registers of one bank (H200,
// 128x128 with scales of columns: 1.02 to 1.05 of the speed without pairs, groups of K 1.00).
template <class O>
TC_DEVICE void stage_floats(u32 panel, const float* x) {
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int row = lane / 4 + 8 * half, swizzle = panel_swizzle<O>(row);
    const u32 at = panel + row * (O::kPanel * 4) + lane % 2 * 8;
#pragma unroll
    for (int j = 0; j < O::kPanel / 8; ++j) {
      const float* s = x + 4 * j + 2 * half;
      // volatile, else ptxas stores two.
      asm volatile("st.volatile.shared.f32 [%0], %1; st.volatile.shared.f32 [%0 + 4], %2;" ::"r"(
                       at + ((2 * j + lane % 4 / 2) ^ swizzle) * 16),
                   "f"(s[0]), "f"(s[1])
                   : "memory");
    }
  }
}

// The same of all other outputs: with kGrouped rows of other groups may follow. A loop, whose code
// does not lie between the panels of store_aligned.
template <class O, bool kGrouped>
TC_DEVICE void store_others(const Sm90ScaledParams& p, int n0, u32 staging, int& turn, int m,
                            int m_end, bool unaligned, const float (&sum)[O::kTileN / 2]) {
  const int lane = threadIdx.x % 32, left_m = m_end - m;
#pragma unroll 1
  for (int panel = 0; panel < O::kPanels; ++panel) {
    const int n = n0 + O::column(panel), left_n = p.n - n;
    const u32 buffer = next_buffer<O>(staging, turn);
#pragma unroll
    for (int own = 0; own < O::kPanels; ++own) {
      const float* x = sum + O::column(own) / 2;
      if (own != panel) continue;
      if constexpr (O::kElement == 4 && O::kSingleStores) {
        stage_floats<O>(buffer, x);
      } else if (O::kElement == 4 || p.out_type == kScaledBFloat16) {
        stage_columns<O, O::kPanel>(buffer, 0, x);
      } else {
        stage_columns<Output<O, DType::float16>, O::kPanel>(buffer, 0, x);
      }
    }
    if (unaligned) {
      __syncwarp();
      if (left_n > 0) {
        const tc_int64 at = m * p.out_stride + n;
        if constexpr (O::kElement == 4) {
          store_elements<O>(buffer, p, at, left_m, left_n);
        } else {
          store_panel_unaligned<O>(buffer, static_cast<u16*>(p.out) + at, p.out_stride,
                                   min(16, left_m), min(O::kPanel, left_n));
        }
      }
      // next_buffer counts a group for each buffer, of the TMA's stores and of these.
      if (kGrouped && lane == 0) tma_store_commit();
      continue;
    }
    fence_async_proxy();
    __syncwarp();
    if (lane == 0) {
      if (left_n > 0) tma_store(&p.out_map, buffer, n, m, kEvictFirst);
      tma_store_commit();
    }
  }
}

// Whether one thread stores what the consumers have staged.
TC_DEVICE bool is_stored_together(const Sm90ScaledParams& p) {
  return !(p.flags & kScaledOutUnaligned) &&
         (p.out_type == kScaledBFloat16 || p.out_type == kScaledFloat16);
}

// A warp's part of its warpgroup's staging buffers, whose panels one thread stores.
template <class C>
struct Outbox {
  u32 buffers, staged, stored;  // of buffer 0
  int turn = 0;
  u32 phase = 0;

  // Stages 16 rows from row m on, in all of the tile's columns. kGrouped: rows of another group may
  // follow, so that the warp itself stores fewer than 16.
  template <class O, bool kGrouped>
  TC_DEVICE void put(const Sm90ScaledParams& p, int n0, int m, int m_end,
                     const float (&sum)[O::kTileN / 2]) {
    if constexpr (kGrouped) {
      if (m < m_end && m_end - m < 16) {
        put_tail<O>(p, n0, m, m_end - m, sum);
        return;
      }
    }
    const bool exists = m < m_end;
#pragma unroll
    for (int panel = 0; panel < O::kPanels; ++panel) {
      barrier_wait(stored + 8 * turn, phase ^ 1);
      if (exists) stage_columns<O, O::kPanel>(buffer<O>(), 0, sum + O::column(panel) / 2);
      pass_on();
    }
  }

 private:
  template <class O>
  TC_DEVICE u32 buffer() const {
    return buffers + turn * (4 * 2048) + threadIdx.x / 32 % 4 * O::kPanelBytes;
  }

  TC_DEVICE void pass_on() {
    __syncwarp();
    if (threadIdx.x % 32 == 0) barrier_arrive(staged + 8 * turn);
    if (++turn == C::kBuffers) {
      turn = 0;
      phase ^= 1;
    }
  }

  template <class O>
  TC_DEVICE void put_tail(const Sm90ScaledParams& p, int n0, int m, int rows,
                          const float (&sum)[O::kTileN / 2]) {
#pragma unroll 1
    for (int panel = 0; panel < O::kPanels; ++panel) {
      const int n = n0 + O::column(panel), columns = min(O::kPanel, p.n - n);
      barrier_wait(stored + 8 * turn, phase ^ 1);
#pragma unroll
      for (int own = 0; own < O::kPanels; ++own) {
        if (own == panel) stage_columns<O, O::kPanel>(buffer<O>(), 0, sum + O::column(own) / 2);
      }
      __syncwarp();
      if (columns > 0) {
        store_panel_unaligned<O>(buffer<O>(), static_cast<u16*>(p.out) + m * p.out_stride + n,
                                 p.out_stride, rows, columns);
      }
      pass_on();
    }
  }
};

// NOTE: code that runs once for each tile mostly waits for instructions. So it is short, and what
// most calls do not execute lies apart: sums are scaled before the branches by types.
template <class C, bool kGrouped>
TC_DEVICE void scale_and_store_rows(const Sm90ScaledParams& p, int n0, u32 staging, int& turn,
                                    Outbox<C>& outbox, int m, int m_end, bool is_wrong,
                                    const float (&rows)[2], const Columns<C::kTileN>& columns,
                                    float (&sum)[C::kTileN / 2]) {
  const bool together = C::kStores && is_stored_together(p);
  if (m >= m_end && !together) return;
  // NOTE: a branch for all columns; one for each shuffle took a tenth of a product with K of 1536.
  // Rows of a group with a wrong end have the factor NaN. NOTE: a branch by that factor, of which a
  // lane has its own, made ptxas take lanes to diverge in all of the loop over tiles: 4,344
  // instructions (groups, 128x128) for 3,248, and descriptors moved to uniform registers.
  const bool factors = kGrouped && is_wrong;
  if (p.bias != nullptr) {
    columns.template apply<C::kTileN, true>(sum, 0, rows);
  } else if (factors || !(p.flags & kScaledBlocks)) {
    columns.template apply<C::kTileN, false>(sum, 0, rows);
  }
  const bool unaligned = p.flags & kScaledOutUnaligned || (kGrouped && m_end - m < 16);
  const bool is_bfloat16 = p.out_type == kScaledBFloat16;
  const bool is_float16 = p.out_type == kScaledFloat16;
  if (together) {
    if constexpr (C::kStores) {
      if (is_bfloat16) {
        outbox.template put<Output<C, DType::bfloat16>, kGrouped>(p, n0, m, m_end, sum);
      } else {
        outbox.template put<Output<C, DType::float16>, kGrouped>(p, n0, m, m_end, sum);
      }
    }
  } else if (!C::kStores && is_bfloat16 && !unaligned) {
    store_aligned<Output<C, DType::bfloat16>>(p, n0, staging, turn, m, sum);
  } else if (!C::kStores && is_float16 && !unaligned) {
    store_aligned<Output<C, DType::float16>>(p, n0, staging, turn, m, sum);
  } else if (is_bfloat16 || is_float16) {
    store_others<Output<C, DType::bfloat16>, kGrouped>(p, n0, staging, turn, m, m_end, true, sum);
  } else {
    store_others<Output<C, DType::float32>, kGrouped>(p, n0, staging, turn, m, m_end, unaligned,
                                                      sum);
  }
}

}  // namespace sm90
}  // namespace torch_cubin
