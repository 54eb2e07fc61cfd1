// The one parameter of the kernel of sm90_mask.cu, shared by host and device code.
#pragma once

typedef long long tc_int64;  // device code includes no <cstdint>

namespace torch_cubin {

struct Sm90MaskParams {
  const unsigned char* mask;  // a byte a key: 0 hides
  unsigned* words;            // [batch][head][row][words_of_row]
  tc_int64 stride[4];         // batch, head, row, key; in bytes
  int heads, rows, columns;
  int words_of_row;   // a multiple of 4; bits past the columns become 0
  tc_int64 all_rows;  // batch * heads * rows
};

}  // namespace torch_cubin
