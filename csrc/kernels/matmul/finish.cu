// The epilogue for products of kernels that have none: those store unrounded sums, and this kernel
// scales them, adds bias and addend, applies the activation and rounds once; also to what precedes
// the activation, if its derivative needs that. If K was split it first adds the splits' sums, in
// order. Bound by memory bandwidth, or by the L2 cache for small products whose sums are still
// there.
//
// Roles: all threads are alike; each takes four adjacent columns of a row at a time.
#include "activation.cuh"
#include "common/dtype.cuh"
#include "finish_params.h"

namespace torch_cubin::TC_KERNEL {

constexpr DType kDType = DType::TC_DTYPE;
using Traits = DTypeTraits<kDType>;
using Storage = Traits::Storage;
using Accumulator = Traits::Accumulator;
constexpr bool kExact = sizeof(Storage) > 2;
constexpr int kColumns = 4;
// Loads in flight of further splits' sums. Kernels for one matrix of sums need the registers for
// more blocks instead.
constexpr int kLoads = TC_SPLITS ? 28 / sizeof(Accumulator) : 1;
static_assert(TC_TILE_N == TC_THREADS * kColumns && TC_TILE_K == 1, "the table is wrong");

template <class T>
struct alignas(sizeof(T) < 4 ? 4 * sizeof(T) : 16) Vector {
  T values[kColumns];
};

TC_DEVICE float scale_and_add(float factor, float x, float y) { return __fmaf_rn(factor, x, y); }
TC_DEVICE double scale_and_add(double factor, double x, double y) { return fma(factor, x, y); }

TC_DEVICE tc_int64 addend_offset(const FinishParams& p, tc_int64 row) {
  tc_int64 batch = row / p.m;
  tc_int64 offset = (row - batch * p.m) * p.addend_stride_m;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    if (batch == 0) break;
    tc_int64 next = batch / p.batch_size[i];
    offset += (batch - next * p.batch_size[i]) * p.addend_batch_stride[i];
    batch = next;
  }
  return offset;
}

// The sums of all splits, added in order. Loads of several are in flight at a time: one after
// another, those of 16 take 16 times the cache's latency.
template <bool kVectors>
TC_DEVICE void add_splits(const FinishParams& p, const Accumulator* sums, int count,
                          Vector<Accumulator>& x) {
  auto load = [&](Vector<Accumulator>& to, const Accumulator* from) {
    if constexpr (kVectors) {
      to = *reinterpret_cast<const Vector<Accumulator>*>(from);
    } else {
#pragma unroll
      for (int i = 0; i < kColumns; ++i) to.values[i] = i < count ? from[i] : Accumulator(0);
    }
  };
  const tc_int64 next = p.rows * p.n;
  load(x, sums);
  // From zero, as kernels that add the parts of K themselves: the sum of negative zeros is +0.
  if (TC_SPLITS) {
#pragma unroll
    for (int j = 0; j < kColumns; ++j) x.values[j] += Accumulator(0);
  }
#pragma unroll 1
  for (int split = 1; split < p.splits; split += kLoads) {
    Vector<Accumulator> more[kLoads];
#pragma unroll
    for (int i = 0; i < kLoads; ++i) {
      if (split + i < p.splits) load(more[i], sums += next);
    }
#pragma unroll
    for (int i = 0; i < kLoads; ++i) {
      if (split + i >= p.splits) break;
#pragma unroll
      for (int j = 0; j < kColumns; ++j) x.values[j] += more[i].values[j];
    }
  }
}

TC_DEVICE void store(const FinishParams& p, void* tensor, tc_int64 at,
                     const Vector<Storage>& values, int count) {
  auto to = static_cast<Storage*>(tensor) + at;
  if (p.vectors) {
    *reinterpret_cast<Vector<Storage>*>(to) = values;
    return;
  }
#pragma unroll
  for (int i = 0; i < kColumns; ++i) {
    if (i < count) to[i] = values.values[i];
  }
}

TC_DEVICE void finish(const FinishParams& p, tc_int64 row, tc_int64 column) {
  const tc_int64 at = row * p.n + column;
  const int count = static_cast<int>(min(p.n - column, tc_int64(kColumns)));
  auto sums = static_cast<const Accumulator*>(p.sums) + at;
  auto bias = static_cast<const Storage*>(p.bias);
  auto addend = static_cast<const Storage*>(p.addend);
  if (addend != nullptr) addend += addend_offset(p, row) + column * p.addend_stride_n;
  Vector<Accumulator> x;
  if (p.vectors) {
    add_splits<true>(p, sums, count, x);
  } else {
    add_splits<false>(p, sums, count, x);
  }
  Vector<Storage> out;
#pragma unroll
  for (int i = 0; i < kColumns; ++i) {
    Accumulator more = 0;
    if (bias != nullptr && i < count) more = Traits::load(bias[(column + i) * p.bias_stride]);
    x.values[i] = scale_and_add(static_cast<Accumulator>(p.alpha), x.values[i], more);
  }
  if (p.aux != nullptr) {
#pragma unroll
    for (int i = 0; i < kColumns; ++i) out.values[i] = Traits::round(x.values[i]);
    store(p, p.aux, at, out, count);
  }
#pragma unroll
  for (int i = 0; i < kColumns; ++i) {
    Accumulator y = activate<kExact>(x.values[i], p.activation, p.curve);
    if (addend != nullptr && i < count) {
      y = scale_and_add(static_cast<Accumulator>(p.beta),
                        Traits::load(addend[i * p.addend_stride_n]), y);
    }
    out.values[i] = Traits::round(y);
  }
  store(p, p.out, at, out, count);
}

extern "C" __global__ void __launch_bounds__(TC_THREADS, TC_SPLITS ? 4 : 1)
    TC_KERNEL(const __grid_constant__ FinishParams p) {
  wait_for_previous_kernel();
  const tc_int64 columns = (p.n + kColumns - 1) / kColumns;
  const tc_int64 all = p.rows * columns;
  const tc_int64 step = static_cast<tc_int64>(gridDim.x) * TC_THREADS;
  const tc_int64 first = static_cast<tc_int64>(blockIdx.x) * TC_THREADS + threadIdx.x;
  for (tc_int64 i = first; i < all; i += step) {
    // 32-bit where possible: a 64-bit division costs about 100 instructions.
    tc_int64 row =
        all < (1ll << 32) ? static_cast<u32>(i) / static_cast<u32>(columns) : i / columns;
    finish(p, row, (i - row * columns) * kColumns);
  }
}

}  // namespace torch_cubin::TC_KERNEL

/* torch_cubin kernels
{"defaults": {
  "kind": "finish", "alignment": "{d.bytes}", "tile": [1, 1024, 1], "block": [256, 1, 1],
  "cost": {"share": 0.85, "fixed": 1500}, "splits": "{s.splits}",
  "defines": {"TC_DTYPE": "{d.dtype}", "TC_SPLITS": "{s.splits}"}},
 "kernels": [
  {"name": "finish_matmul_{d.short}{s.name}",
   "for": {
    "s": [{"name": "", "splits": 0}, {"name": "_splits", "splits": 1}], "d": "f16 bf16 f32"}},
  {"name": "finish_matmul_{d.short}", "for": {"s": [{"splits": 0}], "d": "f64"}}]}
*/
