// Masks for attention on Hopper: their layout by tiles and blocks of keys, for both sorts and
// directions, and, for the forward, csrc/kernels/attention/sm90/added_mask.cu and the copy that it
// may make.
#pragma once

#include "kernels/attention/sm90/added_mask_params.h"
#include "kernels/attention/sm90/forward_params.h"
#include "ops/attention/plan/backend.h"
#include "ops/common/launch.h"

namespace torch_cubin {

// The largest copy of a mask's numbers: calls that need more use the portable kernels, which read
// the mask where it is.
constexpr int64_t kMostMaskBytes = int64_t{1} << 32;

// The batches, heads and rows of a mask, by blocks of keys.
struct Sm90MaskGrid {
  Sm90MaskGrid(const AttentionParams& all, int64_t tile_rows, int64_t tile_columns);

  // The common parameters of the kernels that convert a mask.
  template <class Params>
  void fill(Params& params, const AttentionParams& all) const {
    for (int dim = 0; dim < 4; ++dim) params.stride[dim] = all.mask_stride[dim];
    params.heads = static_cast<int>(heads);
    params.rows = static_cast<int>(rows);
    params.columns = all.seqlen_k;
    params.tile_rows = static_cast<int>(tile_rows);
    params.tile_columns = static_cast<int>(tile_columns);
    params.tiles = static_cast<int>(tiles);
    params.blocks = static_cast<int>(blocks);
    params.chunks = static_cast<int>(chunks);
  }

  // Strides of batch, head and line; 0 for dims of size 1 in the mask. `lines` of `size` elements a
  // head.
  void strides(tc_int64 (&out)[3], int64_t lines, int64_t size) const;

  int64_t grid() const { return planes * tiles * chunks; }

  int64_t tile_rows, tile_columns;
  int64_t batch, heads, rows, planes;  // planes: batch * heads
  int64_t tiles, blocks, chunks;       // of rows, of keys, of kMaskTileBlocks blocks
};

// The bits of a mask's -inf. `dtype`: of the tensors, and of a mask that is not float32.
inline unsigned minus_infinity(bool floats, AttentionDtype dtype) {
  return floats ? 0xff800000u : dtype == kAttendFloat16 ? 0xfc00u : 0xff80u;
}

class Sm90AddedMaskCall {
 public:
  Sm90AddedMaskCall(const AttentionParams& all, AttentionDtype dtype, const Sm90MaskGrid& grid);

  // Bytes of the copy; 0 if the mask is read directly.
  int64_t copied_bytes() const { return copied_; }

  // `next`, `classes`, `classes_of_tile`: see Sm90AddedMaskParams. `copies`: copied_bytes(),
  // aligned to 16. Returns the parameter of the attention kernel.
  Sm90AddedMask launch(PackageKernel& kernel, const Device& device, int* next,
                       unsigned char* classes, int64_t classes_of_tile, char* copies);

 private:
  Sm90MaskGrid grid_;
  int64_t copied_ = 0;
  Sm90AddedMaskParams params_{};
  Sm90AddedMask result_{};
};

}  // namespace torch_cubin
