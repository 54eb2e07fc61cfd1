// The parameter of the kernel of sm90/mask.cu, shared by host and device code.
#pragma once

typedef long long tc_int64;  // device code includes no <cstdint>

namespace torch_cubin {

constexpr int kMaskTileBlocks = 4;  // blocks of keys that one block of threads converts
// The largest supported tiles.
constexpr int kMaskTileRows = 192, kMaskTileColumns = 128;

struct Sm90MaskParams {
  const unsigned char* mask;  // one byte for each key: 0 hides
  // Sm90MaskTiles (sm90/forward_params.h): [batch][head][row][block of keys][4] and
  // [batch][head][tile][1 + tile_rows / 64][classes_of_tile], with the mask's batches, heads and
  // rows: the classes of a tile, then those of each 64 queries of it.
  unsigned* words;
  unsigned char* classes;
  int* next;           // set to 0
  tc_int64 stride[4];  // batch, head, row, key; in bytes
  int heads, rows, columns;
  int tile_rows;        // a multiple of 64, at most kMaskTileRows
  int tile_columns;     // a multiple of 16, at most kMaskTileColumns
  int tiles;            // of rows
  int blocks;           // of keys, the last one possibly partial
  int chunks;           // of kMaskTileBlocks blocks
  int classes_of_tile;  // in bytes of kMaskTileBlocks blocks; a multiple of 4
};

}  // namespace torch_cubin
