// What the attention ops require of their arguments, checked alike on every device, and the sizes
// and layouts that follow.
#pragma once

#include <cstdint>
#include <nlohmann/json_fwd.hpp>
#include <optional>

#include "ops/attention/problem/options.h"
#include "ops/common/shape.h"
#include "pytorch/tensor.h"

namespace torch_cubin {

// All rows of packed sequences are fewer: the place behind a sequence is an index of its tensor
// map, and kernels count on from it in 32 bits.
constexpr int64_t kMostPackedRows = 0x7fff0000;

// The problem's sizes. With cu_seqlens (`packed`) tensors are (rows of all sequences, heads,
// head_dim): then batch is the number of sequences, and the lengths are upper bounds.
struct AttentionShape {
  Shape batch;             // leading dims before the heads, broadcast
  bool has_heads = false;  // whether the output has a dim of heads
  bool packed = false;
  int64_t heads = 1, kv_heads = 1;  // kv_heads divides heads
  int64_t seqlen_q = 0, seqlen_k = 0;
  int64_t total_q = 0,
          total_k = 0;  // rows of the tensors: of a sequence, or of all that are packed
  int64_t head_dim = 0, head_dim_v = 0;
  Shape out, logsumexp;

  int64_t group() const { return kv_heads > 0 ? heads / kv_heads : 1; }
};

// Throws [input]; `op` names the op in messages.
AttentionShape check_attention(const char* op, const TensorView& query, const TensorView& key,
                               const TensorView& value, const AttentionViews& options);

// Also throws [input] where an option is out of range.
AttentionSettings attention_settings(const char* op, const AttentionShape& shape,
                                     const AttentionViews& options);

// grad_out, out and logsumexp of a backward, against the shapes of its forward.
void check_attention_backward(const AttentionShape& shape, const TensorView& query,
                              const TensorView& grad_out, const TensorView& out,
                              const TensorView& logsumexp);

// All of these for a call whose tensors are described: {"op": ..., "tensors": {name: ...},
// "options": {name: number}}. Throws [input].
void check_described_attention(const nlohmann::json& call);

// Strides of a fresh tensor of `sizes` whose dims lie in memory as those of `like` do: in the order
// of its strides, largest first (ties: the order of the dims), where `like` has the same sizes but
// for the last, its dims lie one within the other (gaps are allowed, as a part of a packed tensor
// has them; no element is shared), and its last dim is the innermost; otherwise contiguous.
void output_strides(const TensorView& like, const Shape& sizes, int64_t* strides);

}  // namespace torch_cubin
