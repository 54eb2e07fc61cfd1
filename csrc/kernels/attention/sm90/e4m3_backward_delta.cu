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
// Eight lanes a row; a block has kTileM rows of one tile.
#include "attention/numbers.cuh"
#include "backward_dq.cuh"
#include "common/dtype.cuh"
#include "e4m3_backward_numbers.cuh"

namespace torch_cubin::TC_KERNEL {

using namespace sm90;

constexpr int kTileM = TC_TILE_M, kThreads = TC_THREADS;
constexpr int kLanes = 8;
constexpr int kVectors = TC_TILE_K / (8 * kLanes);  // of 8 columns, that a lane has of a row
static_assert(kTileM * kLanes == kThreads, "eight lanes a row");

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

// A lane's part of grad_out times out. In a whole warp; `width`: columns, 0 if there is no such
// row.
TC_DEVICE float round_gradient(const Sm90E4m3BackwardParams& p, const Row& of, int width, int lane,
                               float& factor, float& inverse) {
  auto out = static_cast<const u16*>(p.out) + of.batch * p.out_stride[0] +
             of.head * p.out_stride[1] + of.row * p.out_stride[2];
  auto grad = static_cast<const u16*>(p.grad_out_rows) + of.batch * p.grad_out_stride[0] +
              of.head * p.grad_out_stride[1] + of.row * p.grad_out_stride[2];
  u32 x[kVectors][4], y[kVectors][4];
  float most = 0.0f;
  bool finite = true;  // fmaxf() drops NaN
#pragma unroll
  for (int i = 0; i < kVectors; ++i) {
    int column = 8 * (lane + kLanes * i);
    uint4 g = make_uint4(0, 0, 0, 0), o = g;
    if (column < width) {
      g = __ldg(reinterpret_cast<const uint4*>(grad + column));
      o = __ldg(reinterpret_cast<const uint4*>(out + column));
    }
    x[i][0] = g.x, x[i][1] = g.y, x[i][2] = g.z, x[i][3] = g.w;
    y[i][0] = o.x, y[i][1] = o.y, y[i][2] = o.z, y[i][3] = o.w;
#pragma unroll
    for (u32 word : x[i]) {
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
    u32 bytes[2];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      u32 a = x[i][2 * half], b = x[i][2 * half + 1];
      bytes[half] = pack_e4m3(bf16_to_float(static_cast<u16>(a)) * inverse,
                              bf16_to_float(static_cast<u16>(a >> 16)) * inverse,
                              bf16_to_float(static_cast<u16>(b)) * inverse,
                              bf16_to_float(static_cast<u16>(b >> 16)) * inverse);
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        float2 rounded = unpack_e4m3(bytes[half] >> (16 * j));
        u32 with = y[i][2 * half + j];
        sum = fmaf(rounded.x, bf16_to_float(static_cast<u16>(with)), sum);
        sum = fmaf(rounded.y, bf16_to_float(static_cast<u16>(with >> 16)), sum);
      }
    }
    int column = 8 * (lane + kLanes * i);
    if (column < width) {
      *reinterpret_cast<uint2*>(p.grad_rows + of.index * p.head_dim_v + column) =
          make_uint2(bytes[0], bytes[1]);
    }
  }
  return sum;
}

// A row to bfloat16, times `factor`: 16 columns a lane.
TC_DEVICE void widen_row(const unsigned char* from, u16* to, int columns, int lane, float factor) {
#pragma unroll 1
  for (int column = 16 * lane; column < columns; column += 16 * kLanes) {
    uint4 x = __ldg(reinterpret_cast<const uint4*>(from + column));
    u32 four[4] = {x.x, x.y, x.z, x.w}, wide[8];
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      float2 two = unpack_e4m3(four[i / 2] >> (16 * (i % 2)));
      wide[i] = pack_bf16(two.x * factor, two.y * factor);
    }
    auto out = reinterpret_cast<uint4*>(to + column);
    out[0] = make_uint4(wide[0], wide[1], wide[2], wide[3]);
    out[1] = make_uint4(wide[4], wide[5], wide[6], wide[7]);
  }
}

extern "C" __global__ void __launch_bounds__(kThreads)
    TC_KERNEL(const __grid_constant__ Sm90E4m3BackwardParams p) {
  wait_for_previous_kernel();
  int blocks = p.tile_rows / kTileM;  // of a tile
  u32 index = blockIdx.x / blocks;
  int within = blockIdx.x % blocks * kTileM + threadIdx.x / kLanes;
  QueryTile tile(p, index);
  Sm90Sequence sequence(p.lengths, tile.batch);
  int row = tile.tile * p.tile_rows + within, lane = threadIdx.x % kLanes;
  if (threadIdx.x == 0 && within == 0) p.turns[index] = 0;
  if (threadIdx.x == 0 && blockIdx.x == 0) *p.ticket = 0;
  float logsumexp = kInfinity, factor, inverse;
  bool exists = row < sequence.rows;
  Row of = {(tc_int64{tile.batch} * p.heads + tile.head) * sequence.rows + row, tile.batch,
            tile.head, row};
  float sum =
      reduce_row(round_gradient(p, of, exists ? p.head_dim_v : 0, lane, factor, inverse), false);
  if (exists) {
    if (p.wide_query != nullptr) {
      widen_row(p.query + of.batch * p.query_stride[0] + of.head * p.query_stride[1] +
                    of.row * p.query_stride[2],
                p.wide_query + of.index * p.head_dim, p.head_dim, lane, factor);
    }
    logsumexp =
        p.logsumexp[tile.batch * p.logsumexp_stride[0] + tile.head * p.logsumexp_stride[1] + row];
  }
  if (lane == 0) {
    float unit = descale_of_head(p.v_descale, tile.batch, tile.head / p.group);
    float* to = p.sums + static_cast<tc_int64>(index) * (3 * p.tile_rows) + within;
    to[0] = logsumexp == -kInfinity ? kInfinity
                                    : fmaf(logsumexp, p.logsumexp_unit, float(kE4m3WeightShift));
    to[p.tile_rows] = unit == 0.0f ? 0.0f : sum / unit;
    to[2 * p.tile_rows] = inverse;
    p.row_factors[static_cast<tc_int64>(index) * p.tile_rows + within] = factor;
  }
}

}  // namespace torch_cubin::TC_KERNEL
/* torch_cubin kernels
{"virtual_arch": ["90a"],
 "kernels": [
  {"name": "sm90_e4m3_backward_delta_attention", "archs": ["sm_90a"],
   "kind": "delta", "dtype": "float8_e4m3fn", "math": "bfloat16",
   "layout": "any", "alignment": 16, "tile": [16, 1, 128], "stages": 1, "block": [128, 1, 1],
   "dynamic_shared": 0, "cost": {"k_tile": 0, "fixed": 0}}]}
*/
