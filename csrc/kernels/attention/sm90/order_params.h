// The parameter of the kernels of sm90/order.cu, shared by host and device code.
#pragma once

#include "forward_params.h"

namespace torch_cubin {

// A tensor of packed sequences, whose rows that belong to no sequence are set to zeros, and all
// rows to NaN if cu_seqlens are invalid.
struct Sm90EmptyRows {
  void* data;          // null: none
  tc_int64 stride[2];  // head, row; in elements of 16 bits
  int heads;
  int vectors;  // of 16 bytes, in a row of a head
  int of_keys;  // whether its rows are those of the keys
};

struct Sm90OrderParams {
  Sm90Lengths lengths;
  Sm90Order* order;
  Sm90EmptyRows empty_rows[3];
  float* logsumexp;         // null, or [head][row], which is set to -inf in such rows
  tc_int64 logsumexp_head;  // between heads
  int heads;
  int batch;                    // sequences
  int total_q, total_k;         // rows of the tensors
  int tile_rows, tile_columns;  // queries and keys of a tile
  int capacity;                 // of `order`
  int rows_together;  // tiles of sequences that begin within this many queries follow each other
  int blocks;         // of the kernel that takes the tiles
};

}  // namespace torch_cubin
