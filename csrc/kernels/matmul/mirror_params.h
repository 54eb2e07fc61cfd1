// The parameter of the mirror kernels, shared by host and device code: square matrices, contiguous
// and one after the other, whose elements above the diagonal become those below it.
#pragma once

namespace torch_cubin {

struct MirrorParams {
  void* data;
  int n;      // rows and columns
  int tiles;  // rows and columns of tiles
};

}  // namespace torch_cubin
