#include "ops/attention/sm90/mask.h"

#include <algorithm>

#include "kernels/attention/sm90/mask_params.h"

namespace torch_cubin {
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
