// The parameter of the kernels of sm90/forward.cu, shared by host and device code, and definitions
// that the backward shares.
//
//   out[b, h, i, :] = sum_j P[i, j] v[b, h / group, j, :],   P = softmax_j(scale * q_i . k_j)
//
// where row i attends to column j if  i + first <= j <= i + last  and j < seqlen_k. A row that
// attends to no column gives zeros, and logsumexp -inf.
//
// q, k and v are described by tensor maps of 5 dims, {head_dim, rows, heads, batch, 1}, 128-byte
// swizzle; missing columns and rows are read as zeros. Boxes:
//   q:       {64, 64, 1, 1, 1}
//   k and v: {64, tile N, 1, 1, 1}
//
// Maps of packed sequences (cu_seqlens) have the dims {head_dim, rows, heads, rows, wrap}, so that
// rows past the end of a sequence, which belong to the next one, are also read as zeros. Row r of
// n, which begin at row b of the tensor, is element (kRaggedRows - n + r, b + n, kRaggedRows) of
// the dims rows, rows and wrap: out of bounds if r >= n. A step of wrap is 2^35 bytes less a row,
// so that kRaggedRows of them and as many rows are 2^65 bytes, which is 0 in 64-bit addresses.
#pragma once

#include "../../common/score_params.h"

namespace torch_cubin {

struct alignas(64) Sm90AttentionMap {
  unsigned long long words[16];
};

// Assignment of the tiles to the blocks (Sm90AttentionParams::schedule).
enum Sm90TileSchedule {
  // Every block takes every n-th tile, n the number of blocks: for tiles that all take the same
  // time.
  kRoundRobin = 0,
  // Every n-th pair of a head's tiles, the longest with the shortest: for causal attention, and for
  // tiles whose keys all fit in shared memory.
  kInPairs = -1,
  // All heads' last tiles first, in rounds of a tile a block, every second round backwards: for
  // windows, whose first tiles are short and so even out the end, and where pairs would leave
  // blocks idle.
  kByQueries = -2,
  // A positive number h: tiles of h heads at a time, the last queries first, each to the block with
  // the least work. With `next` a block takes one when it needs it. Otherwise every block computes
  // the whole list, 100 ns or more for each tile, so an average tile must take much longer than 15
  // us.
};

constexpr int kRaggedRows = 1 << 30;  // of a packed map's dim of rows

constexpr int kOpenSide = 1 << 30;  // first = -kOpenSide, last = kOpenSide: no band

// Lengths of the sequences, and the band.
struct Sm90Lengths {
  const int* cu_seqlens_q;  // null: all are equally long. Else batch + 1 first rows
  const int* cu_seqlens_k;  // null if cu_seqlens_q is
  int seqlen_q, seqlen_k;   // at least 1; with offsets: the most rows of a sequence that count
  int first, last;
  int bottom_right;  // with offsets: the band is shifted by columns - rows of a sequence
};

// The tiles of packed sequences, longest first. Only the device knows it: sm90/order.cu writes it.
struct Sm90OrderPlace {
  int sequence, tile;
};

struct Sm90Order {
  int next;           // tiles taken so far, of all heads
  int count;          // places of one head
  int wrong_offsets;  // cu_seqlens are invalid for the tensors' rows: there are no places
  int last_heads;     // the last heads, whose tiles the forward takes in one order; at least 1
  Sm90OrderPlace places[1];  // and more
};

// Modifications of scores and weights in `general` kernels.
struct Sm90ScoreRule {
  TC_SCORE_TENSORS(TC_SCORE_POINTER)
  tc_int64 alibi_stride;
  int drop_below;  // 0: no dropout
  TC_SCORE_NUMBERS(TC_SCORE_FLOAT)
};

// NOTE: the classes of a boolean mask for a tile of queries and a block of keys have two encodings.
// Forward: 0 = fully hidden. Backward: 0 = fully visible. Each loop tests its 0 first.

// The forward's: bit 0 is set if some key is visible, bit 1 if other keys are hidden. Only blocks
// with bit 0 are visited.
enum Sm90MaskClass {
  kMaskHidesAll = 0,
  kMaskHidesNone = 1,
  kMaskHidesSome = 3,
};
constexpr int kMaskWordBlocks = 16;  // number of classes in one word

// The backward's: a bit for each 64 keys of the work item (of one warpgroup or, in pairs, of one
// block) of which some are hidden; or all are hidden, and the step is skipped.
enum Sm90StepClass {
  kStepHidesNone = 0,
  kStepHidesInFirst = 1,
  kStepHidesInSecond = 2,
  kStepHidesAll = 4,
};
constexpr int kStepClassBits = 3;

// A mask in the layout of sm90/mask.cu or, if it is additive, sm90/added_mask.cu, for a kernel's
// tiles.
struct Sm90MaskTiles {
  // For a boolean mask, else null: a word for each row, block of keys and lane t of a quad. Its bit
  // e is 0 if the block's key 8 * (e / 2) + 2 * t + e % 2 is hidden: the keys of that lane's
  // scores, in their order.
  const unsigned* words;
  // Null without a mask. For each tile of queries, words of kMaskWordBlocks blocks of keys, two
  // bits each: a Sm90MaskClass. A block to which a mask adds a nonzero number counts as partly
  // hidden.
  const unsigned* classes;
  tc_int64 word_stride[3];   // batch, head, row
  tc_int64 class_stride[3];  // batch, head, tile of queries
};

// Numbers to add to the logits, of q's type or floats. Rows begin with whole vectors of 16 bytes.
struct Sm90AddedMask {
  const void* values;
  tc_int64 stride[3];  // batch, head, row; in elements
  int floats;
};

struct Sm90AttentionParams {
  Sm90AttentionMap q, k, v;
  void* out;         // rows of 16-byte vectors
  float* logsumexp;  // null, or a float a row
  Sm90Order* order;  // of packed sequences, else null
  // Null, or the number of tiles that blocks have taken, which an earlier kernel has set to 0: for
  // kernels with such a predecessor, those that read masks and those of sm90/e4m3.cu.
  int* next;
  tc_int64 out_stride[3];        // batch, head, row; in elements; packed sequences have 0 for batch
  tc_int64 logsumexp_stride[2];  // batch, head
  Sm90Lengths lengths;
  int batch, heads, group;
  int head_dim_v;  // columns of out, a multiple of 8
  int tiles;       // along the queries, if all sequences are equally long
  // A Sm90TileSchedule, or a positive number of heads: then the grid has at most 160 teams.
  int schedule;
  // The factor from scores to powers of two, a positive normal number: scale * log2(e), or log2(e)
  // if `score` defines the logits.
  float unit;
  int has_rule;         // for `general` kernels: whether scale, softcap or ALiBi of `score` apply
  Sm90ScoreRule score;  // for `general` kernels
  Sm90MaskTiles mask;   // for kernels that read a mask
  Sm90AddedMask added;  // for kernels that add a mask, with mask.classes
  // The scores' factor before `added` is added; 1 with a rule. The sum is a natural logit.
  float added_scale;
  // Queries that a sequence's first tile has less than the others; the last one then has all of its
  // own. 0 with a mask, ALiBi or packed sequences.
  int fewer;
};

}  // namespace torch_cubin
