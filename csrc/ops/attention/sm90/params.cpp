#include "ops/attention/sm90/params.h"

#include <algorithm>

#include "kernels/attention/sm90/mask_params.h"
#include "ops/attention/problem/arguments.h"
#include "runtime/tensor_map.h"

namespace torch_cubin {
namespace {

constexpr int64_t kPanel = 64;  // columns of a box of 16-bit types: 128 bytes, the swizzle's
constexpr int64_t kClearingBlocks = 32;
constexpr int64_t kTransposingThreads = 8;  // that write adjacent groups
// Of packed sequences: queries whose tiles are ordered by length, and so share the L2 cache.
constexpr int kRowsTogether = 32768;

static_assert(kOpenSide == kNoBound, "one encoding of an open band");

struct Box {
  MapType type;
  int64_t bytes;  // of an element
  int64_t columns, rows;
  MapSwizzle swizzle;
};

// The L2 cache loads as much around what a box reads. Where a row's neighbours are rows of other
// heads, whose blocks load them at the same time, it is not more than the row.
MapL2Promotion promotion_of(const Box& box, const Sm90MapRows& rows) {
  const int64_t bytes = rows.columns * box.bytes;
  const bool adjacent = rows.stride[2] == rows.columns || rows.rows == 1;
  if (adjacent || bytes >= 256) return MapL2Promotion::k256Bytes;
  return bytes >= 128 ? MapL2Promotion::k128Bytes : MapL2Promotion::k64Bytes;
}

void encode(Sm90AttentionMap& out, const Box& box, const Sm90MapRows& rows, const Device& device) {
  const MapL2Promotion promotion = promotion_of(box, rows);
  const auto dim = [&](int64_t size, int64_t stride, int64_t box_size) {
    // The stride of a single index is arbitrary.
    return MapDim{static_cast<uint64_t>(size),
                  static_cast<uint64_t>(size == 1 ? 16 : stride * box.bytes),
                  static_cast<uint32_t>(box_size)};
  };
  const int64_t row = rows.rows == 1 ? 16 / box.bytes : rows.stride[2];  // likewise
  const MapDim columns = dim(rows.columns, 1, box.columns);
  const MapDim heads = dim(rows.heads, rows.stride[1], 1);
  if (rows.packed) {
    const int64_t wrap = (int64_t{1} << 35) / box.bytes;  // see sm90/forward_params.h
    encode_tiled_map(&out, rows.data, box.type, box.swizzle,
                     {columns, dim(kRaggedRows, row, box.rows), heads, dim(kMostPackedRows, row, 1),
                      dim(kMostPackedRows, wrap - row, 1)},
                     device.index, promotion);
    return;
  }
  encode_tiled_map(&out, rows.data, box.type, box.swizzle,
                   {columns, dim(rows.rows, row, box.rows), heads,
                    dim(rows.batch, rows.stride[0], 1), dim(1, 0, 1)},
                   device.index, promotion);
}

}  // namespace

void encode_sm90_map(Sm90AttentionMap& out, const AttentionRow& kernel, const Sm90MapRows& rows,
                     int64_t box_rows, const Device& device) {
  const MapType type = kernel.dtype == kAttendFloat16 ? MapType::kFloat16 : MapType::kBFloat16;
  encode(out, {type, 2, kPanel, box_rows, MapSwizzle::k128Bytes}, rows, device);
}

void encode_sm90_byte_map(Sm90AttentionMap& out, const Sm90MapRows& rows, int64_t box_columns,
                          int64_t box_rows, const Device& device) {
  const MapSwizzle swizzle = box_columns == 128 ? MapSwizzle::k128Bytes : MapSwizzle::k64Bytes;
  encode(out, {MapType::kUInt8, 1, box_columns, box_rows, swizzle}, rows, device);
}

Sm90Lengths sm90_lengths(const AttentionParams& all) {
  Sm90Lengths lengths{};
  lengths.cu_seqlens_q = all.cu_seqlens_q;
  lengths.cu_seqlens_k = all.cu_seqlens_k;
  lengths.seqlen_q = all.seqlen_q;
  lengths.seqlen_k = all.seqlen_k;
  lengths.first = all.first;
  lengths.last = all.last;
  lengths.bottom_right = (all.flags & kAttendBottomRight) != 0;
  if (all.cu_seqlens_q != nullptr || !lengths.bottom_right) return lengths;
  // An open side stays as it is: far outside.
  const int shift = all.seqlen_k - all.seqlen_q;
  if (lengths.first != -kNoBound) lengths.first += shift;
  if (lengths.last != kNoBound) lengths.last += shift;
  return lengths;
}

Sm90ScoreRule sm90_score_params(const AttentionParams& all) {
  Sm90ScoreRule score{};
#define TC_COPIED(type, name) score.name = all.name;
  TC_SCORE_TENSORS(TC_COPIED)
#undef TC_COPIED
  score.alibi_stride = all.alibi_stride;
  score.drop_below = all.drop_below;
  copy_score_numbers(score, all, [](float x) { return x; });
  return score;
}

void fill_sm90_gradients(Sm90BackwardParams& params, const AttentionRow& row,
                         const AttentionParams& all, const Sm90Rows& rows, const Device& device) {
  const auto& grad_stride = all.grad_out_stride;
  encode_sm90_map(params.grad_out, row,
                  rows.of_queries(all, all.grad_out, grad_stride, all.head_dim_v), row.rows,
                  device);
  if (row.head_dim <= 128) {  // wider kernels store dk and dv without maps
    encode_sm90_map(params.dk_map, row, rows.of_keys(all, all.dk, all.dk_stride, all.head_dim),
                    kMapRows, device);
    encode_sm90_map(params.dv_map, row, rows.of_keys(all, all.dv, all.dv_stride, all.head_dim_v),
                    kMapRows, device);
  }
  params.grad_out_rows = all.grad_out;
  params.dq = all.dq;
  params.dk = all.dk;
  params.dv = all.dv;
  std::copy_n(all.grad_out_stride, 3, params.grad_out_stride);
  std::copy_n(all.dq_stride, 3, params.dq_stride);
  std::copy_n(all.dk_stride, 3, params.dk_stride);
  std::copy_n(all.dv_stride, 3, params.dv_stride);
  if (rows.packed) {
    for (tc_int64* stride : {params.out_stride, params.grad_out_stride, params.dq_stride,
                             params.dk_stride, params.dv_stride}) {
      stride[0] = 0;
    }
  }
  params.tile_rows = static_cast<int>(row.rows);
  params.tile_keys = static_cast<int>(row.columns);
  params.tile_columns = static_cast<int>(row.head_dim);
  params.head_dim = all.head_dim;
  params.scale = all.scale;
  params.unit = static_cast<float>(all.scale * kLog2e);
}

void check_16_bit(const AttentionRow& row) {
  if (row.dtype > kAttendBFloat16) KernelFields(*row.kernel).refuse("math", "a 16-bit type");
}

Sm90EmptyRows sm90_empty_rows(void* data, const tc_int64 (&stride)[3], int64_t heads,
                              int64_t columns, bool of_keys) {
  return {data,
          {stride[1], stride[2]},
          static_cast<int>(heads),
          static_cast<int>(columns / 8),
          of_keys ? 1 : 0};
}

void Sm90TileOrder::make_of_queries(PackageKernel& kernel, const Device& device,
                                    const AttentionRow& row, const AttentionParams& all) const {
  Sm90OrderParams params{};
  params.rows_together = kRowsTogether;
  params.logsumexp = all.logsumexp;
  params.logsumexp_head = all.total_q;
  params.empty_rows[0] = sm90_empty_rows(all.out, all.out_stride, all.heads, all.head_dim_v, false);
  make(kernel, device, row, all, params);
}

void Sm90TileOrder::make(PackageKernel& kernel, const Device& device, const AttentionRow& row,
                         const AttentionParams& all, Sm90OrderParams& params) const {
  params.tile_rows = static_cast<int>(row.rows);
  params.tile_columns = static_cast<int>(row.columns);
  params.lengths = sm90_lengths(all);
  params.order = data();
  params.batch = all.batch;
  params.heads = all.heads;
  params.total_q = all.total_q;
  params.total_k = all.total_k;
  params.capacity = static_cast<int>(capacity_);
  params.blocks = static_cast<int>(sm90_blocks(device));
  launch(kernel, {1 + kClearingBlocks}, device, params);
}

Sm90Descale sm90_descale(const std::optional<TensorView>& view) {
  if (!view) return {};
  return {static_cast<const float*>(view->data()), {view->strides[0], view->strides[1]}};
}

void transpose_keys(PackageKernel& kernel, const Device& device, const AttentionParams& all,
                    const Sm90Rows& rows, Sm90E4m3ValuesParams& params) {
  const int64_t heads = all.heads / all.group, batch = rows.packed ? 1 : all.batch;
  params.cu_seqlens = all.cu_seqlens_k;
  params.seqlen = all.seqlen_k;
  params.total = static_cast<int>(rows.k);
  params.sequences = all.batch;
  params.heads = static_cast<int>(heads);
  const int64_t groups = ceil_div(params.keys / kTransposedGroup, kTransposingThreads);
  const int64_t threads = groups * kTransposingThreads * (params.columns / 4);
  params.blocks = static_cast<int>(ceil_div(threads, kernel.entry().block[0]));
  const int64_t blocks = batch * heads * params.blocks;
  check_blocks(blocks);
  launch(kernel, {blocks}, device, params);
}

namespace {

// Whether rows of a mask begin with whole vectors of 16 bytes. `size`: of a number.
bool begins_with_vectors(const void* mask, const tc_int64 (&stride)[4], int64_t size) {
  bool whole = stride[3] == 1 && reinterpret_cast<uintptr_t>(mask) % 16 == 0;
  for (int dim = 0; dim < 3; ++dim) whole &= stride[dim] * size % 16 == 0;
  return whole;
}

}  // namespace

Sm90MaskGrid::Sm90MaskGrid(const AttentionParams& all, int64_t own_rows, int64_t own_columns)
    : tile_rows(own_rows), tile_columns(own_columns) {
  const auto size = [&](int dim, int64_t all_of) {
    return all.mask_stride[dim] == 0 ? int64_t{1} : all_of;
  };
  batch = size(0, all.batch);
  heads = size(1, all.heads);
  rows = size(2, all.seqlen_q);
  planes = batch * heads;
  tiles = ceil_div(rows, tile_rows);
  blocks = ceil_div(all.seqlen_k, tile_columns);
  chunks = ceil_div(blocks, kMaskTileBlocks);
}

void Sm90MaskGrid::strides(tc_int64 (&out)[3], int64_t lines, int64_t size) const {
  out[0] = batch == 1 ? 0 : heads * lines * size;
  out[1] = heads == 1 ? 0 : lines * size;
  out[2] = rows == 1 ? 0 : size;
}

Sm90AddedMaskCall::Sm90AddedMaskCall(const AttentionParams& all, AttentionDtype dtype,
                                     const Sm90MaskGrid& grid)
    : grid_(grid) {
  const bool floats = (all.flags & kAttendFloatMask) != 0;
  const int64_t size = floats ? 4 : 2, vector = 16 / size;
  params_.mask = all.mask;
  params_.floats = floats;
  params_.minus_infinity = minus_infinity(floats, dtype);
  grid.fill(params_, all);
  result_.values = all.mask;
  result_.floats = floats;
  std::copy_n(all.mask_stride, 3, result_.stride);
  if (begins_with_vectors(all.mask, all.mask_stride, size)) return;
  const int64_t columns = ceil_div(all.seqlen_k, vector) * vector;
  params_.copy_columns = static_cast<int>(columns);
  copied_ = grid.planes * grid.rows * columns * size;
  grid.strides(result_.stride, grid.rows, columns);
}

Sm90AddedMask Sm90AddedMaskCall::launch(PackageKernel& kernel, const Device& device, int* next,
                                        unsigned char* classes, int64_t classes_of_tile,
                                        char* copies) {
  if (copied_ > 0) result_.values = params_.copies = copies;
  params_.next = next;
  params_.classes = classes;
  params_.classes_of_tile = static_cast<int>(classes_of_tile);
  torch_cubin::launch(kernel, {grid_.grid()}, device, params_);
  return result_;
}

}  // namespace torch_cubin
