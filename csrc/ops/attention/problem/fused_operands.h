// The code that forward and backward share between their checks and their launches.
#pragma once

#include "kernels/attention/attention_params.h"
#include "ops/attention/problem/problem.h"

namespace torch_cubin {

// Sets the band and the numbers of the rule.
void fill_settings(AttentionParams& params, const AttentionSettings& settings);

// The arguments of one call, each tensor opened once and checked.
struct AttentionCall : AttentionArguments {
  explicit AttentionCall(AttentionArguments arguments);

  TensorView q, k, v;
  AttentionViews views;
  AttentionShape shape;
  AttentionSettings settings;
  ScalarType dtype, out_dtype;
  int32_t device_index;
};

// query, key, value and the mask as the fused kernels read them, copied if necessary. It owns the
// copies.
struct FusedOperands {
  explicit FusedOperands(const AttentionCall& call);

  // The parameters that do not depend on the part; fill() adds the rest.
  AttentionParams params(int64_t head_dim, int64_t head_dim_v) const;
  void fill(AttentionParams& params, int64_t part) const;

  const AttentionCall& call;
  Tensor query, key, value;
  OptionalTensor slopes, sinks, cu_seqlens_q, cu_seqlens_k;  // contiguous
  AttentionProblem problem;
  // Dropout's random numbers count all batches, but a launch only knows its own. So with dropout
  // and several batch dims, which might not merge, all operands are made contiguous.
  bool one_launch;

 private:
  OptionalTensor mask_;
};

}  // namespace torch_cubin
