// Rows for attention's backward of e4m3 on Hopper (sm90/e4m3_backward.cu), like
// sm90/backward_delta.cu:
//
//   logsumexp * log2(e) + kE4m3WeightShift, and delta = sum over the columns of grad_out * out,
//   with grad_out as rounded below, in units of the row's factor times v_descale
//   grad_out as e4m3: divided by the row's factor, the smallest power of two that leaves at most 448
//   that factor, and its inverse
//   if there is a wide_query, q in bfloat16, times the factor
//
// Delta has the rounded grad_out for the sums of dS along a row to be 0: dq and dk are the
// gradients for that grad_out.
//
// Eight lanes a row; a block has kTileM rows of one tile, and a thread requests all of its rows at
// once.
#include "attention/numbers.cuh"
#include "backward_dq.cuh"
#include "common/dtype.cuh"
#include "e4m3_backward_numbers.cuh"

namespace torch_cubin::TC_KERNEL {

using namespace sm90;

constexpr int kTileM = TC_TILE_M, kThreads = TC_THREADS;
constexpr int kLanes = 8;
constexpr int kVectors = TC_TILE_K / (8 * kLanes);  // of 8 columns, that a lane has of a row
constexpr int kRowsAtOnce = kThreads / kLanes, kTogether = kTileM / kRowsAtOnce;  // of a thread
static_assert(kTogether == 3 && kTogether * kRowsAtOnce == kTileM && TC_TILE_K == 16 * kLanes);

constexpr float kMostE4m3 = 448.0f;

TC_DEVICE float reduce_row(float value, bool maximum) {
#pragma unroll
  for (int step = kLanes / 2; step > 0; step /= 2) {
    float other = __shfl_xor_sync(~0u, value, step);
    value = maximum ? fmaxf(value, other) : value + other;
  }
  return value;
}

// The smallest power of two, but not below 2^-100, that is at least most / 448.
TC_DEVICE float factor_of(float most) {
  u32 bits = __float_as_uint(fmaxf(most / kMostE4m3, 7.8886091e-31f));
  return __uint_as_float((bits + 0x7fffff) & 0xff800000);
}

struct Row {
  tc_int64 index;  // of batch, head and row
  int batch, head;
  tc_int64 row;
};

// What a lane has of a row, zeros if there is no such row.
struct Parts {
  uint4 grad[kVectors] = {}, out[kVectors] = {};
  uint4 query = {};  // 16 columns

  TC_DEVICE Parts(const Sm90E4m3BackwardParams& p, const Row& of, bool exists, int lane) {
    if (!exists) return;
    auto from = static_cast<const u16*>(p.out) + of.batch * p.out_stride[0] +
                of.head * p.out_stride[1] + of.row * p.out_stride[2];
    auto gradient = static_cast<const u16*>(p.grad_out_rows) + of.batch * p.grad_out_stride[0] +
                    of.head * p.grad_out_stride[1] + of.row * p.grad_out_stride[2];
#pragma unroll
    for (int i = 0; i < kVectors; ++i) {
      int column = 8 * (lane + kLanes * i);
      if (column >= p.head_dim_v) continue;
      grad[i] = __ldg(reinterpret_cast<const uint4*>(gradient + column));
      out[i] = __ldg(reinterpret_cast<const uint4*>(from + column));
    }
    if (p.wide_query != nullptr && 16 * lane < p.head_dim) {
      query = __ldg(reinterpret_cast<const uint4*>(p.query + of.batch * p.query_stride[0] +
                                                   of.head * p.query_stride[1] +
                                                   of.row * p.query_stride[2] + 16 * lane));
    }
  }
};

// Rounds a row of grad_out, and returns a lane's part of its product with out. In a whole warp.
TC_DEVICE float round_gradient(const Sm90E4m3BackwardParams& p, const Row& of, const Parts& parts,
                               bool exists, int lane, float& factor, float& inverse) {
  float most = 0.0f;
  bool finite = true;  // fmaxf() drops NaN
#pragma unroll
  for (int i = 0; i < kVectors; ++i) {
    if (8 * kLanes * i >= p.head_dim_v) continue;
    const uint4& g = parts.grad[i];
#pragma unroll
    for (u32 word : {g.x, g.y, g.z, g.w}) {
      float a = fabsf(bf16_to_float(static_cast<u16>(word)));
      float b = fabsf(bf16_to_float(static_cast<u16>(word >> 16)));
      most = fmaxf(most, fmaxf(a, b));
      finite = finite && a < kInfinity && b < kInfinity;
    }
  }
  most = reduce_row(finite ? most : kInfinity, true);
  // A row that is not finite makes its dP NaN. Its q stays finite: hidden keys have dS of 0.
  bool lost = !(most < kInfinity);
  factor = lost ? 1.0f : factor_of(most);
  inverse = lost ? __uint_as_float(kNaN) : 1.0f / factor;
  float sum = 0.0f;
#pragma unroll
  for (int i = 0; i < kVectors; ++i) {
    if (8 * kLanes * i >= p.head_dim_v) continue;
    const uint4 &g = parts.grad[i], &o = parts.out[i];
    u32 x[4] = {g.x, g.y, g.z, g.w}, y[4] = {o.x, o.y, o.z, o.w}, bytes[2];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      u32 a = x[2 * half], b = x[2 * half + 1];
      bytes[half] = pack_e4m3(bf16_to_float(static_cast<u16>(a)) * inverse,
                              bf16_to_float(static_cast<u16>(a >> 16)) * inverse,
                              bf16_to_float(static_cast<u16>(b)) * inverse,
                              bf16_to_float(static_cast<u16>(b >> 16)) * inverse);
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        float2 rounded = unpack_e4m3(bytes[half] >> (16 * j));
        u32 with = y[2 * half + j];
        sum = fmaf(rounded.x, bf16_to_float(static_cast<u16>(with)), sum);
        sum = fmaf(rounded.y, bf16_to_float(static_cast<u16>(with >> 16)), sum);
      }
    }
    int column = 8 * (lane + kLanes * i);
    if (exists && column < p.head_dim_v) {
      *reinterpret_cast<uint2*>(p.grad_rows + of.index * p.head_dim_v + column) =
          make_uint2(bytes[0], bytes[1]);
    }
  }
  return sum;
}

// 16 columns of a row of q to bfloat16, times `factor`.
TC_DEVICE void widen(const uint4& query, u16* to, float factor) {
  u32 four[4] = {query.x, query.y, query.z, query.w}, wide[8];
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    float2 two = unpack_e4m3(four[i / 2] >> (16 * (i % 2)));
    wide[i] = pack_bf16(two.x * factor, two.y * factor);
  }
  auto out = reinterpret_cast<uint4*>(to);
  out[0] = make_uint4(wide[0], wide[1], wide[2], wide[3]);
  out[1] = make_uint4(wide[4], wide[5], wide[6], wide[7]);
}

extern "C" __global__ void __launch_bounds__(kThreads)
    TC_KERNEL(const __grid_constant__ Sm90E4m3BackwardParams p) {
  wait_for_previous_kernel();
  int blocks = p.tile_rows / kTileM;  // of a tile
  u32 index = blockIdx.x / blocks;
  int first = blockIdx.x % blocks * kTileM + threadIdx.x / kLanes;  // of this thread's, in the tile
  QueryTile tile(p, index);
  Sm90Sequence sequence(p.lengths, tile.batch);
  int lane = threadIdx.x % kLanes, rows = sequence.rows - tile.tile * p.tile_rows;
  if (threadIdx.x == 0 && first == 0) p.turns[index] = 0;
  if (threadIdx.x == 0 && blockIdx.x == 0) *p.ticket = 0;
  auto row_of = [&](int i) -> Row {
    int row = tile.tile * p.tile_rows + first + i * kRowsAtOnce;
    return {(tc_int64{tile.batch} * p.heads + tile.head) * sequence.rows + row, tile.batch,
            tile.head, row};
  };
  auto exists = [&](int i) { return first + i * kRowsAtOnce < rows; };
  Parts parts[kTogether] = {{p, row_of(0), exists(0), lane},
                            {p, row_of(1), exists(1), lane},
                            {p, row_of(2), exists(2), lane}};
  // Lanes 0, 1, ... have the logsumexp of the first row, the next one, ...
  float logsumexp = kInfinity;
  if (lane < kTogether && exists(lane)) {
    logsumexp = p.logsumexp[tile.batch * p.logsumexp_stride[0] + tile.head * p.logsumexp_stride[1] +
                            row_of(lane).row];
  }
  float unit = descale_of_head(p.v_descale, tile.batch, tile.head / p.group);
  float factor = 0, inverse = 0, delta = 0;  // of this lane's row
#pragma unroll
  for (int i = 0; i < kTogether; ++i) {
    float own_factor, own_inverse;
    Row of = row_of(i);
    float sum = reduce_row(
        round_gradient(p, of, parts[i], exists(i), lane, own_factor, own_inverse), false);
    if (p.wide_query != nullptr && exists(i) && 16 * lane < p.head_dim) {
      widen(parts[i].query, p.wide_query + of.index * p.head_dim + 16 * lane, own_factor);
    }
    if (lane != i) continue;
    factor = own_factor;
    inverse = own_inverse;
    delta = sum;
  }
  if (lane >= kTogether) return;
  int own = first + lane * kRowsAtOnce;
  float* to = p.sums + static_cast<tc_int64>(index) * (3 * p.tile_rows) + own;
  to[0] = logsumexp == -kInfinity ? kInfinity
                                  : fmaf(logsumexp, p.logsumexp_unit, float(kE4m3WeightShift));
  to[p.tile_rows] = unit == 0.0f ? 0.0f : delta / unit;
  to[2 * p.tile_rows] = inverse;
  p.row_factors[static_cast<tc_int64>(index) * p.tile_rows + own] = factor;
}

}  // namespace torch_cubin::TC_KERNEL
/* torch_cubin kernels
{"virtual_arch": ["90a"],
 "kernels": [
  {"name": "sm90_e4m3_backward_delta_attention", "kind": "delta", "dtype": "float8_e4m3fn",
   "math": "bfloat16", "tile": [48, 1, 128], "block": [128, 1, 1],
   "cost": {"k_tile": 0, "fixed": 0}}]}
*/
