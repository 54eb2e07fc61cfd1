// The requirements of the attention ops on their arguments, checked in the same manner on every
// device, and the sizes and layouts that follow from them.
#pragma once

#include <cstdint>
#include <nlohmann/json_fwd.hpp>
#include <optional>

#include "ops/attention/problem/options.h"
#include "ops/common/shape.h"
#include "pytorch/tensor.h"

namespace torch_cubin {

// Limit for the rows of all packed sequences: the end of a sequence is an index in its tensor map,
// and kernels count beyond it in 32 bits.
constexpr int64_t kMostPackedRows = 0x7fff0000;

// Whether each head of key or value can serve the same number of heads of query: none serves none.
inline bool heads_divide(int64_t of_query, int64_t heads) {
  return heads == 0 ? of_query == 0 : of_query % heads == 0;
}

// The problem's sizes. With cu_seqlens (`packed`) tensors are (rows of all sequences, heads,
// head_dim): then batch is the number of sequences, and the lengths are upper bounds.
struct AttentionShape {
  Shape batch;             // leading dims before the heads, broadcast
  bool has_heads = false;  // whether the output has a dim of heads
  bool packed = false;
  int64_t heads = 1, kv_heads = 1;  // kv_heads divides heads
  int64_t seqlen_q = 0, seqlen_k = 0;
  int64_t total_q = 0,
          total_k = 0;  // rows of the tensors: of one sequence, or of all packed ones
  int64_t head_dim = 0, head_dim_v = 0;
  Shape out, logsumexp;

  int64_t group() const { return kv_heads > 0 ? heads / kv_heads : 1; }
};

// Throws [input]; `op` names the op in messages.
AttentionShape check_attention(const char* op, const TensorView& query, const TensorView& key,
                               const TensorView& value, const AttentionViews& options);

// Also throws [input] if an option is out of range.
AttentionSettings attention_settings(const char* op, const AttentionShape& shape,
                                     const AttentionViews& options);

// Checks grad_out, out and logsumexp of a backward against the shapes of its forward.
void check_attention_backward(const char* op, const AttentionShape& shape, const TensorView& query,
                              const TensorView& grad_out, const TensorView& out,
                              const TensorView& logsumexp);

// All of these checks for a call whose tensors are described: {"op": ..., "tensors": {name: ...},
// "options": {name: number}}. Throws [input].
void check_described_attention(const nlohmann::json& call);

// Strides of a fresh tensor of `sizes` whose dims have the same order in memory as those of `like`,
// largest stride first (ties: the order of the dims). Contiguous instead if `like` differs in a
// size other than the last, if its elements overlap (gaps are allowed, as in a part of a packed
// tensor), or if its last dim is not the innermost.
void output_strides(const TensorView& like, const Shape& sizes, int64_t* strides);

}  // namespace torch_cubin
