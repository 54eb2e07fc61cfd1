// One sequence on Hopper: its lengths and band, and the offset of its rows, packed among others or
// not.
#pragma once

#include "common/hopper.cuh"
#include "forward_params.h"

namespace torch_cubin {
namespace sm90 {

// The position of a row in a tensor map: row r is at {place + r, head, batch, wrap}
// (sm90/forward_params.h).
struct MapPlace {
  int place, batch;
};

struct RowRange {
  int begin, count;

  TC_DEVICE RowRange(const int* offsets, int longest, int sequence) {
    begin = __ldg(offsets + sequence);
    // A bound that is too small must not lead outside of the buffers that it sized.
    count = max(0, min(__ldg(offsets + sequence + 1) - begin, longest));
  }
};

struct Sm90Sequence {
  int rows, columns;
  int first, last;   // row i attends to columns i + first .. i + last
  int q_row, k_row;  // the first ones, in packed tensors
  MapPlace q, k;
  int wrap;

  Sm90Sequence() = default;

  // For equal lengths: nothing is read.
  static TC_DEVICE Sm90Sequence of_equals(const Sm90Lengths& p, int batch) {
    Sm90Sequence s;
    s.rows = p.seqlen_q;
    s.columns = p.seqlen_k;
    s.first = p.first;
    s.last = p.last;
    s.q_row = s.k_row = s.wrap = 0;
    s.q = s.k = {0, batch};
    return s;
  }

  TC_DEVICE Sm90Sequence(const Sm90Lengths& p, int sequence)
      : Sm90Sequence(of_equals(p, sequence)) {
    if (p.cu_seqlens_q == nullptr) return;
    RowRange own_rows(p.cu_seqlens_q, p.seqlen_q, sequence);
    RowRange own_columns(p.cu_seqlens_k, p.seqlen_k, sequence);
    rows = own_rows.count;
    columns = own_columns.count;
    q_row = own_rows.begin;
    k_row = own_columns.begin;
    q = {kRaggedRows - rows, q_row + rows};
    k = {kRaggedRows - columns, k_row + columns};
    wrap = kRaggedRows;
    if (p.bottom_right) {  // an open side stays unchanged: far outside
      if (first > -kOpenSide) first += columns - rows;
      if (last < kOpenSide) last += columns - rows;
    }
  }
};

}  // namespace sm90
}  // namespace torch_cubin
