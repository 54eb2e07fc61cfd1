// The end of attention's backward on Hopper: dq = scale * dq_sum, rounded, reordered from
// sm90/backward.cu's order (sm90/backward_dq.cuh) to dq's strides; of tiles of queries that
// sm90/backward_round.cuh has not rounded. Queries that attend to no key get zeros, since their
// sums were never written. And dk and dv, if they were computed in parts
// (sm90/backward_parts.cuh).
//
// A warp of dq has 8 queries and 64 columns, which it transposes: 8 x 8 of them at a time, then
// within each quad, so that every lane has 8 adjacent columns of one query. A warp of dk or dv has
// 16 keys and 32 columns.
#pragma once

#include "backward_dq.cuh"
#include "backward_sums.cuh"

namespace torch_cubin {
namespace sm90 {

// What dq is multiplied by: for the octet of queries `first` and on of all tiles, in lane t of a
// quad, that of query 2 t + `second`.
struct DqScale {
  const Sm90BackwardParams& p;

  TC_DEVICE DqScale(const Sm90BackwardParams& params, const QueryTile&, tc_int64) : p(params) {}
  TC_DEVICE float operator()(int) const { return p.scale; }
};

template <DType kDType_>
struct JoinConfig {  // of SumRows
  static constexpr DType kDType = kDType_;
  static constexpr int kD = 32;  // of a warp: more would take registers from dq's warps
};

// dk or dv of 16 keys and 32 columns: the sum of the parts, rounded. In warp number `index` of
// these.
template <class JoinConfig>
TC_DEVICE void join(const Sm90BackwardParams& p, u32 index) {
  u32 panels = p.tile_columns / JoinConfig::kD, strips = p.tile_keys / 16, piece = index % panels;
  u32 strip = index / panels % strips, rest = index / (panels * strips);
  PartSum which = rest % kPartSums == kPartDv ? kPartDv : kPartDk;
  WorkItems items(p);
  u32 heads = items.heads / p.parts, head = rest / kPartSums % heads;
  u32 place = rest / (kPartSums * heads);
  if (place >= items.places) return;
  KeyTile of;
  u32 kv_heads = p.heads / p.group;
  of.key_tile = static_cast<int>(place);
  of.head = static_cast<int>(head % kv_heads);
  of.batch = static_cast<int>(head / kv_heads);
  if (p.order != nullptr) {
    if (wrong_offsets_of(p) != 0) return;
    of.key_tile = p.order->places[place].tile;
    of.batch = p.order->places[place].sequence;
  }
  of.sequence = Sm90Sequence(p.lengths, of.batch);
  u32 lane = threadIdx.x % 32;
  const float* from =
      p.part_sums +
      part_place(p, items.number(head * p.parts, place), which, strip / 4, strip % 4 * 32 + lane) +
      piece * (JoinConfig::kD / 8 * 4 * kPartThreads);
  tc_int64 next = static_cast<tc_int64>(kPartSums) * p.tile_keys * p.tile_columns;
  float sum[JoinConfig::kD / 2];
#pragma unroll
  for (float& x : sum) x = 0.0f;
#pragma unroll 1
  for (int part = 0; part < p.parts; ++part, from += next) {
#pragma unroll
    for (int i = 0; i < JoinConfig::kD / 8; ++i) {
      float4 x = __ldcs(reinterpret_cast<const float4*>(from + i * (4 * kPartThreads)));
      sum[4 * i] += x.x;
      sum[4 * i + 1] += x.y;
      sum[4 * i + 2] += x.z;
      sum[4 * i + 3] += x.w;
    }
  }
  bool is_dv = which == kPartDv;
  void* out = static_cast<u16*>(is_dv ? p.dv : p.dk) + JoinConfig::kD * piece;
  int width = (is_dv ? p.head_dim_v : p.head_dim) - static_cast<int>(JoinConfig::kD * piece);
  SumRows<JoinConfig>(sum, is_dv ? p.score.keep_scale : p.scale, out,
                      is_dv ? p.dv_stride : p.dk_stride, width, of,
                      of.key_tile * p.tile_keys + static_cast<int>(16 * strip + lane / 4))
      .store();
}

// In a warp: 8 queries and 64 columns of a tile.
template <DType kDType, class Scale, class Params>
TC_DEVICE void convert_octet(const Params& p, u32 tile, u32 tiles, int panels, int piece,
                             int octet) {
  int wrong_offsets = wrong_offsets_of(p);
  QueryTile place(p, tile);
  Sm90Sequence sequence(p.lengths, place.batch);
  int first = place.tile * p.tile_rows + octet * 8, lane = threadIdx.x % 32;
  if (wrong_offsets != 0 || place.tile < 0 || first >= sequence.rows || piece * 64 >= p.head_dim)
    return;
  auto from = reinterpret_cast<const float4*>(
      p.dq_sum + (static_cast<tc_int64>(tile) * panels + piece) * (64 * p.tile_rows) + octet * 128 +
      lane * 4);
  float4 sum[4];
#pragma unroll
  for (int w = 0; w < 4; ++w) sum[w] = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
#pragma unroll 1
  for (int set = 0; set < p.sets; ++set, from += tiles * panels * (16 * p.tile_rows)) {
    if (additions(p, place, sequence, set) == 0) continue;
#pragma unroll
    for (int w = 0; w < 4; ++w) {
      float4 x = __ldcs(from + w * 4 * p.tile_rows);
      sum[w].x += x.x;
      sum[w].y += x.y;
      sum[w].z += x.z;
      sum[w].w += x.w;
    }
  }
  int row = first + lane / 4, column = piece * 64 + lane % 4 * 8;
  auto to = static_cast<u16*>(p.dq) + place.batch * p.dq_stride[0] + place.head * p.dq_stride[1] +
            static_cast<tc_int64>(sequence.q_row + row) * p.dq_stride[2] + column;
  Scale scale(p, place, tc_int64{tile} * p.tile_rows + octet * 8);
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    u32 word[4];
#pragma unroll
    for (int n = 0; n < 4; ++n) {
      float4 x = sum[2 * half + n / 2];
      u32 two = DTypeTraits<kDType>::pack((n % 2 == 0 ? x.x : x.z) * scale(0),
                                          (n % 2 == 0 ? x.y : x.w) * scale(1));
      word[n] = transpose_8x8(two);
    }
    quad_transpose(word);
    if (row < sequence.rows && column + 32 * half < p.head_dim) {
      *reinterpret_cast<uint4*>(to + 32 * half) = make_uint4(word[0], word[1], word[2], word[3]);
    }
  }
}

// With fewer warps than octets of 64 columns: each takes one after the other, of the tiles that
// sm90/backward_round.cuh has not rounded. Not of packed sequences, or parts.
template <DType kDType, int kThreads, class Scale, class Params>
TC_DEVICE void convert_rest(const Params& p, u32 tiles, int panels, int octets) {
  u32 here = panels * octets, lane = threadIdx.x % 32, stride = gridDim.x * (kThreads / 32);
  u32 own = (gridDim.x - 1 - blockIdx.x) * (kThreads / 32) + threadIdx.x / 32;
#pragma unroll 1
  for (u32 round = (tiles * here + stride - 1) / stride; round > 0; round -= min(round, 32u)) {
    // Each lane looks at the tile of one of the next 32 octets.
    u32 index = (round - 1 - lane) * stride + own, tile = 0;
    bool remains = false;
    if (lane < round && index < tiles * here) {
      tile = rounded_tile(p, index / here);
      remains = __ldg(p.turns + tile) != kRounded;
    }
#pragma unroll 1
    for (u32 left = __ballot_sync(~0u, remains); left != 0; left &= left - 1) {
      int from = __ffs(left) - 1;
      u32 piece = __shfl_sync(~0u, index, from) % here;
      convert_octet<kDType, Scale>(p, __shfl_sync(~0u, tile, from), tiles, panels, piece / octets,
                                   piece % octets);
    }
  }
}

// The whole kernel, of kThreads threads. kRests: it may have fewer warps, see convert_rest().
template <DType kDType, int kThreads, class Scale, bool kRests = false, class Params>
TC_DEVICE void convert(const Params& p) {
  wait_for_previous_kernel();
  int octets = p.tile_rows / 8, panels = (p.tile_columns + 63) / 64, here = octets * panels;
  if constexpr (kRests) {
    u32 all = static_cast<u32>(p.tiles) * p.heads * (p.order == nullptr ? p.batch : 1);
    if (gridDim.x * (kThreads / 32) < all * here) {
      return convert_rest<kDType, kThreads, Scale>(p, all, panels, octets);
    }
  }
  // Last tiles first: their sums are still in the L2 cache.
  u32 index = (gridDim.x - 1 - blockIdx.x) * (kThreads / 32) + threadIdx.x / 32;
  u32 tile = index / here;
  int piece = static_cast<int>(index % here) / octets, octet = static_cast<int>(index % octets);
  u32 tiles = static_cast<u32>(p.tiles) * p.heads * (p.order == nullptr ? p.batch : 1);
  if (tile >= tiles) {
    if (p.part_sums != nullptr) join<JoinConfig<kDType>>(p, index - tiles * here);
    return;
  }
  convert_octet<kDType, Scale>(p, tile, tiles, panels, piece, octet);
}

}  // namespace sm90
}  // namespace torch_cubin
