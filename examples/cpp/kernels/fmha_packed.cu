// Fused attention over packed QKV, head_dim 64: one warp a query, softmax and both products on the
// fly.
//   nvcc -cubin -arch=sm_90a fmha_packed.cu -o fmha_packed.sm_90a.cubin
//   xxd -i fmha_packed.sm_90a.cubin > ../fmha_packed_sm90a.cubin.cpp
#include <cuda_fp16.h>

#include "../fmha_params.h"

extern "C" __global__ void __launch_bounds__(128) fmha_packed(FmhaParams params) {
  const int lane = threadIdx.x % 32;
  const int query = blockIdx.x * 4 + threadIdx.x / 32, head = blockIdx.y, batch = blockIdx.z;
  if (query >= params.seqlen) return;
  const auto* qkv = static_cast<const half2*>(params.qkv);
  const int64_t row = params.row_stride / 2, heads = params.heads;
  const int64_t first = batch * params.seqlen * row + head * 32 + lane;
  const float2 q = __half22float2(qkv[first + query * row]);
  float most = -INFINITY, total = 0;
  float2 out = {0, 0};
  const int keys = params.is_causal ? query + 1 : params.seqlen;
  for (int key = 0; key < keys; ++key) {
    const float2 k = __half22float2(qkv[first + key * row + heads * 32]);
    float score = q.x * k.x + q.y * k.y;
    for (int i = 16; i > 0; i /= 2) score += __shfl_xor_sync(~0u, score, i);
    score *= params.scale;
    const float higher = fmaxf(most, score);
    const float keep = __expf(most - higher), weight = __expf(score - higher);
    const float2 v = __half22float2(qkv[first + key * row + 2 * heads * 32]);
    out.x = out.x * keep + weight * v.x;
    out.y = out.y * keep + weight * v.y;
    total = total * keep + weight;
    most = higher;
  }
  auto* result = static_cast<half2*>(params.out);
  result[((batch * params.seqlen + query) * heads + head) * 32 + lane] =
      __floats2half2_rn(out.x / total, out.y / total);
}
