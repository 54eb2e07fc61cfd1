// Quantises rows to 8-bit floats, with a scale for each 128 columns or for a row; bound by memory.
// quantize_params.h defines the result.
//
// Roles: of `block` and `gated` kernels kLanes neighbouring threads have 128 columns of a row, and
// their neighbours those of the next row. Of `row` kernels some neighbouring threads have a row, by
// its length, and keep it; of a row that is longer than a block of threads keeps they keep the last
// part, and read the others again, from a cache.
#include "numbers.cuh"

namespace torch_cubin::TC_KERNEL {

constexpr DType kType = DType::TC_DTYPE;
enum Mode { kBlock, kGated, kRow };
constexpr Mode kMode = Mode::TC_MODE;
// Of a block of 128 columns: gates and ups of 32 columns would take 111 registers (+30% of time).
constexpr int kLanes = kMode == kGated ? 8 : 4, kBlockColumns = 128;
constexpr int kEights = kBlockColumns / (kLanes * kEight);  // of a thread in a block
constexpr int kKept = kQuantizeKept / kEight;
// The quantised elements are as x stores them, or gated ones.
constexpr DType kValues = kMode == kGated ? DType::float32 : kType;
// Blocks of a multiprocessor, as registers suffice for: ptxas took more, 2 to 5% slower (H200,
// 16384 x 7168). One block more was slower by as much, of gated rows as quick.
constexpr int kResident = kMode == kBlock   ? 4
                          : kMode == kGated ? kQuantizeGatedResident
                                            : 5 - (kType == DType::float32 ? 1 : 0);
static_assert(TC_THREADS == kQuantizeThreads || kMode != kRow);
static_assert(TC_TILE_M == TC_THREADS / kLanes || kMode == kRow);

// Eight elements, or the eight gates and eight ups that they are made of.
struct Source {
  Eight<kType> x, up;

  TC_DEVICE Eight<kValues> values() const {
    Eight<kValues> out;
    if constexpr (kMode == kGated) {
      float gates[kEight], ups[kEight];
      x.unpack(gates), up.unpack(ups);
#pragma unroll
      for (int i = 0; i < kEight; ++i) {
        out.words[i] = __float_as_uint(gated_by_silu(gates[i], ups[i]));
      }
    } else {
#pragma unroll
      for (int i = 0; i < x.kWords; ++i) out.words[i] = x.words[i];
    }
    out.drop_infinities();
    return out;
  }
};

// The elements of a row from a column on; of a row that does not exist, none.
template <bool kVectors, bool kE5m2>
class Part {
 public:
  TC_DEVICE Part(const QuantizeParams& p, tc_int64 row, int column)
      : from_(static_cast<const Storage*>(p.x) + row * p.x_stride + column),
        to_(p.data + row * p.data_stride + column),
        up_(p.up),
        flags_(p.flags),
        first_(row < p.rows ? column : p.columns) {}

  // The same of row `from` of x, with ends by another count, in which the elements begin at
  // `first`.
  TC_DEVICE Part(const QuantizeParams& p, tc_int64 from, tc_int64 row, int column, int first)
      : from_(static_cast<const Storage*>(p.x) + from * p.x_stride + column),
        to_(p.data + row * p.data_stride + column),
        up_(p.up),
        flags_(p.flags),
        first_(first) {}

  // Eight elements, zeros from column `end` of the row on. kOnce: the L2 cache may drop them first.
  template <bool kOnce = false>
  TC_DEVICE Source read(int at, int end) const {
    const int count = end - first_ - at;
    Source out;
    out.x.template load<kVectors, kOnce>(from_ + at, count);
    if constexpr (kMode == kGated) out.up.template load<kVectors, kOnce>(from_ + up_ + at, count);
    return out;
  }

  TC_DEVICE float scale_of(float largest) const {
    return float8_scale(largest, e5m2(), flags_ & kQuantizePowerOfTwo);
  }

  // Rows that are read by vectors are written by vectors.
  TC_DEVICE void write(int at, int end, const Eight<kValues>& x, float inverse) const {
    float inverses[kEight];
#pragma unroll
    for (float& own : inverses) own = inverse;
    store_eight(to_ + at, quantized(x, inverses, e5m2()), end - first_ - at,
                kVectors || flags_ & kQuantizeOutVectors);
  }

 private:
  using Storage = typename Eight<kType>::Storage;
  TC_DEVICE bool e5m2() const { return kVectors ? kE5m2 : flags_ & kQuantizeE5m2; }

  const Storage* from_;
  unsigned char* to_;
  tc_int64 up_;
  int flags_, first_;
};

// Before the wait for the kernel before: half of what blocks that are resident then read. NOTE: of
// 4096 x 2048 all of it takes 6.24 us, half 5.9, nothing 6.4 (H200); of more the same.
TC_DEVICE void prefetch_early(const QuantizeParams& p) {
  constexpr int kElement = sizeof(typename Eight<kType>::Storage);
  constexpr tc_int64 kOwn = TC_TILE_M * kBlockColumns * kElement;  // of gates and ups
  if (blockIdx.x >= static_cast<u32>(p.flags) >> kQuantizeEarly || threadIdx.x > 0) return;
  const tc_int64 from = blockIdx.x * kOwn, left = p.rows * p.x_stride * kElement - from;
  if (left <= 0) return;
  asm volatile(
      "cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(static_cast<const char*>(p.x) + from),
      "r"(static_cast<u32>(left < kOwn ? left : kOwn)));
}

// kGathers: of rows by their numbers. kOnce: the L2 cache may drop x first.
template <bool kVectors, bool kE5m2, bool kGathers, bool kOnce = false>
TC_DEVICE void quantize_blocks(const QuantizeParams& p) {
  const u32 blocks = (p.columns + kBlockColumns - 1) / kBlockColumns;  // of a row
  // Scales of neighbouring rows are neighbours in memory: kQuantizeBand of them are one sector.
  const u32 own = blockIdx.x * TC_TILE_M + threadIdx.x / kLanes, place = own / kQuantizeBand;
  const u32 estimate = __umulhi(place, p.inverse_blocks);  // or one less than the band
  const u32 rest = place - estimate * blocks;
  const u32 band = estimate + (rest >= blocks), block = rest >= blocks ? rest - blocks : rest;
  const u32 row = band * kQuantizeBand + own % kQuantizeBand;
  const int lane = threadIdx.x % kLanes, column = block * kBlockColumns + lane * kEight;
  // NOTE: a count of the thread's own, from 0, for which ptxas finds fewer instructions: 4096 x
  // 2048 takes 7.35 us, and 7.6 with ends that are columns of the row (H200).
  const int count = row < p.rows ? p.columns - column : 0;
  constexpr int kStep = kLanes * kEight;
  u32 from = row;
  if constexpr (kGathers) {
    wait_for_previous_grid();
    from = row < p.rows ? p.numbers[row] : ~0u;
  }
  const bool exists = !kGathers || from < static_cast<u32>(p.x_rows);
  const Part<kVectors, kE5m2> part(p, from, row, column, 0);
  if constexpr (!kGathers) {
    if constexpr (kMode == kGated) prefetch_early(p);
    wait_for_previous_grid();
  }
  Source sources[kEights];
#pragma unroll
  for (int i = 0; i < kEights; ++i) {
    sources[i] = part.template read<kOnce>(i * kStep, exists ? count : 0);
  }
  Eight<kValues> x[kEights];
#pragma unroll
  for (int i = 0; i < kEights; ++i) x[i] = sources[i].values();
  Eight<kValues> most = x[0];
#pragma unroll
  for (int i = 1; i < kEights; ++i) most.keep_larger(x[i]);
  const float scale = part.scale_of(largest_of_lanes<kLanes>(most.largest()));
  const float inverse = __frcp_rn(scale);
#pragma unroll
  for (int i = 0; i < kEights; ++i) part.write(i * kStep, count, x[i], inverse);
  if (lane == 0 && row < p.rows) p.scales[row * p.scale_stride + block * p.scale_stride_k] = scale;
}

// The largest of a number over the threads of a row; `shared` has a float for each warp.
TC_DEVICE float largest_of_row(const QuantizeParams& p, float most, float* shared) {
  const int lanes = 1 << p.row_threads_log2;
#pragma unroll
  for (int step = 1; step < 32; step *= 2) {
    if (step < lanes) most = fmaxf(most, __shfl_xor_sync(~0u, most, step));
  }
  if (lanes <= 32) return most;
  const int warp = threadIdx.x / 32, others = lanes / 32 - 1;
  if (threadIdx.x % 32 == 0) shared[warp] = most;
  __syncthreads();
  return largest_of_lanes<8>(shared[(warp & ~others) | (threadIdx.x & others)]);
}

template <bool kVectors, bool kE5m2>
TC_DEVICE void quantize_rows(const QuantizeParams& p) {
  __shared__ float maxima[TC_THREADS / 32];
  const tc_int64 row = (blockIdx.x * tc_int64{TC_THREADS} + threadIdx.x) >> p.row_threads_log2;
  const int lane = threadIdx.x & ((1 << p.row_threads_log2) - 1);
  const int step = kEight << p.row_threads_log2, kept = kKept * step;
  const Part<kVectors, kE5m2> part(p, row, lane * kEight);
  Eight<kValues> x[kKept], most;
  const auto read = [&](int from, int end) {
    Source sources[kKept];
#pragma unroll
    for (int i = 0; i < kKept; ++i) sources[i] = part.read(from + i * step, end);
#pragma unroll
    for (int i = 0; i < kKept; ++i) x[i] = sources[i].values();
  };
  int from = 0, end = p.columns - ((p.columns - 1) & -kept);  // so that other parts are whole
  while (true) {
    read(from, end);
#pragma unroll
    for (int i = 0; i < kKept; ++i) most.keep_larger(x[i]);
    if (end == p.columns) break;
    from = end, end += kept;
  }
  const float scale = part.scale_of(largest_of_row(p, most.largest(), maxima));
  const float inverse = __frcp_rn(scale);
  while (true) {
#pragma unroll
    for (int i = 0; i < kKept; ++i) {
      if (from + i * step >= end) break;
      part.write(from + i * step, end, x[i], inverse);
    }
    if (from == 0) break;
    end = from, from = max(from - kept, 0);
    read(from, end);
  }
  if (lane == 0 && row < p.rows) p.scales[row * p.scale_stride] = scale;
}

template <bool kVectors, bool kE5m2>
TC_DEVICE void run(const QuantizeParams& p) {
  if constexpr (kMode == kRow) {
    wait_for_previous_grid();
    quantize_rows<kVectors, kE5m2>(p);
  } else if (kMode == kBlock && !kE5m2 && p.numbers != nullptr) {
    quantize_blocks<kVectors, false, true>(p);
  } else if (kMode == kGated && kVectors && p.flags & kQuantizeReadOnce) {
    quantize_blocks<kVectors, kE5m2, false, kVectors>(p);
  } else {
    quantize_blocks<kVectors, kE5m2, false>(p);
  }
}

extern "C" __global__ void __launch_bounds__(TC_THREADS, kResident)
    TC_KERNEL(const __grid_constant__ QuantizeParams p) {
  launch_next_grid();  // 0.4 to 2.6% of 7 us less than after the wait (H200, 4096 x 2048)
  if (!(p.flags & kQuantizeVectors)) {
    run<false, false>(p);
  } else if (p.flags & kQuantizeE5m2) {
    run<true, true>(p);
  } else {
    run<true, false>(p);
  }
}

}  // namespace torch_cubin::TC_KERNEL

/* torch_cubin kernels
{"virtual_arch": ["90a"],
 "kernels": [
  {"name": "rows_quantize_{d.short}_{m.name}", "kind": "rows", "math": "float32", "alignment": 1,
   "tile": ["{m.blocks}", 128, 1], "block": ["{m.threads}", 1, 1], "cost": {}, "mode": "{m.name}",
   "defines": {"TC_DTYPE": "{d.dtype}", "TC_MODE": "{m.mode}"},
   "for": {
    "d": "f16 bf16 f32",
    "m": [
     ["name", "mode", "blocks", "threads"],
     ["block", "kBlock", 64, 256],
     ["gated", "kGated", 16, 128],
     ["row",   "kRow",    1, 256]]}}]}
*/
