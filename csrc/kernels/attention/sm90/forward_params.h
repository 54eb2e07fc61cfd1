// The one parameter of the kernels of sm90/forward.cu, shared by host and device code, and what it
// shares with those of the backward.
//
//   out[b, h, i, :] = sum_j P[i, j] v[b, h / group, j, :],   P = softmax_j(scale * q_i . k_j)
//
// where row i attends to column j if  i + first <= j <= i + last  and j < seqlen_k. A row that
// attends to nothing gives zeros, and logsumexp -inf.
//
// q, k and v are described by tensor maps of 5 dims, {head_dim, rows, heads, batch, 1}, 128-byte
// swizzle; columns and rows that do not exist are read as zeros. Boxes:
//   q:       {64, 64, 1, 1, 1}
//   k and v: {64, tile N, 1, 1, 1}
//
// Maps of packed sequences (cu_seqlens) have the dims {head_dim, rows, heads, rows, wrap}, so that
// rows past the end of a sequence, which belong to the next one, are read as zeros, too. Row r of
// n, which begin at row b of the tensor, is element (kRaggedRows - n + r, b + n, kRaggedRows) of
// the dims rows, rows and wrap: out of bounds where r >= n. A step of wrap is 2^35 bytes less a
// row, so that kRaggedRows of them and as many rows are 2^65 bytes, nothing in 64-bit addresses.
#pragma once

namespace torch_cubin {

typedef long long tc_int64;  // device code includes no <cstdint>

struct alignas(64) Sm90AttentionMap {
  unsigned long long words[16];
};

// How the tiles are scheduled to the blocks (Sm90AttentionParams::schedule).
enum Sm90TileSchedule {
  // Every block takes every so-many-th tile: for tiles that all take the same time.
  kRoundRobin = 0,
  // Every so-many-th pair of a head's tiles, the longest with the shortest: for causal attention.
  kInPairs = -1,
  // All heads' last tiles first, and every block takes every so-many-th of them: for windows, whose
  // first tiles are short and so even out the end.
  kByQueries = -2,
  // A positive number: tiles of so many heads at a time, the last queries first, each to the block
  // with the least to do. With `next` a block takes one when it needs it. Without, every block
  // makes the whole list, 100 ns or more for each tile, so that an average tile must take much
  // longer than 15 us.
};

constexpr int kRaggedRows = 1 << 30;  // of a packed map's dim of rows

constexpr int kOpenSide = 1 << 30;  // first = -kOpenSide, last = kOpenSide: no band

// How long sequences are, and the band.
struct Sm90Lengths {
  const int* cu_seqlens_q;  // null: all are equally long. Else batch + 1 rows at which they begin
  const int* cu_seqlens_k;  // null where cu_seqlens_q is
  int seqlen_q, seqlen_k;   // at least 1; with offsets: the most rows of a sequence that count
  int first, last;
  int bottom_right;  // with offsets: the band is shifted by columns - rows of a sequence
};

// The tiles of packed sequences, longest first, which only the device knows: sm90/order.cu makes
// it.
struct Sm90OrderPlace {
  int sequence, tile;
};

struct Sm90Order {
  int next;           // the tiles that have been taken, of all heads
  int count;          // places, of one head
  int wrong_offsets;  // cu_seqlens are no offsets of the tensors' rows: there are no places
  int last_heads;     // the last ones, whose tiles the forward takes in one order; at least 1
  Sm90OrderPlace places[1];  // and more
};

// What the `general` kernels do to scores, and to weights: the fields of AttentionParams of these
// names.
struct Sm90ScoreRule {
  const tc_int64* dropout_seed;
  const float* alibi_slopes;
  const float* sinks;
  tc_int64 alibi_stride;
  int drop_below;  // 0: no dropout
  float scale, softcap, keep_scale;
};

// NOTE: what a boolean mask is to a tile of queries and a block of keys has two numberings. 0 hides
// all of it in the forward, and nothing of it in the backward. Each is what its loop asks first.

// The forward's: bit 0 is set where some key is visible, bit 1 where some others are hidden. Only
// blocks with bit 0 are visited.
enum Sm90MaskClass {
  kMaskHidesAll = 0,
  kMaskHidesNone = 1,
  kMaskHidesSome = 3,
};
constexpr int kMaskWordBlocks = 16;  // whose classes are in one word

// The backward's: a bit for each 64 keys of the work, those of one warpgroup or, in pairs, of one
// block, of which some are hidden; or that all are, in which case the step is skipped.
enum Sm90StepClass {
  kStepHidesNone = 0,
  kStepHidesInFirst = 1,
  kStepHidesInSecond = 2,
  kStepHidesAll = 4,
};
constexpr int kStepClassBits = 3;

// A mask as sm90/mask.cu or, where it is added to the logits, sm90/added_mask.cu lays it out for a
// kernel's tiles.
struct Sm90MaskTiles {
  // Of a boolean mask, else null: for each row, block of keys and lane t of a quad a word. Its bit
  // e is 0 where the block's key 8 * (e / 2) + 2 * t + e % 2 is hidden: the keys whose scores that
  // lane has, in their order.
  const unsigned* words;
  // Null without a mask. For each tile of queries, words of kMaskWordBlocks blocks of keys, two
  // bits each: a Sm90MaskClass. A block in which a mask adds something but 0 is of the class that
  // hides some.
  const unsigned* classes;
  tc_int64 word_stride[3];   // batch, head, row
  tc_int64 class_stride[3];  // batch, head, tile of queries
};

// What kernels add to the logits, of q's type or floats. Rows begin with whole vectors of 16 bytes.
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
  // Null, or how many tiles blocks have taken, which a kernel before this one has made 0; of
  // kernels that have one before them: those that read masks and those of sm90/e4m3.cu.
  int* next;
  tc_int64 out_stride[3];        // batch, head, row; in elements; packed sequences have 0 for batch
  tc_int64 logsumexp_stride[2];  // batch, head
  Sm90Lengths lengths;
  int batch, heads, group;
  int head_dim_v;  // columns of out, a multiple of 8
  int tiles;       // along the queries, where all sequences are equally long
  int schedule;    // a Sm90TileSchedule or a positive number of heads; at most 160 blocks
  // What brings scores to powers of two, a positive normal number: scale * log2(e), or log2(e)
  // where `score` says how scores become logits.
  float unit;
  int has_rule;         // of `general` kernels: scale, softcap or ALiBi of `score` count
  Sm90ScoreRule score;  // of `general` kernels
  Sm90MaskTiles mask;   // of kernels that read a mask
  Sm90AddedMask added;  // of those that add it, with mask.classes
  // What scores are multiplied by before `added` is added; 1 with a rule. The sum is a natural
  // logit.
  float added_scale;
};

}  // namespace torch_cubin
