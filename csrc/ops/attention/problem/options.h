// What a user passes to attention besides query, key and value, and the same as numbers.
#pragma once

#include <cstdint>
#include <optional>

#include "pytorch/tensor.h"

namespace torch_cubin {

using OptionalTensor = std::optional<Tensor>;

// What a user passes besides the tensors that carry gradients; see the schemas in
// ops_attention.cpp.
struct AttentionOptions {
  OptionalTensor attn_mask;
  double dropout_p = 0;
  bool is_causal = false;
  OptionalTensor dropout_seed;
  std::optional<double> scale;
  bool enable_gqa = false;
  int64_t window_left = -1, window_right = -1;
  bool bottom_right = false;
  double softcap = 0;
  OptionalTensor alibi_slopes{}, sinks{}, cu_seqlens_q{}, cu_seqlens_k{};
  int64_t max_seqlen_q = 0, max_seqlen_k = 0;
  // Query, key and value of float8_e4m3fn; the output is then bfloat16. What they are multiplied
  // by: float32 (batch, heads of key), none: 1.
  bool e4m3 = false;
  OptionalTensor q_descale{}, k_descale{}, v_descale{};
};

// The same as numbers, ready for a kernel; defaults resolved, ranges checked.
struct AttentionSettings {
  double scale = 1;
  double softcap = 0;         // 0: none
  int first = 0, last = 0;    // row i sees columns i + first .. i + last (kNoBound: open)
  bool bottom_right = false;  // the band is shifted by seqlen_k - seqlen_q
  int drop_below = 0;         // dropout: a 16-bit random number below this drops a weight
  double keep_scale = 1;      // 1 / kept fraction; 0 where all are dropped
};

// AttentionSettings::keep_scale for a drop_below.
inline double keep_scale_of(int drop_below) {
  return drop_below < 65536 ? 65536.0 / (65536 - drop_below) : 0;
}

}  // namespace torch_cubin
