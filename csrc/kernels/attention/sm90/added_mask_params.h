// The parameter of the kernel of sm90/added_mask.cu, shared by host and device code.
#pragma once

typedef long long tc_int64;  // device code includes no <cstdint>

namespace torch_cubin {

struct Sm90AddedMaskParams {
  const void* mask;  // 2 bytes a number, or 4
  // Null if rows begin with whole vectors of 16 bytes. Else the copies to write, whose rows do:
  // [batch][head][row][copy_columns].
  void* copies;
  unsigned char* classes;   // of Sm90MaskTiles: [batch][head][tile][classes_of_tile]
  int* next;                // set to 0
  tc_int64 stride[4];       // batch, head, row, key; in elements
  int floats;               // 4 bytes a number
  unsigned minus_infinity;  // the bits of -inf
  int copy_columns;
  int heads, rows, columns;
  int tile_rows;  // as in Sm90MaskParams from here on
  int tile_columns;
  int tiles;
  int blocks;
  int chunks;
  int classes_of_tile;
};

}  // namespace torch_cubin
