// The parameter of sm90/e4m3_values.cu, shared by host and device code: values (batch, row, head,
// column) of e4m3 become (batch, head, column, key), as wgmma reads its second operand.
//
// sm90/e4m3_layout.cuh defines the order of the keys, and the offsets of packed sequences. Keys of
// a sequence begin at a multiple of `granule`; zeros fill the gap to the next one.
#pragma once

#include "forward_params.h"

namespace torch_cubin {

struct Sm90E4m3ValuesParams {
  const unsigned char* v;  // rows of 16-byte vectors
  unsigned char* out;      // [batch][head][column][keys]; packed: [head][column][keys]
  int* next;               // set to 0: Sm90AttentionParams::next
  tc_int64 stride[3];      // of v: batch, head, row; packed sequences have 0 for batch
  const int* cu_seqlens;   // null, or the first rows of packed sequences
  int seqlen;              // with cu_seqlens: the most rows of a sequence that count
  int total;               // with cu_seqlens: rows of v
  int sequences;           // with cu_seqlens
  int heads;               // of the keys
  int columns;             // of v and out, a multiple of 16
  int keys;                // of out, a multiple of granule; packed: of all sequences
  int blocks;              // of threads, of one head
  int granule;             // a multiple of 16
};

}  // namespace torch_cubin
